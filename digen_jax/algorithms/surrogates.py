"""Policy-gradient losses per sample, each a function of log-ratios and advantages.

A log-ratio is log_prob - old_log_prob, with gradient, or a result of `ratios`. Advantages have no
gradient, and the caller clips them, except for `divergence_masked`. The caller weights the losses, sums
them and divides once, at the update; rows without weight must be blanked first (`samples.blanked`).
Ratios are bounded before exp, so that a ratio beyond its bound cannot overflow, and its gradient is 0,
not NaN.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Float32's epsilon limits the resolution of a ratio; clip bounds must be well above it.
SMALLEST_CLIP_RANGE = 10 * float(np.finfo(np.float32).eps)


def clipped(
    log_ratio: Float[Array, "n"], advantages: Float[Array, "n"], low: float, high: float
) -> Float[Array, "n"]:
    """-min(A r, A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, equation 7).

    Flow-GRPO (arXiv 2505.05470) uses it with low = high; a larger `high` is DAPO's clip-higher
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
    """If A < 0, -max(min(A r, A clip(r)), dual A), else `clipped`: dual-clip PPO.

    arXiv 1912.09729, section "Dual-clip PPO": a bad sample that has become much more likely has at most the
    loss of r = dual, and beyond that no gradient. Implementations differ in `dual`: a constant (the paper: 3;
    verl), or 1 + 2 clip_range (ROLL). Here it is a constant.
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
    equation 7), which drops the samples that PPO would clip, belongs neither to CISPO nor to this function.
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
    """-w A log_prob, w = 1 if A > 0, else sg(min(r, 1)): tapered off-policy REINFORCE.

    arXiv 2503.14286, section 3: a good sample is imitated whatever its ratio; a bad one loses influence as
    its probability falls. The weights make it the weighted TOPR of ROLL: positive_weight if A > 0,
    negative_weight times min(r, 1) otherwise. The definition of positive differs: the paper uses the reward
    minus its baseline, as do this code and Trinity-RFT; ROLL uses the sign of the raw score.
    """
    tapered = negative_weight * jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratio), 0.0))
    return -jnp.where(advantages > 0, positive_weight, tapered) * advantages * log_prob


def divergence_masked(
    log_ratio: Float[Array, "n"],
    advantages: Float[Array, "n"],
    kl: Float[Array, "n"],
    threshold: float,
) -> Float[Array, "n"]:
    """-A r, or 0 if the policy is too far from the old one and would move away: Flow-DPPO.

    arXiv 2606.11025. Too far: kl >= threshold, where `kl` is `gaussian_kl` to the old policy's mean with
    the step's whole std (verl-omni and UniRL: 1e-5; their `add_kl_coefficient=False` omits the std).
    Away: A > 0 and r > 1, or A < 0 and r < 1. A sample that moves the policy back is never masked or
    clipped. Neither of these codes clips advantages (verl-project/verl-omni,
    verl_omni/trainer/diffusion/diffusion_algos.py, a1139ba; Tencent-Hunyuan/UniRL,
    unirl/algorithms/flowdppo.py, 1a7b501). A masked sample counts in the denominator, as a sample that PPO
    clips does.
    """
    away = jnp.sign(advantages) * log_ratio > 0
    masked = jax.lax.stop_gradient(away & (kl >= threshold))
    ratio = jnp.exp(jnp.where(masked, 0.0, log_ratio))
    return jnp.where(masked, 0.0, -advantages * ratio)


def check_clip_range(
    low: float, high: float, names: tuple[str, str] = ("clip_low", "clip_high")
) -> None:
    """Raises ValueError, with the settings' `names`, for a range that cannot bound a float32 ratio.

    low = 1 means no lower bound: a ratio is never negative.
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
    """Raises ValueError for a bound with which a bad sample would have no gradient at r = 1."""
    if not 1 < dual < math.inf:
        raise ValueError(f"dual_clip is {dual}; it must be finite and above 1, such as 3")


def check_topr_weights(positive: float, negative: float) -> None:
    """Raises ValueError for weights that are negative or not finite, or that are both 0."""
    for name, weight in (("positive_weight", positive), ("negative_weight", negative)):
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name} is {weight}; it must be finite and not negative")
    if positive == negative == 0:
        raise ValueError("positive_weight and negative_weight are both 0; set one of them above 0")


def check_kl_threshold(threshold: float) -> None:
    """Raises ValueError for a threshold that masks everything or nothing."""
    if not 0 < threshold < math.inf:
        raise ValueError(f"kl_threshold is {threshold}; it must be positive and finite")
