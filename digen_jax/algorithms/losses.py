"""Functions shared by the losses: masking, KL, ratios, surrogates, off-policy corrections, old log-probabilities.

A log-ratio is log_prob - old_log_prob, with gradient. All functions are per sample, and only the policy being trained
gets a gradient. Advantages have no gradient, and the caller clips them, except for `divergence_masked`. The caller
weights and sums the losses, and divides once, at the update. Rows without weight must be masked first (`mask_rows`).
Ratios are bounded before exp, so that a ratio beyond its bound cannot overflow, and its gradient is 0, not NaN.

Off-policy corrections distinguish three policies: *behavior* generated the samples, *proximal* is the policy at the
start of the step, to which the trained one should stay close, and *current* is being trained. They take log-ratios per
step or per sequence (`sequence_log_ratio`, for OP-GRPO's correction, arXiv 2604.04142). An importance weight multiplies
only the loss. A rejected sample gets weight 0 before the rows are masked again, so it is in no denominator.

Old log-probabilities (`OldLogProbs`): before the first update every ratio should be 1. Any difference is rounding,
which blurs the bound at which the loss clips. A run therefore logs the distance of its ratios from 1 at that time, and
stops if more than `SPREAD_SHARE` of them differ from 1 by more than `spread_limit` of the distance to the bound.

|ratio - 1| before the first update, on the embedded model (48 images, four cps steps, full fine-tuning, CPU):

    bfloat16, all roundings kept (`parallel.policy`)    below 1e-7
    bfloat16 as XLA compiles it by default              4e-5 in the mean, 4% above 1e-4
    a bfloat16 sampler with a float32 trainer           6e-5 in the mean, 17% above 1e-4 ("rollout")

The first two are the same with "rollout" and "recomputed". If kernels depend on the batch, stored log-probabilities
can still differ; recomputed ones come from the trained batch.

After the first update bfloat16 has an effect in any case, because each weight rounds differently than before. One
update moved the log-ratio by 5e-4 rms, of which 8e-5 was rounding, and with a LoRA of rank 8 by 3e-6, with 5e-5 of
rounding. With several updates per step the clip range must be well above that. (Measured once.)
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.diffusion.steps import NEARLY_ONE
from digen_jax.errors import ConfigError, Range


def required(array: Array | None, name: str, settings: object) -> Array:
    """Returns an input that a loss needs. Raises ValueError if it is None."""
    if array is None:
        raise ValueError(f"{name} is needed by {settings} but was not given")
    return array


def mask_rows(
    trained: Bool[Array, "n"], *arrays: Float[Array, "n ..."]
) -> tuple[Float32[Array, "n ..."], ...]:
    """Casts arrays to float32, with zeros for samples that are not trained (weight 0).

    Gradients of a function of these stop at masked rows. Call it before any computation on
    log-probabilities or means with a gradient: the gradient of an overflow that is only excluded
    from a sum is NaN.
    """
    return tuple(
        jnp.where(
            trained.reshape(trained.shape + (1,) * (array.ndim - 1)),
            array.astype(jnp.float32),
            0.0,
        )
        for array in arrays
    )


def weighted_sum(weight: Float[Array, "n"], values: Float[Array, "n"]) -> Float[Array, ""]:
    """Returns the sum of weight * value; a value of weight 0 may be anything, including inf and NaN."""
    return jnp.sum(weight * jnp.where(weight > 0, values, 0.0))


def gaussian_kl(
    mean: Float[Array, "n ..."],
    reference_mean: Float[Array, "n ..."],
    std: Float[Array, "n"] | Float[Array, ""],
) -> Float[Array, "n"]:
    """Returns the KL of two Gaussians of equal std: (mean - reference_mean)^2 / (2 std^2).

    Averaged over all axes but the first, with gradient to `mean`. Implementations differ in `std`.
    Flow-GRPO's image code divides by the diffusion without its factor sqrt(-dt) (`step.diffusion(...)`),
    and its published coefficients assume this. Its paper (arXiv 2505.05470) and its video code divide by
    the step's full std (`replay(...).std`), which gives the true KL; Flow-DPPO and GRPO-Guard use the true
    KL to the old policy. If std = 0 (padding, which has no weight), std 1 is used, so that the value is
    finite.
    """
    std = jnp.where(std > 0, std, 1.0)
    return _mean_square(mean, reference_mean) / (2 * std**2)


def velocity_mse(
    velocity: Float[Array, "n ..."], target: Float[Array, "n ..."]
) -> Float32[Array, "n"]:
    """Returns (v - target)^2, averaged over all axes but the first, with gradient to `velocity`.

    With target eps - x0 it is the flow-matching loss. With a reference's velocity it is the penalty of
    DiffusionNFT's code and Flow-Factory's "v-based" one: without a factor, so that all noise levels have
    equal weights. Flow-GRPO's true KL is this times
    -dt/2 (1/g + g (1 - sigma) / (2 sigma))^2, g the diffusion of the step's SDE (arXiv 2505.05470).
    """
    return _mean_square(velocity, target)


def velocity_kl(
    velocity: Float[Array, "n ..."], reference: Float[Array, "n ..."], sigma: Float[Array, "n"]
) -> Float32[Array, "n"]:
    """Returns the mean of (velocity - reference)^2 / (2 sigma^2) of each image, with gradient to `velocity`.

    UniRL's KL of steps without noise (experimental/refl/models/sd3.py, 5852cb4).
    """
    return velocity_mse(velocity, reference) / (2 * sigma**2)


def _mean_square(a: Float[Array, "n ..."], reference: Float[Array, "n ..."]) -> Float32[Array, "n"]:
    reference = jax.lax.stop_gradient(reference).astype(jnp.float32)
    return jnp.mean((a.astype(jnp.float32) - reference) ** 2, axis=tuple(range(1, a.ndim)))


def guard_log_ratio(
    log_prob: Float[Array, "n"],
    old_log_prob: Float[Array, "n"],
    mean: Float[Array, "n ..."],
    old_mean: Float[Array, "n ..."],
    std: Float[Array, "n"],
) -> Float[Array, "n"]:
    """Returns (log_prob - old_log_prob + KL) std: GRPO-Guard's RatioNorm (arXiv 2510.22319, equation 8).

    For samples of the old policy the mean of the plain log-ratio is -KL, and its std scales with 1/std of the
    step. Without these two effects it is (mean - old_mean) times the noise at every step, and a clip range has
    the same meaning everywhere. Public code (Flow-GRPO, verl-omni) averages the std over the batch, which is
    equal if a batch has only one step; here it is per sample, so that steps may be mixed. Flow-GRPO's code
    (scripts/train_sd3_GRPO_Guard.py, 2e2f712) also averages the KL over the batch: it reduces the axes
    `range(1, log_prob.ndim)`, which are empty, and torch's `mean(dim=())` averages over all. The paper and
    verl-omni (diffusion_algos.py, a1139ba) use the KL per sample, as here.

    Args:
      log_prob: Gaussian log-probability with its 1 / (2 std^2): of flow and dance steps, not of cps steps,
        which omit it and would need other constants.
      old_log_prob: Log-probability of the policy of `old_mean`.
      mean: Mean of x_next for the policy being trained, with gradient.
      old_mean: Mean of x_next for the old policy, at the same x.
      std: Full std of each step, including sqrt(-dt).
    """
    return (log_prob - old_log_prob + gaussian_kl(mean, old_mean, std)) * std


def guard_loss_scale(dt: Float[Array, "n"]) -> Float[Array, "n"]:
    """Returns 1 / -dt, GRPO-Guard's loss factor of a step (arXiv 2510.22319, equation 12).

    It equalizes gradients of steps of different length; it multiplies the loss, not the weight in the
    denominator. The paper also has a factor 1 + a^2 (1 - sigma) / (2 sigma) for dance, and a constant for
    flow that it drops. Public code has neither and averages dt over the batch; this function omits both,
    but is per sample. It is 0 if dt is not negative (padding).
    """
    forward = dt < 0
    return jnp.where(forward, -1 / jnp.where(forward, dt, -1.0), 0.0)


def longcat_weight(sigma: Float[Array, "n"], dt: Float[Array, "n"]) -> Float[Array, "n"]:
    """Returns sqrt(sigma / (1 - sigma)) / sqrt(-dt), LongCat-Video's weight of a step (arXiv 2510.22200).

    The gradient of a step's log-probability scales with sqrt(-dt) and the inverse of FlowSde's diffusion; the weight
    cancels both. GenRL (genrl/trainer/wan_trainer.py, 1b41f88, `loss_reweighting`) multiplies the policy's loss by it,
    and the KL by its square. As in `FlowSde`, the next sigma replaces a first sigma of nearly 1 in 1 - sigma. The
    weight is 0 if dt is not negative (padding).
    """
    forward = dt < 0
    left = 1 - jnp.where(sigma >= NEARLY_ONE, sigma + dt, sigma)
    square = sigma / jnp.where(forward, -dt * left, 1.0)
    return jnp.where(forward, jnp.sqrt(jnp.where(forward, square, 1.0)), 0.0)


def flash_weight(
    sigma: Float[Array, "n"], dt: Float[Array, "n"], std: Float[Array, "n"]
) -> Float[Array, "n"]:
    """Returns 1 / (sqrt(-dt) / g + g sqrt(-dt) (1 - sigma) / (2 sigma)), Flash-GRPO's weight (arXiv 2605.15980).

    g = std / sqrt(-dt) is the diffusion of the step's SDE. The denominator is the change of the step's mean, in stds,
    per change of the velocity, which scales the gradient of the step's log-probability. Shredded-Pork/Flash-GRPO
    (scripts/train_wanx2_1_flash.py, 4211013) has these numbers for its first 10 steps in a table, and divides them by
    their mean over an update. The weight is 0 if dt is not negative (padding).
    """
    forward = dt < 0
    change = -dt + std**2 * (1 - sigma) / jnp.where(forward, 2 * sigma, 1.0)
    return jnp.where(forward, std / jnp.where(forward, change, 1.0), 0.0)


def sequence_log_ratio(
    log_ratio: Float[Array, "n"],
    weight: Float[Array, "n"],
    trajectory: Int[Array, "n"],
    num_trajectories: int,
    reduce: Literal["sum", "mean"],
) -> Float[Array, "n"]:
    """Returns the log-ratio of each sample's trajectory, over the trained steps that have weight.

    "mean": GSPO (arXiv 2507.18071, equation 7), with steps instead of tokens and correspondingly small clip
    ranges (3e-4 and 4e-4). "sum": the ratio of the full path, for off-policy corrections (OP-GRPO, arXiv
    2604.04142). The gradient reaches every step of the trajectory. With one loss per sample, a trajectory
    counts once per step.

    The samples of a trajectory may be in any order, but **all of them must be in the same call**.

    Args:
      log_ratio: Log-ratio of each step, with gradient.
      weight: 0 for padding and excluded steps (`well_conditioned`).
      trajectory: Trajectory index of each sample, in [0, num_trajectories); any number for padding.
      num_trajectories: Number of trajectories in this call, static.
      reduce: How to combine the steps.
    """
    counts = weight > 0
    total = jax.ops.segment_sum(jnp.where(counts, log_ratio, 0.0), trajectory, num_trajectories)
    if reduce == "mean":
        steps = jax.ops.segment_sum(counts.astype(jnp.float32), trajectory, num_trajectories)
        total = total / jnp.maximum(steps, 1.0)
    # 0 for rows without weight: none of their gradient, including NaN, may reach the trajectory
    return jnp.where(counts, total[trajectory], 0.0)


def well_conditioned(sigma: Float[Array, "n"], smallest_sigma: float) -> Float[Array, "n"]:
    """Returns 1 if sigma >= smallest_sigma, else 0: a factor of the weight that excludes the last steps.

    A change dv of the velocity moves the mean of x_next by (1 + g^2 (1 - sigma) / (2 sigma)) dt dv. In
    units of the step's std g sqrt(-dt) this grows without bound as sigma falls to 0: for flow because g
    falls, for dance because of 1/sigma. There a ratio to an older policy contains little information about the
    distance, and it dominates a sum over steps. OP-GRPO (arXiv 2604.04142) shows this and truncates trajectories
    at late steps; the rule by sigma, which is independent of the number and spacing of steps, is ours.
    """
    return (sigma >= smallest_sigma).astype(jnp.float32)


# Smallest ratio bound that float32 resolves: ten times its epsilon.
SMALLEST_CLIP_RANGE = 1.2e-6
ClipRange = Annotated[float, Range(SMALLEST_CLIP_RANGE, 1)]


def clipped(
    log_ratio: Float[Array, "n"], advantages: Float[Array, "n"], low: float, high: float
) -> Float[Array, "n"]:
    """Returns -min(A r, A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, equation 7).

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
    """Returns -max(min(A r, A clip(r)), dual A) if A < 0, else `clipped`: dual-clip PPO.

    arXiv 1912.09729, section "Dual-clip PPO": a bad sample that has become much more likely has at most the
    loss of r = dual, and no gradient beyond it. Implementations differ in `dual`: a constant (3 in the paper;
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
    """Returns -sg(clip(r, 1 - low, 1 + high)) A log_prob: CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4, 5).

    The weight is clipped, not the update: every sample keeps its gradient. The paper has no lower bound,
    which is low = 1 here; ROLL's code has 0.1 on both sides. The paper's unified mask (its equation 7),
    which drops the samples that PPO would clip, is not part of CISPO or of this function.
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
    """Returns -w A log_prob, w = 1 if A > 0, else sg(min(r, 1)): tapered off-policy REINFORCE.

    arXiv 2503.14286, section 3: a good sample is imitated for any ratio; a bad one loses influence as its
    probability falls. The weights make it the weighted TOPR of ROLL: positive_weight if A > 0, else
    negative_weight times min(r, 1). Definitions of positive differ: the paper, Trinity-RFT and this code use
    the reward minus its baseline; ROLL uses the sign of the raw score.
    """
    tapered = negative_weight * jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratio), 0.0))
    return -jnp.where(advantages > 0, positive_weight, tapered) * advantages * log_prob


def divergence_masked(
    log_ratio: Float[Array, "n"],
    advantages: Float[Array, "n"],
    kl: Float[Array, "n"],
    threshold: float,
) -> Float[Array, "n"]:
    """Returns -A r, or 0 if the policy is too far from the old one and would move away: Flow-DPPO.

    arXiv 2606.11025. Too far: kl >= threshold, where `kl` is `gaussian_kl` to the old policy's mean with
    the step's full std (verl-omni and UniRL: 1e-5; their `add_kl_coefficient=False` omits the std).
    Away: A > 0 and r > 1, or A < 0 and r < 1. A sample that moves the policy back is never masked or
    clipped. Neither code clips advantages (verl-project/verl-omni,
    verl_omni/trainer/diffusion/diffusion_algos.py, a1139ba; Tencent-Hunyuan/UniRL,
    unirl/algorithms/flowdppo.py, 1a7b501). A masked sample counts in the denominator, like a sample that PPO
    clips.
    """
    away = jnp.sign(advantages) * log_ratio > 0
    masked = jax.lax.stop_gradient(away & (kl >= threshold))
    ratio = jnp.exp(jnp.where(masked, 0.0, log_ratio))
    return jnp.where(masked, 0.0, -advantages * ratio)


def decoupled_log_ratios(
    log_prob: Float[Array, "n"],
    proximal_log_prob: Float[Array, "n"],
    behavior_log_prob: Float[Array, "n"],
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Returns the log-ratios current / proximal and proximal / behavior: decoupled PPO.

    arXiv 2110.00641, section 3: the first, with gradient, is the input of a clipped surrogate; the second,
    without gradient, of `importance_weight`, which multiplies the loss. For any policy lag, clipping acts on
    the change since the proximal policy.
    """
    proximal_log_prob = jax.lax.stop_gradient(proximal_log_prob)
    behavior_log_prob = jax.lax.stop_gradient(behavior_log_prob)
    return log_prob - proximal_log_prob, proximal_log_prob - behavior_log_prob


def importance_weight(log_ratio: Float[Array, "n"], cap: float = math.inf) -> Float[Array, "n"]:
    """Returns sg(min(exp(log_ratio), cap)), a factor of a loss: truncated importance sampling.

    For old / behavior, with the loss clipped around old, it is TIS as in IMPALA (arXiv 1802.01561, its
    truncated rho) and the RL frameworks (verl, verl-omni: cap 2). cap = inf gives the full ratio, as in
    the paper of decoupled PPO; AReaL (arXiv 2505.24298) also caps it. Do not apply it to a surrogate
    whose ratio is already current / behavior.
    """
    return jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratio), jnp.log(cap)))


def within_bound(log_ratio: Float[Array, "n"], bound: float) -> Bool[Array, "n"]:
    """Returns whether |delta log_prob| <= bound; other samples must get weight 0.

    This is rejection as in the RL frameworks (verl's rollout correction, verl-omni). Their bounds apply to the
    ratio; this one is a logarithm, symmetric on both sides. verl-omni keeps rejected samples in the
    denominator of a mean; here they are in none. NaN is rejected.
    """
    return jnp.abs(jax.lax.stop_gradient(log_ratio)) <= bound


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
        reason = "with asynchrony" if stale else f"with {updates} updates per step"
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


def check_ratio_spread(algorithm: Any, sums: Mapping[str, Float[Array, ""]]) -> None:
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
        f"before the first update, where all ratios should be 1, rounding moves them by {mean:.1e} in the "
        f"mean, and {over:.1%} of them by more than {limit:.1e}, which is config.algorithm.spread_limit = "
        f"{algorithm.spread_limit:g} of their bound {bound:g}: set config.algorithm.old_log_probs, which is "
        f"{algorithm.old_log_probs!r}, to 'current' for one update per step of fresh samples or to "
        "'recomputed' for several, or config.precision.arithmetic and config.precision.rollout to 'float32', "
        "or raise config.algorithm.spread_limit"
    )
