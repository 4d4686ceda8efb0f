"""Log-ratios other than log_prob - old_log_prob, for any of the `surrogates` and `corrections`.

Rows without weight must be blanked first (`samples.blanked`).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from digen_jax.algorithms.kl import gaussian_kl


def guard_log_ratio(
    log_prob: Float[Array, "n"],
    old_log_prob: Float[Array, "n"],
    mean: Float[Array, "n ..."],
    old_mean: Float[Array, "n ..."],
    std: Float[Array, "n"],
) -> Float[Array, "n"]:
    """(log_prob - old_log_prob + KL) std: GRPO-Guard's RatioNorm (arXiv 2510.22319, equation 8).

    For samples of the old policy the mean of the plain log-ratio is -KL, and its std falls with 1/std of the
    step: without these two effects it is (mean - old_mean) times the noise, at every step, and a clip range has
    the same meaning everywhere. Public codes (Flow-GRPO's, verl-omni) take the std averaged over the batch,
    which is equal if a batch has one step only; here it is each sample's own, so that steps may be mixed.
    Flow-GRPO's (scripts/train_sd3_GRPO_Guard.py, 2e2f712) also averages the KL over the batch: it reduces
    the axes `range(1, log_prob.ndim)`, which are none, and torch's `mean(dim=())` averages over all. The
    paper and verl-omni (diffusion_algos.py, a1139ba) use each sample's own KL, as here.

    Args:
      log_prob: Gaussian, with its 1 / (2 std^2): of flow and dance steps. Not of cps, which omits
        it, so that other constants would be needed.
      old_log_prob: of the policy of `old_mean`.
      mean: of x_next for the policy being trained, with gradient.
      old_mean: of x_next for the old policy, at the same x.
      std: each step's whole std, sqrt(-dt) included.
    """
    return (log_prob - old_log_prob + gaussian_kl(mean, old_mean, std)) * std


def guard_loss_scale(dt: Float[Array, "n"]) -> Float[Array, "n"]:
    """1 / -dt, GRPO-Guard's factor of the loss of a step (arXiv 2510.22319, equation 12).

    It equalises gradients of steps of different length; it multiplies the loss, not the weight in the
    denominator. For dance the paper has a further factor 1 + a^2 (1 - sigma) / (2 sigma), for flow a
    constant one that it drops; public codes have neither, and this follows them, but per sample, while
    they average dt over the batch. 0 if dt is not negative (padding).
    """
    forward = dt < 0
    return jnp.where(forward, -1 / jnp.where(forward, dt, -1.0), 0.0)


def sequence_log_ratio(
    log_ratio: Float[Array, "n"],
    weight: Float[Array, "n"],
    trajectory: Int[Array, "n"],
    num_trajectories: int,
    reduce: Literal["sum", "mean"],
) -> Float[Array, "n"]:
    """The log-ratio of each sample's trajectory, over those of its trained steps that have weight.

    "mean": GSPO (arXiv 2507.18071, equation 7), with steps instead of tokens; its clip ranges are
    accordingly small (3e-4 and 4e-4). "sum": the ratio of the whole path, for off-policy corrections
    (OP-GRPO, arXiv 2604.04142). The gradient reaches every step of the trajectory. With one loss for each
    sample, a trajectory counts as often as it has steps.

    A trajectory's samples may be in any order, but **all of them must be in the same call**.

    Args:
      log_ratio: per step, with gradient.
      weight: 0 for padding, and for steps that are left out (`well_conditioned`).
      trajectory: each sample's, in [0, num_trajectories); padding may have any number.
      num_trajectories: in this call, static.
      reduce: how the steps are combined.
    """
    counts = weight > 0
    total = jax.ops.segment_sum(jnp.where(counts, log_ratio, 0.0), trajectory, num_trajectories)
    if reduce == "mean":
        steps = jax.ops.segment_sum(counts.astype(jnp.float32), trajectory, num_trajectories)
        total = total / jnp.maximum(steps, 1.0)
    # 0 for rows without weight: none of their gradient, NaN included, may reach the trajectory
    return jnp.where(counts, total[trajectory], 0.0)


def well_conditioned(sigma: Float[Array, "n"], smallest_sigma: float) -> Float[Array, "n"]:
    """1 if sigma >= smallest_sigma, else 0: a factor of the weight, which leaves out the last steps.

    A change dv of the velocity moves the mean of x_next by (1 + g^2 (1 - sigma) / (2 sigma)) dt dv. In
    units of the step's std g sqrt(-dt) this grows without bound as sigma falls to 0: for flow because g
    falls, for dance because of 1/sigma. There a ratio to an older policy says little about the distance, and
    it dominates a sum over steps. OP-GRPO (arXiv 2604.04142) shows this and truncates trajectories at late
    steps; the rule by sigma, which does not depend on the number of steps or their spacing, is ours.
    """
    return (sigma >= smallest_sigma).astype(jnp.float32)


def check_smallest_sigma(smallest_sigma: float) -> None:
    """Raises ValueError for a bound that is not a sigma or that no step can meet."""
    if not 0 <= smallest_sigma < 1:
        raise ValueError(
            f"smallest_sigma is {smallest_sigma}; it must lie in [0, 1), where 0 keeps every step"
        )
