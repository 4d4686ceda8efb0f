"""The programs of a recipe's step on given devices, with the recipe's meshes and rules; nothing is allocated."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax

from digen_jax.assemble import outline
from digen_jax.config.train_config import TrainConfig
from digen_jax.models.family import Size
from digen_jax.parallel.encoding import block_size
from digen_jax.parallel.sampler import Sampler
from digen_jax.parallel.system import System, lower_reshard
from digen_jax.planning.footprint import step_records
from digen_jax.planning.programs import (
    lower_block,
    lower_generate,
    lower_gradient,
    sampler_weights,
    trained_samples,
)
from digen_jax.planning.work import Work, sampling_work, training_work


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a step.

    Attributes:
      name: of the command that it carries out, or a part of it.
      command: the field of `scheduling.settings.Costs` to which its seconds belong; "": none.
      devices: of its mesh.
      images: that it processes; 0: it is not about images.
      what: what it does, in words.
      lower: gives it before its compilation.
      work: FLOPs that it needs; None: the model's family does not say.
    """

    name: str
    command: str
    devices: int
    images: int
    what: str
    lower: Callable[[], jax.stages.Lowered]
    work: Work | None = None


def programs(recipe: TrainConfig, devices: Sequence[jax.Device]) -> Iterator[Program]:
    """The programs of a step, in its order, then those of an evaluation.

    Raises:
      ConfigError: the model's folder cannot be used, or the devices do not suffice.
    """
    system = outline(recipe, devices)
    yield from _weight_sync(system)
    yield from _sampling(system, recipe)
    yield from _training(system, recipe)
    yield from _evaluation(system, recipe)


def _weight_sync(system: System) -> Iterator[Program]:
    rollout = system.rollouts[0]
    changed = lower_reshard(system.start, rollout.group, rollout.dtype)
    for number, lowered in enumerate(changed, 1):
        name = "sync" if len(changed) == 1 else f"sync {number}"
        what = "the new weights as the samplers want them"
        yield Program(name, "sync", rollout.group.mesh.size, 0, what, lambda one=lowered: one)


def _sampling(system: System, recipe: TrainConfig) -> Iterator[Program]:
    images = recipe.sampler.chunk
    yield from _encoding(system, recipe)
    yield _generation("generate", "generate", system, system.sampler, recipe, images)
    yield _decoding("decode", "decode", system, system.sampler, images)
    yield from _scoring("score", "decode", system, recipe.model.size, images)


def _encoding(system: System, recipe: TrainConfig) -> Iterator[Program]:
    weights, sampler = sampler_weights(system), system.sampler
    size, records = sampler.group.mesh.size, step_records(recipe, sampler.policy.family)
    if sampler.stored is not None:
        count = block_size(sampler.policy.family, sampler.group)
        what = f"{count} prompts, before the run samples"
        yield Program("encode", "", size, 0, what, lambda: lower_block(system))
        return
    what = f"the {len(records)} prompts of a step"
    yield Program("encode", "encode", size, 0, what, lambda: sampler.lower_encode(weights, records))
    if sampler.policy.reads_null:
        what = "the prompts without a text"
        yield Program(
            "encode null", "encode", size, 0, what, lambda: sampler.lower_encode_null(weights, records)
        )  # fmt: skip


def _training(system: System, recipe: TrainConfig) -> Iterator[Program]:
    samples, size = trained_samples(recipe), system.placement.trainer.mesh.size
    work = training_work(recipe, system.policy.family, samples)
    what = f"the gradient of {samples} x {recipe.trained_steps} samples, {_passes(recipe)} a pass"
    yield Program(
        "train", "train", size, recipe.sampler.chunk, what,
        lambda: lower_gradient(system, recipe, samples), work,
    )  # fmt: skip
    what = "an optimizer step"
    yield Program(
        "update", "update", size, 0, what, lambda: system.trainer.lower_update(system.start)
    )


def _evaluation(system: System, recipe: TrainConfig) -> Iterator[Program]:
    images = recipe.evaluation.batch
    yield _generation("evaluate", "evaluate", system, system.evaluator, recipe, images)
    if (images, recipe.evaluation_size) != (recipe.sampler.chunk, recipe.model.size):
        yield _decoding("decode evaluated", "evaluate", system, system.evaluator, images)
        yield from _scoring("score evaluated", "evaluate", system, recipe.evaluation_size, images)


def _generation(
    name: str, command: str, system: System, sampler: Sampler, recipe: TrainConfig, images: int
) -> Program:
    steps = sampler.settings.steps
    guided = ", two sequences each" if sampler.policy.sequences == 2 else ""
    what = f"{images} images in {steps} steps{guided}"
    return Program(
        name, command, sampler.group.mesh.size, images, what,
        lambda: lower_generate(system, sampler, recipe, images),
        sampling_work(sampler.policy, sampler.settings.size, steps, images),
    )  # fmt: skip


def _decoding(name: str, command: str, system: System, sampler: Sampler, images: int) -> Program:
    weights = sampler_weights(system)
    what = f"{images} images from latents"
    return Program(
        name, command, sampler.group.mesh.size, images, what, lambda: sampler.lower_decode(weights, images)
    )  # fmt: skip


def _scoring(name: str, command: str, system: System, size: Size, images: int) -> Iterator[Program]:
    """The rewards on the sampling mesh, whose seconds are a part of decoding."""
    for one in system.rollouts[0].scorers:
        what = f"{images} images by the reward {one.name}"
        lower = functools.partial(one.lower, images, size.height, size.width)
        yield Program(f"{name} by {one.name}", command, one.group.mesh.size, images, what, lower)


def _passes(recipe: TrainConfig) -> str:
    return f"{recipe.trainer.pack} x {recipe.trainer.micro_batch}"
