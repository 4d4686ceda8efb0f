"""The temporary memory of a recipe's programs on a device, as the compiler reports it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from digen_jax.assemble import outline
from digen_jax.config.train_config import TrainConfig
from digen_jax.models.family import Size
from digen_jax.parallel.accumulate import TrainBatch, trained_part
from digen_jax.parallel.encoding import block_size, example_record
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.parallel.sampler import Sampler, Weights
from digen_jax.parallel.system import System, sample_shardings
from digen_jax.planning.footprint import step_records, stored_bytes
from digen_jax.rewards.built_in import on_mesh
from digen_jax.scheduling.layouts import Programs

Lowered = jax.stages.Lowered


def measured_programs(recipe: TrainConfig, note: Callable[[str], None]) -> Programs:
    """The temporary memory of a recipe's programs, each compiled for the share of one device.

    The gradient is compiled on one device, or on as many as the axes tensor x sequence have, because these share their
    images. Sampling is compiled on as many as fsdp x tensor x sequence, because its copies of weights are smaller where
    weights are split.

    Each share is compiled when it is asked for. It is not extrapolated from two others, because the compiler's
    choices change with the size, and the bytes are not linear in it. Nothing is allocated.

    Args:
      recipe: of its placement only the rules and the axes tensor and sequence are read.
      note: called with each program's name before it is compiled, which may take minutes.
    """
    measured = _Measured(recipe, note)
    update = functools.cache(measured.update)
    encode = functools.cache(measured.encode)
    generate, evaluate, decode, score = map(
        functools.cache, (measured.generate, measured.evaluate, measured.decode, measured.score)
    )

    def sampling(parts: int, fsdp: int, tensor: int, sequence: int) -> dict[str, float]:
        axes = measured.at_hand(fsdp, tensor, sequence)
        chunk = -(-recipe.sampler.chunk // parts)
        evaluated = -(-recipe.evaluation.batch // parts)
        prompts = -(-recipe.drawn_groups // parts)
        shown = {recipe.model.size: chunk}
        shown[recipe.evaluation_size] = max(evaluated, shown.get(recipe.evaluation_size, 0))
        found = {
            "encoding": encode(prompts, *axes),
            "generating": generate(chunk, *axes),
            "evaluating": evaluate(evaluated, *axes),
            "decoding": max(decode(images, size, *axes) for size, images in shown.items()),
        }
        if on_mesh(recipe.rewards):
            found["scoring"] = max(score(images, size, *axes) for size, images in shown.items())
        return found

    return Programs(functools.cache(measured.gradient), lambda tuned: update() * tuned, sampling)


class _Measured:
    """The bytes of each program on a device."""

    def __init__(self, recipe: TrainConfig, note: Callable[[str], None]):
        self.recipe, self.note = recipe, note
        self.system = functools.cache(self._system)  # by fsdp, tensor and sequence
        self.at_hand = functools.cache(self._at_hand)

    def _system(self, fsdp: int, tensor: int, sequence: int) -> System:
        return _share(self.recipe, fsdp=fsdp, tensor=tensor, sequence=sequence)

    def _at_hand(self, fsdp: int, tensor: int, sequence: int) -> tuple[int, int, int]:
        """The axes fsdp, tensor and sequence, each 1 if this machine has fewer devices."""
        wanted = {"tensor": tensor, "sequence": sequence, "fsdp": fsdp}
        devices = len(jax.devices())
        found, left = {}, devices
        for axis, size in wanted.items():
            found[axis] = size if size <= left else 1
            left //= found[axis]
            if found[axis] < size:
                self.note(
                    f"memory: the temporaries of programs count as not split over the axis {axis} = {size}, "
                    f"because there are {devices} devices to compile for"
                )
        return found["fsdp"], found["tensor"], found["sequence"]

    def gradient(self, data: int, time: int) -> float:
        """Of a pass over the share of one of `data` x `time` devices."""
        given = self.recipe.placement.trainer
        _, tensor, sequence = self.at_hand(1, given.tensor, given.sequence)
        system = _share(self.recipe, data, time, tensor=tensor, sequence=sequence)
        settings = system.trainer.settings
        each = settings.micro_batch // self.recipe.algorithm.images_per_sample
        samples = each * -(-trained_samples(self.recipe) // (each * data))
        passing = f"{settings.pack} x {settings.micro_batch}"
        return self._needed(
            f"the gradient of {passing} samples", lower_gradient(system, self.recipe, samples)
        )

    def update(self) -> float:
        """In multiples of the trained parameters."""
        system = self.system(1, 1, 1)
        tuned = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(system.start))
        return self._needed("an update", system.trainer.lower_update(system.start)) / tuned

    def encode(self, prompts: int, fsdp: int, tensor: int, sequence: int) -> float:
        """Of `prompts` on each device, the results included, which are those of all prompts of a step.

        If prompts are encoded ahead, of a block of them.
        """
        system, here = self.system(fsdp, tensor, sequence), prompts * fsdp
        if system.sampler.stored is not None:
            return self._needed("encoding a block of prompts", lower_block(system))
        lowered = system.sampler.lower_encode(
            sampler_weights(system), [example_record(system.policy.family)] * here
        )
        found = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(lowered.out_info))
        others = found / here * (self.recipe.drawn_groups - here)
        return self._needed(f"encoding {prompts} prompts", lowered) + others

    def generate(self, images: int, fsdp: int, tensor: int, sequence: int) -> float:
        """Of `images` on each device, without the trajectories, which are counted apart."""
        system, recipe = self.system(fsdp, tensor, sequence), self.recipe
        kept = images * stored_bytes(recipe, system.sampler.shape)
        lowered = lower_generate(system, system.sampler, recipe, images * fsdp)
        return max(0, self._needed(f"generating {images} images", lowered) - kept)

    def evaluate(self, images: int, fsdp: int, tensor: int, sequence: int) -> float:
        """Of the sampler that evaluates, for `images` on each device."""
        system = self.system(fsdp, tensor, sequence)
        lowered = lower_generate(system, system.evaluator, self.recipe, images * fsdp)
        return self._needed(f"evaluating {images} images", lowered)

    def decode(self, images: int, size: Size, fsdp: int, tensor: int, sequence: int) -> float:
        """Of `images` on each device, the decoded images included."""
        system = self.system(fsdp, tensor, sequence)
        trained = size == self.recipe.model.size
        sampler = system.sampler if trained else system.evaluator
        lowered = sampler.lower_decode(sampler_weights(system), images * fsdp)
        return self._needed(f"decoding {images} images", lowered)

    def score(self, images: int, size: Size, fsdp: int, tensor: int, sequence: int) -> float:
        """Of the rewards on the mesh, for `images` on each device: the one that needs most."""
        system = self.system(fsdp, tensor, sequence)
        return max(
            self._needed(
                f"scoring {images} images by {one.name}",
                one.lower(images * fsdp, size.height, size.width),
            )
            for one in system.rollouts[0].scorers
        )

    def _needed(self, name: str, lowered: Lowered) -> int:
        self.note(f"memory of {name}: compiling")
        return beyond_arguments(lowered)


def beyond_arguments(lowered: Lowered) -> int:
    """Bytes of a program's temporaries and results on a device, without results that reuse an argument's memory."""
    found = lowered.compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def trained_samples(recipe: TrainConfig) -> int:
    """Images, or pairs of images, that the trainer gets of a chunk."""
    chunk, images = recipe.sampler.chunk, recipe.batch.images
    if recipe.algorithm.images_per_sample == 2:
        return chunk // images  # a pair of each group
    return recipe.advantages.kept(chunk, images)


def _share(
    recipe: TrainConfig,
    data: int = 1,
    time: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
) -> System:
    """On fsdp x tensor x sequence devices, with the part of a pass that they have on a mesh of these sizes."""
    trainer, whole = recipe.trainer, recipe.algorithm.images_per_sample
    own = dataclasses.replace(
        trainer,
        micro_batch=whole * -(-trainer.micro_batch // (whole * data)),
        pack=-(-trainer.pack // time),
    )
    axes = TrainerAxes(data=1, fsdp=fsdp, tensor=tensor, sequence=sequence)
    sizes = MeshSizes(RolloutAxes(data=0), axes)
    alone = dataclasses.replace(recipe.with_meshes(sizes), trainer=own)
    return outline(alone, jax.devices()[: axes.devices])


def lower_gradient(system: System, recipe: TrainConfig, samples: int) -> Lowered:
    """The trainer's program for a chunk of so many samples; `system` as from `outline`."""
    group = system.placement.trainer
    trajectory = lower_generate(system, system.sampler, recipe, samples).out_info
    trained = jax.eval_shape(
        lambda made: trained_part(made, jax.random.split(jax.random.key(0), samples)), trajectory
    )
    if recipe.algorithm.images_per_sample == 2:
        count, *shape = trained.x0.shape
        trained = trained._replace(x0=trained.x0.update(shape=(count, 2, *shape)))
    trained, sigmas = _placed(
        (trained, trajectory.sigmas), sample_shardings((trained, trajectory.sigmas), group)
    )
    records = step_records(recipe, system.policy.family)
    prompts = system.sampler.encoded(sampler_weights(system), records)
    conditioning, null = _placed(tuple(prompts), group.replicated)
    row = jax.ShapeDtypeStruct((samples,), np.int32, sharding=group.batch)
    number = row.update(dtype=np.float32)
    largest = jax.ShapeDtypeStruct((), sigmas.dtype, sharding=group.replicated)
    train_batch = TrainBatch(trained, conditioning, null, row, number, number, largest)
    return system.trainer.lower_accumulate(system.start, system.base, train_batch)


def lower_generate(system: System, sampler: Sampler, recipe: TrainConfig, images: int) -> Lowered:
    """The program for so many images of one of the system's samplers, that of training or that of evaluation."""
    own = (
        recipe.trained_steps
        if sampler is system.sampler and recipe.sampler.window.timestep_fraction < 1
        else 0
    )
    records = step_records(recipe, system.policy.family)
    return sampler.lower_generate(sampler_weights(system), records, images, own)


def sampler_weights(system: System) -> Weights:
    """Everything that the first sampling mesh holds, as shapes."""
    return system.rollouts[0].weights(system.start)


def lower_block(system: System) -> Lowered:
    """The program that encodes a block of prompts before the run samples."""
    sampler = system.sampler
    family = sampler.policy.family
    records = [example_record(family)] * block_size(family, sampler.group)
    return sampler.lower_encode(sampler_weights(system), records)


def _placed(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings, of which one may hold for a whole subtree."""
    each = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, each)
