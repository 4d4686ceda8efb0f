"""Corrections for fragments sampled by an older policy, usable with any of the `surrogates`.

Three policies: *behaviour* sampled, *proximal* is the one to stay close to (the step's start), and
current is being trained. Each function takes a log-ratio, per step or of a sequence
(`ratios.sequence_log_ratio`, as OP-GRPO corrects, arXiv 2604.04142). Rows without weight must be
blanked first (`samples.blanked`).

What multiplies what: an importance weight multiplies the loss only; what is rejected has its weight
set to 0 before the rows are blanked again, and so is in no denominator.
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

    arXiv 2110.00641, section 3: the first, with gradient, goes to a clipped surrogate, the second, which
    has none, to `importance_weight`, with which the loss is multiplied. However old the sample, what
    is clipped is the change since the proximal policy.
    """
    proximal_log_prob = jax.lax.stop_gradient(proximal_log_prob)
    behaviour_log_prob = jax.lax.stop_gradient(behaviour_log_prob)
    return log_prob - proximal_log_prob, proximal_log_prob - behaviour_log_prob


def importance_weight(log_ratio: Float[Array, "n"], cap: float = math.inf) -> Float[Array, "n"]:
    """sg(min(exp(log_ratio), cap)), by which a loss is multiplied: truncated importance sampling.

    Of old / behaviour, with the loss clipped around old: TIS as in IMPALA (arXiv 1802.01561, its
    truncated rho) and the RL frameworks (verl, verl-omni: cap 2). cap = inf is the whole ratio, as
    the decoupled PPO of its paper takes it; AReaL (arXiv 2505.24298) caps that too. Not to be
    multiplied to a surrogate whose ratio is current / behaviour already.
    """
    return jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratio), jnp.log(cap)))


def accepted(log_ratio: Float[Array, "n"], bound: float) -> Bool[Array, "n"]:
    """Whether |delta log_prob| <= bound; a sample that is not is to get weight 0.

    Rejection as in the RL frameworks (verl's rollout correction, verl-omni), whose bounds are given
    for the ratio: ours is their logarithm, the same on both sides. verl-omni leaves what it rejects
    in the denominator of a mean; here it is in none. NaN is rejected.
    """
    return jnp.abs(jax.lax.stop_gradient(log_ratio)) <= bound


def check_importance_cap(cap: float) -> None:
    """Raises ValueError for a cap that would cut the weight of samples that are not stale."""
    if not cap >= 1:
        raise ValueError(
            f"importance_cap is {cap}; it must be at least 1, the weight of a sample that is not stale"
        )


def check_rejection_bound(bound: float) -> None:
    """Raises ValueError for a bound within float32's resolution of a log-ratio, or none at all."""
    if not SMALLEST_CLIP_RANGE <= bound < math.inf:
        raise ValueError(
            f"rejection_bound is {bound}; it must be finite and at least {SMALLEST_CLIP_RANGE:.1e}: "
            "below, rounding alone is rejected"
        )
