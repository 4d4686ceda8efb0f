"""Division of a chunk into passes: the samples of one forward and backward pass, on each device.

A sample is a transition, or a final image at a noise level of the forward process. A pass takes k
denoising steps, or noise levels, of n images. The steps are split over the mesh axis time, the images
over the batch axes; a device's share of a pass consists of samples that it already has.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Key

from digen_jax.diffusion.noising import Times
from digen_jax.diffusion.sampling import Trajectory, Transitions, per_image
from digen_jax.parallel.placement import DeviceGroup


class Endpoints(NamedTuple):
    """Final images, from which the forward process makes samples: the draws depend only on the keys.

    A pair of images with the same noise and noise level counts as one of b, x0 `[b 2 ...]`, with one key.
    """

    x0: Float[Array, "b ..."]
    keys: Key[Array, "b"]
    sigmas: Float32[Array, "sigmas"]  # of the sampler


class NoiseLevels(NamedTuple):
    """Samples of the forward process: final images, and the noise level of each.

    A pass draws the noise itself, from the key and the number of the draw.
    """

    x0: Float[Array, "n ..."]
    keys: Key[Array, "n"]
    draws: Int[Array, "n"]
    sigma: Float32[Array, "n"]


class Experience(NamedTuple):
    """A chunk in the trainer's form: s transitions of b images, or b final images."""

    samples: Transitions | Endpoints
    conditioning: Any  # of P prompts
    null: Any  # of the empty prompt
    rows: Int[Array, "b"]  # each image's prompt
    advantages: Float[Array, "b"]  # DiffusionNFT: the probability of being good; DPO reads none
    weight: Float[Array, "b"]  # 1, or 0: the image is in no sum
    sigma_max: Float[Array, ""]  # sigmas[1] of the schedule


class Shared(NamedTuple):
    """The inputs of all passes over a chunk."""

    conditioning: Any
    null: Any
    sigma_max: Float[Array, ""]


class MicroBatch(NamedTuple):
    """The inputs of one forward and backward pass: n samples of any steps and images."""

    samples: Transitions | NoiseLevels
    rows: Int[Array, "n"]
    advantages: Float[Array, "n"]
    weight: Float[Array, "n"]  # 0 for padding, and for images that are left out
    image: Int[Array, "n"] | None = (
        None  # which of the pass; of each device's own where it has them apart
    )


def trained_part(trajectory: Trajectory, keys: Key[Array, "b"]) -> Transitions | Endpoints:
    """The trained part of a trajectory: the stored transitions or, without any, its end."""
    if len(trajectory.transitions.sigma):
        return trajectory.transitions
    return Endpoints(trajectory.latents, keys, trajectory.sigmas)


def shared(experience: Experience) -> Shared:
    """The part of a chunk that is not divided."""
    return Shared(experience.conditioning, experience.null, experience.sigma_max)


def passes(
    experience: Experience, images: int, steps: int, group: DeviceGroup, times: Times | None = None
) -> MicroBatch:
    """All samples of a chunk, divided into passes [m, steps, images, ...]; `times` draws the noise levels.

    Pass j of some steps has the images j, j + c, j + 2c, ...: strided, not contiguous, so that every device
    already has its share of a pass. If `steps` does not divide the trained steps, the last step is repeated
    with weight 0.
    """
    samples = _per_step(experience.samples, times)
    s, b = samples.sigma.shape
    rounds, chunks = -(-s // steps), b // images

    def cut(a: Array) -> Array:
        """[s b ...] -> [rounds*chunks steps images ...]."""
        if rounds * steps > len(a):
            a = jnp.concatenate([a, jnp.repeat(a[-1:], rounds * steps - len(a), axis=0)])
        a = a.reshape(rounds, steps, images, chunks, *a.shape[2:])
        # Before any axes are merged: for a merged axis XLA would gather the whole trajectory.
        a = jax.lax.with_sharding_constraint(jnp.moveaxis(a, 3, 1), group.passes(2))
        return a.reshape(rounds * chunks, *a.shape[2:])

    def per_step(a: Array) -> Array:
        """[b] -> [s b]."""
        return jnp.broadcast_to(a, (s, b))

    rows, advantages = per_step(experience.rows), per_step(experience.advantages)
    trained = (jnp.arange(rounds * steps) < s).astype(jnp.float32)
    weight = trained[:, None] * experience.weight
    return jax.tree.map(cut, MicroBatch(samples, rows, advantages, weight))


def _per_step(samples: Transitions | Endpoints, times: Times | None) -> Transitions | NoiseLevels:
    """All samples [s b ...]."""
    if isinstance(samples, Endpoints):
        sigma = times.draw(samples.keys, samples.sigmas)
        s, b = sigma.shape
        draws = jnp.broadcast_to(jnp.arange(s)[:, None], (s, b))
        x0, keys = (jnp.broadcast_to(a, (s, *a.shape)) for a in (samples.x0, samples.keys))
        return NoiseLevels(x0, keys, draws, sigma)
    return per_image(samples)


def merged(micro: MicroBatch, group: DeviceGroup) -> MicroBatch:
    """One pass [steps, images, ...] -> [steps*images, ...], in the order of the devices that hold it."""
    time, devices = group.time, group.images

    def merge(a: Array) -> Array:
        k, n, *rest = a.shape
        # Step by step, a device's share would be scattered over the merged axis, which XLA cannot express.
        a = a.reshape(time, k // time, devices, n // devices, *rest).swapaxes(1, 2)
        return jax.lax.with_sharding_constraint(a.reshape(k * n, *rest), group.merged)

    return jax.tree.map(merge, _numbered(micro))


def merged_on_device(micro: MicroBatch) -> MicroBatch:
    """The share of one device, [steps, images, ...] -> [steps*images, ...]."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), _numbered(micro))


def _numbered(micro: MicroBatch) -> MicroBatch:
    """[steps, images, ...] with the numbers of the images."""
    return micro._replace(image=jax.lax.broadcasted_iota(jnp.int32, micro.weight.shape, 1))
