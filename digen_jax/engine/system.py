"""What a run is made of, once it is assembled: meshes, programs, parameters."""

import functools
from typing import Any, NamedTuple

import jax

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.engine.draws import Draws
from digen_jax.engine.placement import DeviceGroup, Placement
from digen_jax.engine.policy import Policy
from digen_jax.engine.sampler import Sampler, Weights
from digen_jax.engine.trainer import Trainer


class Rollout(NamedTuple):
    """A mesh that samples: its programs, and all that they need but the tuned parameters.

    `dtype` is what parameters are sent and kept in, None: as they are.
    """

    sampler: Sampler
    evaluator: Sampler
    dtype: Any
    base: Any  # see Policy.sampler_base
    frozen: Any  # the other components

    @property
    def group(self) -> DeviceGroup:
        """Its mesh."""
        return self.sampler.group

    def weights(self, tuned: Any) -> Weights:
        """Tuned parameters resharded onto this mesh, beside all else that sampling needs.

        Where they lie as the mesh's rules say already, they are the given arrays.
        """
        return Weights(reshard(tuned, self.group, self.dtype), self.base, self.frozen)

    def moved(self, group: DeviceGroup, base: Any) -> "Rollout":
        """The same on another mesh; `base` may lie there already."""
        samplers = (
            Sampler(one.policy, group, one.settings) for one in (self.sampler, self.evaluator)
        )
        base = reshard(base, group, self.dtype)
        return Rollout(*samplers, self.dtype, base, reshard(self.frozen, group))


class System(NamedTuple):
    """The parts of a training run, their parameters loaded."""

    placement: Placement
    policy: Policy
    draws: Draws
    rollouts: tuple[Rollout, ...]  # those of the placement; colocated the trainer's mesh itself
    trainer: Trainer
    base: Any  # on the trainer mesh, see Policy
    start: Any  # what is tuned, before the first update; the trainer's `init` takes it over
    advantages: AdvantageSettings

    @property
    def sampler(self) -> Sampler:
        """The first sampling mesh's."""
        return self.rollouts[0].sampler

    @property
    def evaluator(self) -> Sampler:
        """The first sampling mesh's."""
        return self.rollouts[0].evaluator

    def untuned(self) -> Any:
        """What leaves the base model as it is, whatever `start` was; `base` holds a reference."""
        start = self.policy.untuned(self.base)
        return jax.device_put(start, self.placement.trainer.params(start))

    def publish(self, tuned: Any) -> Weights:
        """Tuned parameters on the first sampling mesh, with all else that it needs.

        Colocated they are the trainer's own arrays, which its next update consumes.
        """
        return self.rollouts[0].weights(tuned)


def tag_group(trainer: DeviceGroup, weights: str) -> DeviceGroup:
    """The trainer's devices as a sampling mesh.

    Args:
      trainer: the trainer's mesh.
      weights: "in place": sampled from where they lie as the trainer splits them. "resharded": from
        copies that are whole but for the axis tensor, which takes memory and saves gathering them in
        every pass.
    """
    return trainer.as_sampler if weights == "in place" else trainer.gathered


def reshard(tree: Any, group: DeviceGroup, dtype: Any = None) -> Any:
    """Parameters as a mesh's rules say: on their own devices by one program, else from mesh to mesh.

    `dtype` is theirs from then on, None: the one they have; they are rounded before they are sent.
    """
    if dtype is not None:
        tree = rounded(tree, dtype)
    return resharded(tree, group.params(tree))


def resharded(tree: Any, shardings: Any) -> Any:
    """Arrays as shardings of the same structure say: on their own devices by one program, else from mesh to mesh."""
    leaves, wanted = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    here = bool(leaves) and all(
        isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set
        for leaf, sharding in zip(leaves, wanted, strict=True)
    )
    if here and any(
        leaf.sharding != sharding for leaf, sharding in zip(leaves, wanted, strict=True)
    ):
        return jax.jit(_same, out_shardings=shardings)(tree)
    return jax.device_put(tree, shardings)


@functools.partial(jax.jit, static_argnums=1)
def rounded(tree: Any, dtype: Any) -> Any:
    """Parameters in another type."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def _same(tree: Any) -> Any:
    return tree
