"""Where the behaviour policy's log-probabilities of a ratio come from, and how exact ratios must be.

Before the first update every ratio should be 1: what it is instead is rounding, which blurs the bound where the
loss clips. A run therefore prints how far its ratios are from 1 there, and stops where more than `SPREAD_SHARE`
of them are off by more than `spread_limit` of the way to the bound.

|ratio - 1| then, on the embedded model (48 images, four steps of cps, all weights tuned, on a CPU):

    bfloat16, roundings in place (`engine.rounding`)    below 1e-7
    bfloat16 as XLA compiles it by itself               4e-5 in the mean, 4% above 1e-4
    a bfloat16 sampler beside a float32 trainer         6e-5 in the mean, 17% above 1e-4 ("rollout")

The first two are the same with "rollout" and "recomputed". Where kernels depend on the batch, what was stored may
differ all the same; recomputed log-probabilities come from the batch that is trained.

Behind the first update bfloat16 is felt in any case, as each weight is rounded otherwise than before: one update
moved the log-ratio by 5e-4 rms, of which 8e-5 was rounding, and with a LoRA of rank 8 by 3e-6, with 5e-5 of
rounding. For several updates a step the clip range must be well above that.
(`pytest -s -m slow tests/engine/test_rounding.py -k embedded` prints these numbers.)
"""

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

# "rollout": stored when sampled. "recomputed": by the trainer, from the parameters that sampled, in the gradient's
# program with its batch. "current": those of the policy being trained, without gradient, so that every ratio is 1.
OldLogProbs = Literal["rollout", "recomputed", "current"]

# Of the distance from 1 to the bound: rounding decides what is clipped only of ratios this close to the bound.
SPREAD_LIMIT = 0.1
SPREAD_SHARE = 0.01  # of the ratios that may be further from 1 before the first update


def choose_old_log_probs(
    choice: Literal["auto"] | OldLogProbs,
    float32: bool,
    stale: bool,
    updates: int,
    stored: bool = True,
) -> OldLogProbs:
    """What a config's `old_log_probs` means.

    "auto" is "rollout" where sampler and trainer compute in float32. Where one of them does not, ratios to
    stored log-probabilities are off by rounding: "current" if that is allowed, else "recomputed".

    Args:
      choice: as configured.
      float32: whether both compute in float32.
      stale: whether fragments may have been sampled by an older version than the step starts from.
      updates: optimizer updates a step.
      stored: whether sampling computes any; else "auto" never is "rollout".

    Raises:
      ValueError: "current" where what is trained is not always what sampled.
    """
    fresh = not stale and updates == 1
    if choice == "auto":
        if float32 and stored:
            return "rollout"
        return "current" if fresh else "recomputed"
    if choice == "current" and not fresh:
        reason = "with asynchrony" if stale else f"with {updates} updates a step"
        others = "'recomputed' or 'rollout'" if stored else "'recomputed'"
        raise ValueError(
            f"old_log_probs is 'current', but {reason} the policy being trained is not the one that "
            f"sampled: set it to {others}"
        )
    return choice


def spread_terms(
    distance: Float[Array, "n"], bound: float, limit: float
) -> dict[str, Float32[Array, "n"]]:
    """Of each sample how far its ratio is from 1, and whether that is more than `limit` of the loss's bound."""
    far = distance > limit * bound
    return {"ratio_spread": distance, "over_spread_limit": far.astype(jnp.float32)}


def check_spread_limit(limit: float) -> None:
    """Raises ValueError for a limit that no ratio could keep, or that is no number."""
    if not 0 < limit < math.inf:
        raise ValueError(
            f"spread_limit is {limit}; it must be positive and finite, such as {SPREAD_LIMIT}"
        )
