"""Corrections for chunks sampled by an older policy, usable with any of the `surrogates`.

Three policies: *behaviour* generated the samples, *proximal* is the policy at the step's start, to which
the trained one should stay close, and *current* is being trained. Each function takes a log-ratio, per step
or of a sequence (`ratios.sequence_log_ratio`, for OP-GRPO's correction, arXiv 2604.04142). Rows without
weight must be blanked first (`samples.blanked`).

An importance weight multiplies only the loss; a rejected sample gets weight 0 before the rows are
blanked again, and so is in no denominator.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from digen_jax.algorithms.surrogates import SMALLEST_CLIP_RANGE


def decoupled(
    log_prob: Float[Array, "n"],
    proximal_log_prob: Float[Array, "n"],
    behaviour_log_prob: Float[Array, "n"],
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """The log-ratios current / proximal and proximal / behaviour: decoupled PPO.

    arXiv 2110.00641, section 3: the first, with gradient, goes to a clipped surrogate; the second, without
    gradient, to `importance_weight`, which multiplies the loss. For a sample of any age, clipping acts on the
    change since the proximal policy.
    """
    proximal_log_prob = jax.lax.stop_gradient(proximal_log_prob)
    behaviour_log_prob = jax.lax.stop_gradient(behaviour_log_prob)
    return log_prob - proximal_log_prob, proximal_log_prob - behaviour_log_prob


def importance_weight(log_ratio: Float[Array, "n"], cap: float = math.inf) -> Float[Array, "n"]:
    """sg(min(exp(log_ratio), cap)), a factor of a loss: truncated importance sampling.

    For old / behaviour, with the loss clipped around old: TIS as in IMPALA (arXiv 1802.01561, its
    truncated rho) and the RL frameworks (verl, verl-omni: cap 2). cap = inf gives the whole ratio, as in
    the paper of decoupled PPO; AReaL (arXiv 2505.24298) also caps it. Do not apply it to a surrogate
    whose ratio is already current / behaviour.
    """
    return jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratio), jnp.log(cap)))


def accepted(log_ratio: Float[Array, "n"], bound: float) -> Bool[Array, "n"]:
    """Whether |delta log_prob| <= bound; other samples must get weight 0.

    Rejection as in the RL frameworks (verl's rollout correction, verl-omni), whose bounds are for the
    ratio: ours is their logarithm, symmetric on both sides. verl-omni keeps rejected samples in the
    denominator of a mean; here they are in none. NaN is rejected.
    """
    return jnp.abs(jax.lax.stop_gradient(log_ratio)) <= bound


def check_importance_cap(cap: float) -> None:
    """Raises ValueError for a cap that would reduce the weight of samples that are not stale."""
    if not cap >= 1:
        raise ValueError(
            f"importance_cap is {cap}; it must be at least 1, the weight of a sample that is not stale"
        )


def check_rejection_bound(bound: float) -> None:
    """Raises ValueError for a bound that is infinite or below float32's resolution of a log-ratio."""
    if not SMALLEST_CLIP_RANGE <= bound < math.inf:
        raise ValueError(
            f"rejection_bound is {bound}; it must be finite and at least {SMALLEST_CLIP_RANGE:.1e}: "
            "below, rounding alone is rejected"
        )
