"""Splits chunks into passes, and accumulates gradients over them.

A sample is a transition, or a final image at a noise level of the forward process. A pass covers k denoising steps, or
noise levels, of n images. Steps are split over the mesh axis time, images over the batch axes. Each device's share of a
pass consists of samples that it already stores.

Gradients can also be accumulated before a group is complete. If the ratio is identically 1 ("current" old
log-probabilities, no policy lag, one update per step), the policy gradient is linear in the advantages. For rewards r_i
with mean m and std s, and the gradient g_i of image i for advantage 1, it is

    sum((r_i - m) g_i) / (s + eps)

An open group stores sum((r_i - m) g_i) and sum(g_i), where m is the mean of the rewards so far. When the mean changes
to m', (m - m') times the second sum is added to the first. The first sum of a complete group is therefore centered
without subtracting large numbers. The KL does not depend on the advantages and has a separate sum. The global std is
known only at the update, which divides by it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int, Key

from digen_jax.attention.kernels import on_device
from digen_jax.diffusion.noising import Times
from digen_jax.diffusion.sampling import Trajectory, Transitions, per_image
from digen_jax.parallel.mesh import SAMPLES, SEQUENCE, tracing_on
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import EncodedPrompts

T = TypeVar("T")
Metrics = dict[str, Float[Array, ""]]

# ------------------------------------------------------------------------------ chunks and passes


class FinalImages(NamedTuple):
    """Final images trained on the forward process. Noise and noise levels depend only on the keys.

    k images with one noise level can form one sample of the b: x0 is `[b k ...]`, with one key per sample.
    Algorithms that differentiate rewards have the k stored latents of an image instead.
    """

    x0: Float[Array, "b ..."]
    keys: Key[Array, "b"]
    sigmas: Float32[Array, "sigmas"]  # the sampler's schedule


class NoiseLevels(NamedTuple):
    """Final images with one noise level each. A pass generates the noise from the key and the number in `draws`."""

    x0: Float[Array, "n ..."]
    keys: Key[Array, "n"]
    draws: Int[Array, "n"]
    sigma: Float32[Array, "n"]


class SharedInputs(NamedTuple):
    """Inputs shared by all passes over a chunk."""

    prompts: EncodedPrompts
    sigma_max: Float[Array, ""]  # sigmas[1] of the schedule
    # For differentiable rewards: tokens of the prompts for each reward, and the sampler's schedule.
    tokens: tuple[Int[Array, "p n"], ...] = ()
    sigmas: Float[Array, "k"] | None = None


class TrainBatch(NamedTuple):
    """A chunk in the trainer's format: s transitions of b images, or b final images."""

    samples: Transitions | FinalImages
    shared: SharedInputs
    rows: Int[Array, "b"]  # prompt index of each image
    # DiffusionNFT: probability of being good; DGPO: of each image of a sample; not read by DPO. Transitions: of each
    # image, or also of each step
    advantages: Float[Array, "b *k"]
    weight: Float[Array, "b"]  # 1, or 0 for excluded images


class Policies(NamedTuple):
    """Parameters that a pass reads; `tuned` and `base` as in `Policy`. None means that the algorithm reads none.

    Attributes:
      tuned: Parameters being trained.
      base: All others.
      behavior: Parameters of the policy that sampled the images.
      start: Parameters at the start of the step. None can also mean that these are being trained.
      copy: The algorithm's slow copy.
      scoring: Replicated parameters of the decoder and of differentiable rewards.
    """

    tuned: Any
    base: Any
    behavior: Any = None
    start: Any = None
    copy: Any = None
    scoring: Any = None


class MicroBatch(NamedTuple):
    """Inputs of one forward and backward pass: n samples at any steps, of any images."""

    samples: Transitions | NoiseLevels
    rows: Int[Array, "n"]
    advantages: Float[Array, "n *k"]
    weight: Float[Array, "n"]  # 0 for padding and excluded images
    image: Int[Array, "n"] | None = None  # image index within the pass or within a device's share


def trained_part(trajectory: Trajectory, keys: Key[Array, "b"]) -> Transitions | FinalImages:
    """Returns the stored transitions of a trajectory or, if none are stored, its final images or stored latents."""
    if len(trajectory.transitions.sigma):
        return trajectory.transitions
    latents = trajectory.latents if trajectory.stored is None else trajectory.stored
    return FinalImages(latents, keys, trajectory.sigmas)


def passes(
    train_batch: TrainBatch, images: int, steps: int, group: DeviceGroup, times: Times | None = None
) -> MicroBatch:
    """Splits all samples of a chunk into passes [m, steps, images, ...].

    `times` samples the noise levels of final images. None means that the samples are transitions.

    Pass j of some steps contains images j, j + c, j + 2c, ...: strided rather than contiguous, so that every device
    already stores its share of a pass. If `steps` does not divide the trained steps, the last step is repeated
    with weight 0.
    """
    samples: Any = train_batch.samples
    if times is not None:
        sigma = times.draw(samples.keys, samples.sigmas)
        draws = jnp.broadcast_to(jnp.arange(len(sigma))[:, None], sigma.shape)
        x0, keys = (jnp.broadcast_to(a, (len(sigma), *a.shape)) for a in samples[:2])
        samples = NoiseLevels(x0, keys, draws, sigma)
    else:
        samples = per_image(samples)
    s, b = samples.sigma.shape
    rounds, chunks = -(-s // steps), b // images

    def divide(a: Array) -> Array:
        """Reshapes [s b ...] to [rounds*chunks steps images ...]."""
        if rounds * steps > len(a):
            a = jnp.concatenate([a, jnp.repeat(a[-1:], rounds * steps - len(a), axis=0)])
        a = a.reshape(rounds, steps, images, chunks, *a.shape[2:])
        # Constrain before merging axes: for a merged axis XLA would gather the trajectory.
        a = jax.lax.with_sharding_constraint(jnp.moveaxis(a, 3, 1), group.passes(2))
        return a.reshape(rounds * chunks, *a.shape[2:])

    rows, advantages = (
        jnp.broadcast_to(a, (s, *a.shape)) for a in (train_batch.rows, train_batch.advantages)
    )
    if times is None and train_batch.advantages.ndim == 2:
        advantages = train_batch.advantages.T
    trained = (jnp.arange(rounds * steps) < s).astype(jnp.float32)
    weight = trained[:, None] * train_batch.weight
    return jax.tree.map(divide, MicroBatch(samples, rows, advantages, weight))


def merge_pass(micro: MicroBatch, group: DeviceGroup) -> MicroBatch:
    """Merges a pass [steps, images, ...] into [steps*images, ...], in the order of the devices that store it."""
    time, devices = group.time, group.images

    def merge(a: Array) -> Array:
        k, n, *rest = a.shape
        # Merging step by step would scatter a device's share over the merged axis, which XLA cannot express.
        a = a.reshape(time, k // time, devices, n // devices, *rest).swapaxes(1, 2)
        return jax.lax.with_sharding_constraint(a.reshape(k * n, *rest), group.merged)

    return jax.tree.map(merge, _with_image_numbers(micro))


def _with_image_numbers(micro: MicroBatch) -> MicroBatch:
    return micro._replace(image=jax.lax.broadcasted_iota(jnp.int32, micro.weight.shape, 1))


# ------------------------------------------------------------------------------ sums


class Term(NamedTuple):
    """A term of the loss, summed over samples, and its gradient."""

    gradient: Any
    loss: Float[Array, ""]


OF_ADVANTAGES = "loss", "policy_loss"  # sums that depend on the advantages


class Totals(NamedTuple):
    """Sums over all samples so far, divided once, at the update.

    `unscaled` is the part from groups that were closed before the global std was known; the update divides it by that.
    """

    gradient: Any
    sums: Metrics
    unscaled: Term | None = None

    def add_policy(self, term: Term, scale: Float[Array, ""]) -> "Totals":
        """Adds `scale` times a policy term to the loss and its gradient."""
        gradient = _add(self.gradient, term.gradient, scale)
        added = {name: self.sums[name] + scale * term.loss for name in OF_ADVANTAGES}
        return self._replace(gradient=gradient, sums=self.sums | added)


class GroupSums(NamedTuple):
    """Sums of a group whose advantages are unknown; g_i is the gradient of image i for advantage 1."""

    centred: Term  # sum of (r_i - m) g_i, m the mean of the rewards so far
    plain: Term  # sum of g_i
    kl: Term | None  # without its coefficient; None means no KL
    sums: Metrics


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """A partially trained group: the rewards of its trained images, and the sums over them."""

    rewards: Float[np.ndarray, "n"]
    sums: GroupSums


def sum_passes(
    accumulate: Callable[..., Any],
    group: DeviceGroup,
    policies: Policies,
    shared: SharedInputs,
    micros: MicroBatch,
    totals: Any,
    layout: Any,
    piece: Any = None,
) -> Any:
    """Returns `totals` after accumulate(totals, policies, shared, pass) of all passes, with the memory of one pass.

    If every device stores full parameters and tokens are not split, each device sums its share, and the sums are
    reduced once, at the end, over the devices with other samples. Otherwise XLA reduces in every pass.

    Args:
      accumulate: Adds a pass to sums.
      group: The mesh.
      policies: Parameters that a pass reads.
      shared: Inputs of all passes.
      micros: The passes, stacked.
      totals: Sums so far.
      layout: Shardings of the sums.
      piece: (first, count) of the passes. They may be traced, so that one program computes any piece. None means
        all passes.
    """

    def loop(policies, shared, micros, totals, piece, merge, constrain):
        """Adds the passes one by one, with each pass from `merge` and the sums from `constrain`."""

        def body(number, totals):
            micro = jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, number, 0, False), micros
            )
            return constrain(accumulate(totals, policies, shared, merge(micro)))

        passes = len(jax.tree.leaves(micros)[0])
        first, count = (0, passes) if piece is None else piece
        # A chunk with excluded images has fewer passes.
        end = passes if piece is None else jnp.minimum(first + count, passes)
        return jax.lax.fori_loop(first, end, body, totals)

    def merge_share(micro):
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), _with_image_numbers(micro))

    def sum_share(policies, shared, micros, totals, piece):
        first = jax.lax.axis_index(SAMPLES) == 0
        share = jax.tree.map(lambda a: jnp.where(first, a, 0), totals)
        with on_device(group.mesh.devices.flat[0], group.attention):
            share = loop(policies, shared, micros, share, piece, merge_share, lambda sums: sums)
        return jax.lax.psum(share, SAMPLES)

    inputs = policies, shared, micros, totals, piece
    replicated = group.mesh.shape[SEQUENCE] == 1 and all(map(group.is_replicated, policies[:-1]))
    if group.mesh.size == 1 or not replicated:
        with tracing_on(group.merged, group.attention):
            return loop(
                *inputs,
                lambda micro: merge_pass(micro, group),
                lambda sums: jax.lax.with_sharding_constraint(sums, layout),
            )
    full = PartitionSpec()
    # Unchecked: the check would reduce every gradient of replicated parameters over all devices.
    return jax.shard_map(
        sum_share,
        mesh=group.mesh,
        in_specs=(full, full, group.passes(1).spec, full, full),
        out_specs=full,
        check_vma=False,
    )(*inputs)


def recenter(sums: GroupSums, shift: Float[Array, ""]) -> GroupSums:
    """Updates the sums after the mean of the rewards decreased by `shift`."""
    return sums._replace(centred=_add(sums.centred, sums.plain, shift))


def fold_group(
    totals: Totals, sums: GroupSums, scale: Float[Array, ""] | None, kl_coefficient: float
) -> Totals:
    """Adds a complete group to a step's totals. `scale` is 1 / (std + eps); None means that the std is unknown."""
    if scale is None:
        totals = totals._replace(unscaled=_add(totals.unscaled, sums.centred, 1.0))
    else:
        totals = totals.add_policy(sums.centred, scale)
    gradient = totals.gradient
    added = {name: totals.sums[name] + value for name, value in sums.sums.items()}
    if sums.kl is not None:
        gradient = _add(gradient, sums.kl.gradient, kl_coefficient)
        added["loss"] = totals.sums["loss"] + kl_coefficient * sums.kl.loss
        added["kl"] = totals.sums["kl"] + sums.kl.loss
    return totals._replace(gradient=gradient, sums=totals.sums | added)


def _add(a: T, b: T, scale: Any) -> T:
    return jax.tree.map(lambda a, b: a + scale * b, a, b)
