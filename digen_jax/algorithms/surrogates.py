"""Policy-gradient losses per sample, each a function of log-ratios and advantages.

A log-ratio is log_prob - old_log_prob, with gradient, or what `ratios` makes of it. Advantages have
none, and are clipped by the caller, but for `divergence_masked`. The caller weighs the losses, sums
them and divides once, at the update; rows without weight must be blanked first (`samples.blanked`).
Ratios are bounded before exp, so that one beyond its bound cannot overflow, and its gradient is 0 and
not NaN.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# A ratio is resolved to float32's epsilon; the clip bounds must stand well clear of that.
SMALLEST_CLIP_RANGE = 10 * float(np.finfo(np.float32).eps)


def clipped(
    log_ratio: Float[Array, "n"], advantages: Float[Array, "n"], low: float, high: float
) -> Float[Array, "n"]:
    """-min(A r, A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, equation 7).

    Flow-GRPO (arXiv 2505.05470) takes it with low = high; a larger `high` is DAPO's clip-higher
    (arXiv 2503.14476, section 3.1).
    """
    return dual_clipped(log_ratio, advantages, low, high, math.inf)


def dual_clipped(
    log_ratio: Float[Array, "n"],
    advantages: Float[Array, "n"],
    low: float,
    high: float,
    dual: float,
) -> Float[Array, "n"]:
    """Where A < 0, -max(min(A r, A clip(r)), dual A), else `clipped`: dual-clip PPO.

    arXiv 1912.09729, section "Dual-clip PPO": a bad sample that has become much more likely pushes no
    harder than with r = dual, and then not at all, in the gradient. Implementations differ in
    `dual`: a constant (the paper: 3; verl), or 1 + 2 clip_range (ROLL). This takes the number.
    """
    bad = advantages < 0
    lower = jnp.where(bad, jnp.log1p(-low), -jnp.inf)
    upper = jnp.where(bad, jnp.log(dual), jnp.log1p(high))
    return -advantages * jnp.exp(jnp.clip(log_ratio, lower, upper))


def cispo(
    log_prob: Float[Array, "n"],
    log_ratio: Float[Array, "n"],
    advantages: Float[Array, "n"],
    low: float,
    high: float,
) -> Float[Array, "n"]:
    """-sg(clip(r, 1 - low, 1 + high)) A log_prob: CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4, 5).

    The weight is clipped, not the update: every sample keeps its gradient. The paper sets no lower
    bound, which here is low = 1; ROLL's code has 0.1 on both sides. The paper's unified mask (its
    equation 7), which drops what PPO would clip, is not part of CISPO and not of this.
    """
    bounded = jnp.clip(log_ratio, jnp.log1p(-low), jnp.log1p(high))
    return -jax.lax.stop_gradient(jnp.exp(bounded)) * advantages * log_prob


def topr(
    log_prob: Float[Array, "n"],
    log_ratio: Float[Array, "n"],
    advantages: Float[Array, "n"],
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> Float[Array, "n"]:
    """-w A log_prob, w = 1 where A > 0, else sg(min(r, 1)): tapered off-policy REINFORCE.

    arXiv 2503.14286, section 3: a good sample is imitated whatever its ratio, a bad one is forgotten
    as it is unlearnt. The weights make it the weighted TOPR of ROLL: positive_weight where A > 0,
    negative_weight times min(r, 1) elsewhere. What is positive differs: the paper's reward with its
    baseline taken off, as here and in Trinity-RFT; ROLL goes by the sign of the raw score.
    """
    tapered = negative_weight * jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratio), 0.0))
    return -jnp.where(advantages > 0, positive_weight, tapered) * advantages * log_prob


def divergence_masked(
    log_ratio: Float[Array, "n"],
    advantages: Float[Array, "n"],
    kl: Float[Array, "n"],
    threshold: float,
) -> Float[Array, "n"]:
    """-A r, or 0 where the policy is too far from the old one and would move away: Flow-DPPO.

    arXiv 2606.11025. Too far: kl >= threshold, `kl` being `gaussian_kl` to the old policy's mean with
    the step's whole std (verl-omni and UniRL: 1e-5; their `add_kl_coefficient=False` leaves the std
    out). Away: A > 0 and r > 1, or A < 0 and r < 1. What leads back is never masked, nor ever
    clipped. Advantages are not clipped either, in both of these codes (verl-project/verl-omni,
    verl_omni/trainer/diffusion/diffusion_algos.py, a1139ba; Tencent-Hunyuan/UniRL,
    unirl/algorithms/flowdppo.py, 1a7b501). A masked sample counts in the denominator, as one that PPO
    clips does.
    """
    away = jnp.sign(advantages) * log_ratio > 0
    masked = jax.lax.stop_gradient(away & (kl >= threshold))
    ratio = jnp.exp(jnp.where(masked, 0.0, log_ratio))
    return jnp.where(masked, 0.0, -advantages * ratio)


def check_clip_range(
    low: float, high: float, names: tuple[str, str] = ("clip_low", "clip_high")
) -> None:
    """Raises ValueError, by the settings' `names`, for a range that cannot bound a float32 ratio.

    low = 1 is no lower bound: a ratio is never negative.
    """
    if not SMALLEST_CLIP_RANGE <= low <= 1:
        raise ValueError(
            f"{names[0]} is {low}; it must lie in [{SMALLEST_CLIP_RANGE:.1e}, 1]: "
            "below, float32 cannot resolve the ratio"
        )
    if not SMALLEST_CLIP_RANGE <= high < math.inf:
        raise ValueError(
            f"{names[1]} is {high}; it must be finite and at least {SMALLEST_CLIP_RANGE:.1e}: "
            "below, float32 cannot resolve the ratio"
        )


def check_dual_clip(dual: float) -> None:
    """Raises ValueError for a bound that would leave a bad sample no gradient where r = 1."""
    if not 1 < dual < math.inf:
        raise ValueError(f"dual_clip is {dual}; it must be finite and above 1, such as 3")


def check_topr_weights(positive: float, negative: float) -> None:
    """Raises ValueError for weights that are negative or not finite, or leave nothing to learn from."""
    for name, weight in (("positive_weight", positive), ("negative_weight", negative)):
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name} is {weight}; it must be finite and not negative")
    if positive == negative == 0:
        raise ValueError("positive_weight and negative_weight are both 0; set one of them above 0")


def check_kl_threshold(threshold: float) -> None:
    """Raises ValueError for a threshold that masks everything or nothing."""
    if not 0 < threshold < math.inf:
        raise ValueError(f"kl_threshold is {threshold}; it must be positive and finite")
