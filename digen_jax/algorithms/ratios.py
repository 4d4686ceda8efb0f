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

    Over samples of the old policy the plain log-ratio's mean is -KL and its std falls with 1/std of
    the step: with both taken out it is (mean - old_mean) times the noise, at every step, and a clip
    range means the same everywhere. Public codes (Flow-GRPO's, verl-omni) take the std averaged over
    the batch, which is this where a batch holds one step only; here it is each sample's own, so that
    steps may be mixed. Flow-GRPO's (scripts/train_sd3_GRPO_Guard.py, 2e2f712) averages the KL over the
    batch, too: it reduces the axes `range(1, log_prob.ndim)`, which are none, and torch's
    `mean(dim=())` is over all. The paper and verl-omni (diffusion_algos.py, a1139ba) have each
    sample's own KL, as here.

    Args:
      log_prob: Gaussian, with its 1 / (2 std^2): of flow and dance steps. Not of cps, which leaves
        that out, so that other constants would be needed.
      old_log_prob: of the policy that `old_mean` is from.
      mean: of x_next under the policy being trained, with gradient.
      old_mean: of x_next under the old policy, at the same x.
      std: each step's whole std, sqrt(-dt) included.
    """
    return (log_prob - old_log_prob + gaussian_kl(mean, old_mean, std)) * std


def guard_loss_scale(dt: Float[Array, "n"]) -> Float[Array, "n"]:
    """1 / -dt, by which GRPO-Guard multiplies the loss of a step (arXiv 2510.22319, equation 12).

    It makes gradients of steps of different length alike; it belongs to the loss, not to the weight
    that is divided by. For dance the paper has a further factor 1 + a^2 (1 - sigma) / (2 sigma), for
    flow a constant one that it drops; public codes have neither, and this follows them. Per sample,
    where those average dt over the batch. 0 where dt is not negative (padding).
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
    """Each sample's trajectory's log-ratio, over the trained steps of it that have weight.

    "mean": GSPO (arXiv 2507.18071, equation 7), steps in the place of tokens; its clip ranges are
    accordingly small (3e-4 and 4e-4). "sum": the ratio of the whole path, as off-policy corrections
    need it (OP-GRPO, arXiv 2604.04142). The gradient reaches every step of the trajectory. With a
    loss for each sample a trajectory counts as often as it has steps.

    A trajectory's samples may lie anywhere, but **all of them must be in the one call**.

    Args:
      log_ratio: per step, with gradient.
      weight: 0 for padding, and for steps left out (`well_conditioned`).
      trajectory: each sample's, in [0, num_trajectories); padding may have any.
      num_trajectories: in this call, static.
      reduce: how steps are put together.
    """
    counts = weight > 0
    total = jax.ops.segment_sum(jnp.where(counts, log_ratio, 0.0), trajectory, num_trajectories)
    if reduce == "mean":
        steps = jax.ops.segment_sum(counts.astype(jnp.float32), trajectory, num_trajectories)
        total = total / jnp.maximum(steps, 1.0)
    # 0 where nothing counts: of such a row no gradient, NaN included, may reach its trajectory
    return jnp.where(counts, total[trajectory], 0.0)


def well_conditioned(sigma: Float[Array, "n"], smallest_sigma: float) -> Float[Array, "n"]:
    """1 where sigma >= smallest_sigma, else 0: a factor of the weight, which leaves out the last steps.

    A change dv of the velocity moves the mean of x_next by (1 + g^2 (1 - sigma) / (2 sigma)) dt dv,
    in units of the step's std g sqrt(-dt) ever further as sigma falls to 0: for flow because g does,
    for dance because of 1/sigma. There a ratio to an older policy says little of how far it is, and
    in a sum over steps drowns the others. OP-GRPO (arXiv 2604.04142), who show this, truncate
    trajectories at late steps; the rule by sigma, which does not depend on the number of steps or
    their spacing, is ours.
    """
    return (sigma >= smallest_sigma).astype(jnp.float32)


def check_smallest_sigma(smallest_sigma: float) -> None:
    """Raises ValueError for a bound that no step can meet, or that is none of a sigma."""
    if not 0 <= smallest_sigma < 1:
        raise ValueError(
            f"smallest_sigma is {smallest_sigma}; it must lie in [0, 1), where 0 keeps every step"
        )
