"""A chunk's sampled images on a trainer mesh: their shardings, selection of images, and the trainer's form."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int

from digen_jax.engine.hosts import put
from digen_jax.engine.packing import Endpoints, Experience
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.sampler import EncodedPrompts
from digen_jax.engine.system import System, resharded
from digen_jax.flow.sampling import Transitions


class Images(NamedTuple):
    """A chunk's sampled images, on the trainer mesh."""

    version: int  # of the policy that sampled them
    rows: Int[np.ndarray, "b"]  # each image's group within the step
    samples: Transitions | Endpoints
    sigmas: Float32[Array, "sigmas"]


def shardings(samples: tuple[Any, Any], trainer: DeviceGroup) -> tuple[Any, Any]:
    """Shardings of (a chunk's samples, its sigmas) on a trainer mesh: images are split over the devices."""
    trained, whole = samples[0], trainer.replicated
    if isinstance(trained, Endpoints):
        return Endpoints(trainer.batch, trainer.batch, whole), whole
    split = trainer.batch_of_steps
    means = None if trained.mean is None else split
    sigma = split if trained.sigma.ndim == 2 else whole
    return type(trained)(split, split, split, sigma, sigma, means), whole


def on_trainer(images: Images, trainer: DeviceGroup) -> Images:
    """Moves a chunk from any mesh to a trainer mesh."""
    samples = images.samples, images.sigmas
    moved, sigmas = resharded(samples, shardings(samples, trainer))
    return images._replace(samples=moved, sigmas=sigmas)


def selected(images: Images, places: Int[np.ndarray, "k"], trainer: DeviceGroup) -> Images:
    """Selects images of a chunk on the trainer mesh by their places, with the same sharding.

    A place may occur more than once. The number of places must be a multiple of the devices.
    """
    samples, at = images.samples, put(places, trainer.replicated)
    if isinstance(samples, Endpoints):
        x0, keys = _gathered((samples.x0, samples.keys), at, 0, trainer.batch)
        samples = Endpoints(x0, keys, samples.sigmas)
    else:
        samples = _gathered(samples, at, 1, trainer.batch_of_steps)
    return images._replace(rows=images.rows[places], samples=samples)


def receive(
    system: System,
    prompts: EncodedPrompts,
    images: Images,
    advantages: Float[Any, "b"],
    weight: Float32[Any, "b"] | None = None,
) -> Experience:
    """Converts a chunk on the trainer mesh to the trainer's form.

    Args:
      system: The trainer's system.
      prompts: Encoded prompts of the step.
      images: The chunk.
      advantages: Of each image. For an algorithm that `ranks`, any numbers in the order of the images' ranks.
      weight: Of each image. None means that all images train.
    """
    group = system.placement.trainer
    samples, rows = images.samples, images.rows
    weight = np.ones(len(rows), np.float32) if weight is None else weight
    prepared = system.trainer.algorithm.prepare(advantages, weight, rows)
    if (
        prepared.pairs is not None
    ):  # two images are one sample, with the key of the first, which is preferred
        x0 = _gathered(samples.x0, put(prepared.pairs, group.replicated), 0, group.batch)
        first = prepared.pairs[:, 0]
        keys = _gathered(samples.keys, put(first, group.replicated), 0, group.batch)
        samples, rows = Endpoints(x0, keys, samples.sigmas), rows[first]
    each = (put(a, group.batch) for a in (rows, prepared.advantages, prepared.weight))
    return Experience(samples, *prompts, *each, images.sigmas[1])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gathered(tree: Any, places: Int[Array, "..."], axis: int, sharding: NamedSharding) -> Any:
    """Selects `places` on axis `axis`, the images'; arrays without this axis are unchanged."""

    def gather(a: Array) -> Array:
        if a.ndim <= axis:
            return a
        return jax.lax.with_sharding_constraint(a[(slice(None),) * axis + (places,)], sharding)

    return jax.tree.map(gather, tree)
