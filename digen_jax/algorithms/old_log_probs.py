"""Sources of the old log-probabilities in a ratio, and the required precision of ratios.

Before the first update every ratio should be 1. Any difference is rounding, which blurs the bound at which the
loss clips. A run therefore logs the distance of its ratios from 1 at that time, and stops if more than
`SPREAD_SHARE` of them differ from 1 by more than `spread_limit` of the distance to the bound.

|ratio - 1| before the first update, on the embedded model (48 images, four cps steps, full fine-tuning, CPU):

    bfloat16, all roundings kept (`parallel.policy`)    below 1e-7
    bfloat16 as XLA compiles it by default              4e-5 in the mean, 4% above 1e-4
    a bfloat16 sampler with a float32 trainer           6e-5 in the mean, 17% above 1e-4 ("rollout")

The first two are the same with "rollout" and "recomputed". If kernels depend on the batch, stored log-probabilities
can still differ; recomputed ones come from the trained batch.

After the first update bfloat16 has an effect in any case, because each weight rounds differently than before. One
update moved the log-ratio by 5e-4 rms, of which 8e-5 was rounding, and with a LoRA of rank 8 by 3e-6, with 5e-5 of
rounding. With several updates per step the clip range must be well above that.
(Measured by an earlier version of `tests/parallel/test_rounding.py`.)
"""

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.errors import ConfigError

# "rollout": stored by the sampler. "recomputed": by the trainer, with the behavior policy's parameters, in the
# gradient's program with its batch. "current": of the policy being trained, without gradient; every ratio is 1.
OldLogProbs = Literal["rollout", "recomputed", "current"]

# Share of the distance from 1 to the bound: rounding affects clipping only for ratios this close to the bound.
SPREAD_LIMIT = 0.1
SPREAD_SHARE = 0.01  # share of the ratios that may be further from 1 before the first update


def choose_old_log_probs(
    choice: Literal["auto"] | OldLogProbs,
    float32: bool,
    stale: bool,
    updates: int,
    stored: bool = True,
) -> OldLogProbs:
    """Resolves a config's `old_log_probs`.

    "auto" is "rollout" if sampler and trainer compute in float32. If one of them does not, ratios to stored
    log-probabilities have rounding errors: then it is "current" if that is allowed, else "recomputed".

    Args:
      choice: Config value.
      float32: Whether both compute in float32.
      stale: Whether an older version than the step's first may have generated chunks.
      updates: Optimizer updates per step.
      stored: Whether sampling computes log-probabilities; if False, "auto" is never "rollout".

    Raises:
      ValueError: "current", although the trained policy may differ from the one that sampled.
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
    """Returns the distance of each sample's ratio from 1, and whether it exceeds `limit` of the loss's bound."""
    far = distance > limit * bound
    return {"ratio_spread": distance, "over_spread_limit": far.astype(jnp.float32)}


def check_ratio_spread(algorithm: Algorithm, sums: Mapping[str, Float[Array, ""]]) -> None:
    """Checks how far rounding moves the ratios of a step's first update, if the algorithm has ratios.

    For "divergence" these are the KLs to the behavior policy, which should be 0.

    Args:
      algorithm: Algorithm of the trainer.
      sums: Sums over chunks that were sampled with the same parameters that they are compared with.

    Raises:
      ConfigError: more than 1% of them are further from 1 than the configured share of their bound.
    """
    bound = algorithm.ratio_bound
    if bound is None:
        return
    weight = max(float(sums["weight"]), 1.0)
    mean, over = (float(sums[name]) / weight for name in ("ratio_spread", "over_spread_limit"))
    limit = algorithm.spread_limit * bound
    if over <= SPREAD_SHARE:
        return
    raise ConfigError(
        f"before the first update, where all ratios should be 1, rounding moves them by {mean:.1e} in the mean, "
        f"and {over:.1%} of them by more than {limit:.1e}, which is config.algorithm.spread_limit = "
        f"{algorithm.spread_limit:g} of their bound {bound:g}: set config.algorithm.old_log_probs, which is "
        f"{algorithm.old_log_probs!r}, to 'current' for one update a step of fresh samples or to 'recomputed' for "
        "several, or config.precision.arithmetic and config.precision.rollout to 'float32', or raise "
        "config.algorithm.spread_limit"
    )
