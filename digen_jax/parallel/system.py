"""Components of a run (meshes, programs, parameters), and moves of parameters and samples between meshes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.checkpoints.quantization import is_quantized
from digen_jax.diffusion.sampling import Transitions
from digen_jax.models.family import Record
from digen_jax.parallel.accumulate import FinalImages, SharedInputs, TrainBatch
from digen_jax.parallel.mesh import put, with_shardings
from digen_jax.parallel.placement import DeviceGroup, Placement
from digen_jax.parallel.policy import EncodedPrompts, Policy
from digen_jax.parallel.sampler import Sampler, SampleRng, Weights
from digen_jax.parallel.trainer import Trainer


class Rollout(NamedTuple):
    """A rollout mesh: its programs, and all parameters that they need except the tuned ones."""

    sampler: Sampler
    evaluator: Sampler
    dtype: Any  # dtype of sent and stored parameters; None means unchanged
    base: Any  # see `Policy.sampler_base`
    frozen: Any  # parameters of the other components
    scorers: tuple[Any, ...] = ()  # rewards computed on this mesh, each a `RewardModel`

    @property
    def group(self) -> DeviceGroup:
        """Rollout mesh."""
        return self.sampler.group

    def weights(self, tuned: Any) -> Weights:
        """Reshards tuned parameters onto this mesh and adds all other parameters that sampling needs.

        Arrays that already have the mesh's shardings are not copied.
        """
        return Weights(reshard(tuned, self.group, self.dtype), self.base, self.frozen)

    def moved(self, group: DeviceGroup, base: Any) -> "Rollout":
        """Returns this rollout on another mesh; `base` may be on it already."""
        sampler, evaluator = (
            Sampler(one.policy, group, one.settings, one.stored)
            for one in (self.sampler, self.evaluator)
        )
        base = reshard(base, group, self.dtype)
        scorers = tuple(one.moved(group) for one in self.scorers)
        frozen, dtype = reshard(self.frozen, group), self.dtype
        return Rollout(sampler, evaluator, dtype, base, frozen, scorers)


class GivenImages(NamedTuple):
    """Image files that train instead of sampled images.

    Attributes:
      fields: Fields of a prompt record that name the files of its group, the best first.
      read: Returns the latents of files, on the host.
    """

    fields: tuple[str, ...]
    read: Callable[[Sequence[str]], Float32[np.ndarray, "n *latent"]]

    def latents(self, records: Sequence[Record]) -> Float32[np.ndarray, "n *latent"]:
        """Returns the latents of complete groups; each record is repeated for the images of its group."""
        count = len(self.fields)
        return self.read([record[self.fields[i % count]] for i, record in enumerate(records)])

    def scores(self, images: int) -> Float32[np.ndarray, "n 1"]:
        """Returns 1 for the best image of each group, and 0 for the others."""
        return (np.arange(images) % len(self.fields) == 0).astype(np.float32)[:, None]


class System(NamedTuple):
    """Components of a training run, with loaded parameters."""

    placement: Placement
    policy: Policy
    rng: SampleRng
    rollouts: tuple[Rollout, ...]  # of the placement; if colocated, the trainer's mesh
    trainer: Trainer
    base: Any  # on the trainer mesh, see `Policy`
    start: Any  # tuned parameters before the first update; consumed by the trainer's `init`
    advantages: AdvantageSettings
    sent: Any = None  # see `Rollout.dtype`
    # Builds a rollout on a mesh of this process and reads missing parameters, if all rollout workers are remote.
    sampling_on: Callable[[DeviceGroup], Rollout] | None = None
    trainers: tuple[Trainer, ...] = ()  # of the further training meshes
    # Updates all parameters, on one mesh of all training devices. None means that `trainer` updates.
    joint_trainer: Trainer | None = None
    given: GivenImages | None = None  # None means that images are sampled

    @property
    def updater(self) -> Trainer:
        """Trainer whose mesh stores the optimizer state and updates."""
        return self.joint_trainer or self.trainer

    @property
    def sampler(self) -> Sampler:
        """Sampler of the first rollout mesh."""
        return self.rollouts[0].sampler

    @property
    def evaluator(self) -> Sampler:
        """Evaluator of the first rollout mesh."""
        return self.rollouts[0].evaluator

    def with_scorers(self, scorers: tuple[Any, ...]) -> "System":
        """Copies the rewards of the first rollout mesh to all rollout meshes."""
        first, *others = self.rollouts
        copies = (
            one._replace(scorers=tuple(scorer.moved(one.group) for scorer in scorers))
            for one in others
        )
        return self._replace(rollouts=(first._replace(scorers=scorers), *copies))

    def on(self, trainer: Trainer) -> "System":
        """Returns the system of a further training mesh, with its programs and copies of the base parameters."""
        group, rollouts = trainer.group, self.rollouts
        placement = dataclasses.replace(self.placement, home=group)
        base = reshard(self.base, group)
        if placement.colocated:
            rollouts = (self.rollouts[0].moved(group.as_sampler, self.policy.sampler_base(base)),)
        return self._replace(placement=placement, trainer=trainer, base=base, rollouts=rollouts)

    def assistant(self, weights: str) -> Rollout:
        """Returns the rollout on the trainer's devices.

        With `weights` "in place", it samples with the trainer's shardings; with "resharded", with copies that are
        unsharded except over the axis tensor, which take memory and save gathering in every pass.
        """
        if self.placement.colocated:
            return self.rollouts[0]
        trainer = self.placement.trainer
        group = trainer.as_sampler if weights == "in place" else trainer.gathered
        if self.sampling_on is not None:
            return self.sampling_on(group)
        return self.rollouts[0].moved(group, self.policy.sampler_base(self.base))

    def untuned(self) -> Any:
        """Returns a `tuned` equal to the base model, regardless of `start`; `base` must have a reference."""
        start = self.policy.untuned(self.base)
        return jax.device_put(start, self.placement.trainer.params(start))

    def rollout_weights(self, tuned: Any) -> Weights:
        """Reshards tuned parameters onto the first rollout mesh and adds all other parameters that it needs.

        If colocated, they are the trainer's arrays, which its next update donates.
        """
        return self.rollouts[0].weights(tuned)


def reshard(tree: Any, group: DeviceGroup, dtype: Any = None) -> Any:
    """Reshards parameters by a mesh's rules: with one program on the same devices, else by transfer.

    Args:
      tree: Parameters by component, or their shapes; the result of shapes is shapes.
      group: The mesh.
      dtype: Dtype to which parameters are cast before the transfer. None means unchanged.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        return sharded_shapes(tree if dtype is None else shapes_in_dtype(tree, dtype), group)
    if dtype is not None:
        tree = cast(tree, dtype)
    return resharded(tree, group.params(tree))


def trace_reshard(tree: Any, group: DeviceGroup, dtype: Any = None) -> list[jax.stages.Traced]:
    """Traces the programs of `reshard` for shapes with shardings; transfers between devices need none."""
    programs = []
    if dtype is not None:
        programs.append(cast.trace(tree, dtype))
        tree = shapes_in_dtype(tree, dtype)
    shardings = group.params(tree)
    if _needs_program(jax.tree.leaves(tree), jax.tree.leaves(shardings)):
        programs.append(jax.jit(_same, out_shardings=shardings).trace(tree))
    return programs


def sharded_shapes(tree: Any, group: DeviceGroup) -> Any:
    """Adds the shardings of a mesh's rules to shapes of parameters."""
    return with_shardings(tree, group.params(tree))


def shapes_in_dtype(tree: Any, dtype: Any) -> Any:
    """Returns shapes of the same parameters in another dtype; quantized kernels keep theirs."""

    def changed(path: tuple, leaf: Any) -> Any:
        return leaf if is_quantized(path, leaf) else leaf.update(dtype=dtype)

    return jax.tree.map_with_path(changed, tree)


def resharded(tree: Any, shardings: Any) -> Any:
    """Reshards arrays to shardings of the same structure: with one program on the same devices, else by transfer."""
    leaves, wanted = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    if all(isinstance(leaf, jax.Array) for leaf in leaves) and _needs_program(leaves, wanted):
        return jax.jit(_same, out_shardings=shardings)(tree)
    return jax.device_put(tree, shardings)


def _needs_program(leaves: list[Any], wanted: list[Any]) -> bool:
    """Returns whether arrays or shapes are on the wanted devices, but some with another sharding."""
    pairs = [(leaf.sharding, sharding) for leaf, sharding in zip(leaves, wanted, strict=True)]
    here = all(now.device_set == then.device_set for now, then in pairs)
    return here and any(now != then for now, then in pairs)


@functools.partial(jax.jit, static_argnums=1)
def cast(tree: Any, dtype: Any) -> Any:
    """Casts parameters to another dtype, except quantized kernels."""

    def changed(path: tuple, leaf: Array) -> Array:
        return leaf if is_quantized(path, leaf) else leaf.astype(dtype)

    return jax.tree.map_with_path(changed, tree)


def _same(tree: Any) -> Any:
    return tree


class SampledImages(NamedTuple):
    """Sampled images of a chunk, on the trainer mesh."""

    version: int  # policy version that sampled them
    rows: Int[np.ndarray, "b"]  # group index of each image within the step
    samples: Transitions | FinalImages
    sigmas: Float32[Array, "sigmas"]


def sample_shardings(samples: tuple[Any, Any], trainer: DeviceGroup) -> tuple[Any, Any]:
    """Returns the shardings of (a chunk's samples, its sigmas) on a trainer mesh, with images split over devices."""
    trained, replicated, batch = samples[0], trainer.replicated, trainer.batch
    if isinstance(trained, FinalImages):
        return FinalImages(batch, batch, replicated), replicated
    split = trainer.batch_of_steps
    means = None if trained.mean is None else split
    sigma = split if trained.sigma.ndim == 2 else replicated
    return type(trained)(split, split, split, sigma, sigma, means), replicated


def move_to_trainer(images: SampledImages, trainer: DeviceGroup) -> SampledImages:
    """Moves a chunk from any mesh to a trainer mesh."""
    samples = images.samples, images.sigmas
    moved, sigmas = resharded(samples, sample_shardings(samples, trainer))
    return images._replace(samples=moved, sigmas=sigmas)


def select_images(
    images: SampledImages, places: Int[np.ndarray, "k"], trainer: DeviceGroup
) -> SampledImages:
    """Selects images of a chunk on the trainer mesh by their indices `places`, with the same sharding.

    An index may repeat. The number of indices must be a multiple of the number of devices.
    """
    samples, at = images.samples, put(places, trainer.replicated)
    if isinstance(samples, FinalImages):
        x0, keys = _gather((samples.x0, samples.keys), at, 0, trainer.batch)
        samples = FinalImages(x0, keys, samples.sigmas)
    else:
        samples = _gather(samples, at, 1, trainer.batch_of_steps)
    return images._replace(rows=images.rows[places], samples=samples)


def make_train_batch(
    system: System,
    prompts: EncodedPrompts,
    images: SampledImages,
    advantages: Float[Any, "b *s"],
    weight: Float32[Any, "b"] | None = None,
    records: Sequence[Record] = (),
) -> TrainBatch:
    """Converts a chunk on the trainer mesh to the trainer's format.

    Args:
      system: System of the trainer.
      prompts: Encoded prompts of the step.
      images: The chunk.
      advantages: Advantage of each image, or of each of its s transitions. For an algorithm that `ranks`, any numbers
        in the same order.
      weight: Weight of each image. None means that all images train.
      records: Prompt records of the step, for differentiable rewards.
    """
    group = system.placement.trainer
    samples, rows = images.samples, images.rows
    weight = np.ones(len(rows), np.float32) if weight is None else weight
    prepared = system.trainer.algorithm.prepare(advantages, weight, rows)
    if prepared.members is not None:
        # Several images form one sample, with the key of the first one.
        x0 = _gather(samples.x0, put(prepared.members, group.replicated), 0, group.batch)
        first = prepared.members[:, 0]
        keys = _gather(samples.keys, put(first, group.replicated), 0, group.batch)
        samples, rows = FinalImages(x0, keys, samples.sigmas), rows[first]
    each = (rows, prepared.advantages, prepared.weight)
    at, values, weights = (put(a, group.batch) for a in each)
    shared = SharedInputs(prompts, images.sigmas[1])
    if (rewards := system.trainer.rewards) is not None:
        tokens = tuple(put(ids, group.replicated) for ids in rewards.tokenize(records))
        shared = shared._replace(tokens=tokens, sigmas=images.sigmas)
    return TrainBatch(samples, shared, at, values, weights)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _gather(tree: Any, places: Int[Array, "..."], axis: int, sharding: NamedSharding) -> Any:
    """Selects `places` along the image axis `axis`; arrays without this axis are unchanged."""

    def gather(a: Array) -> Array:
        if a.ndim <= axis:
            return a
        return jax.lax.with_sharding_constraint(a[(slice(None),) * axis + (places,)], sharding)

    return jax.tree.map(gather, tree)
