"""A fragment cut into passes: which transitions one forward and backward pass takes, on which device.

A pass takes k denoising steps of n images at once. The steps are split over the mesh axis "time", the
images over the others; within a pass every device's share is what lies on it already.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from digen_jax.flow.sampling import Transitions
from digen_jax.runtime.placement import DeviceGroup


class Experience(NamedTuple):
    """A fragment as the trainer sees it: s trained transitions of b images."""

    transitions: Transitions
    conditioning: Any  # of P prompts
    null: Any  # of the empty prompt
    rows: Int[Array, "b"]  # each image's prompt
    advantages: Float[Array, "b"]
    sigma_max: Float[Array, ""]  # sigmas[1] of the schedule


class Shared(NamedTuple):
    """What all passes over a fragment read."""

    conditioning: Any
    null: Any
    sigma_max: Float[Array, ""]


class MicroBatch(NamedTuple):
    """What one forward and backward pass takes: n transitions, of whatever steps and images."""

    transitions: Transitions
    rows: Int[Array, "n"]
    advantages: Float[Array, "n"]
    weight: Float[Array, "n"]  # 0 for padding, else 1


def shared(experience: Experience) -> Shared:
    """The part of a fragment that is not cut."""
    return Shared(experience.conditioning, experience.null, experience.sigma_max)


def passes(experience: Experience, images: int, steps: int, group: DeviceGroup) -> MicroBatch:
    """All transitions of a fragment, cut into passes [m, steps, images, ...].

    Pass j of some steps holds the images j, j + c, j + 2c, ...: strided, not contiguous, so that every
    device's share of a pass already lies on it. Where `steps` does not divide the trained ones, the
    last is repeated with weight 0.
    """
    s, b = experience.transitions.log_prob.shape
    rounds, chunks = -(-s // steps), b // images

    def cut(a: Array) -> Array:
        """[s b ...] -> [rounds*chunks steps images ...]."""
        if rounds * steps > len(a):
            a = jnp.concatenate([a, jnp.repeat(a[-1:], rounds * steps - len(a), axis=0)])
        a = a.reshape(rounds, steps, images, chunks, *a.shape[2:])
        # Before any axes are merged: of a merged axis XLA would gather the whole trajectory.
        a = jax.lax.with_sharding_constraint(jnp.moveaxis(a, 3, 1), group.passes(2))
        return a.reshape(rounds * chunks, *a.shape[2:])

    def per_step(a: Array) -> Array:
        """[b] -> [s b]."""
        return jnp.broadcast_to(a, (s, b))

    t = experience.transitions
    sigma, sigma_next = (jnp.broadcast_to(a[:, None], (s, b)) for a in (t.sigma, t.sigma_next))
    transitions = t._replace(sigma=sigma, sigma_next=sigma_next)
    rows, advantages = per_step(experience.rows), per_step(experience.advantages)
    trained = (jnp.arange(rounds * steps) < s).astype(jnp.float32)
    weight = jnp.broadcast_to(trained[:, None], (rounds * steps, b))
    return jax.tree.map(cut, MicroBatch(transitions, rows, advantages, weight))


def merged(micro: MicroBatch, group: DeviceGroup) -> MicroBatch:
    """One pass [steps, images, ...] -> [steps*images, ...], in the order of the devices it lies on."""
    time, devices = group.time, group.mesh.size // group.time

    def merge(a: Array) -> Array:
        k, n, *rest = a.shape
        # Step by step, a device's share would be scattered over the merged axis, which XLA cannot express.
        a = a.reshape(time, k // time, devices, n // devices, *rest).swapaxes(1, 2)
        return jax.lax.with_sharding_constraint(a.reshape(k * n, *rest), group.merged)

    return jax.tree.map(merge, micro)


def merged_on_device(micro: MicroBatch) -> MicroBatch:
    """The share of one device, [steps, images, ...] -> [steps*images, ...]."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), micro)
