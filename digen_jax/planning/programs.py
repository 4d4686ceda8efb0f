"""The programs of a config's step on given devices, with the config's meshes and sharding rules.

Programs are traced from shapes; nothing is read or allocated.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from digen_jax.assemble import outline
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import negatives_differ
from digen_jax.models.family import Family, Record, Size
from digen_jax.parallel.accumulate import SharedInputs, TrainBatch, trained_part
from digen_jax.parallel.encoding import block_size, example_record
from digen_jax.parallel.mesh import with_shardings
from digen_jax.parallel.sampler import Sampler, Weights
from digen_jax.parallel.system import System, sample_shardings, trace_reshard
from digen_jax.planning.flops import Work, sampling_work, trained_samples, training_work

Traced = jax.stages.Traced


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a step.

    Attributes:
      name: Command that it executes, or a part of it.
      command: Field of `scheduling.settings.Costs` that its seconds belong to. "" means none.
      devices: Number of devices of its mesh.
      images: Number of images that it processes. 0 means none.
      what: Description of its work.
      trace: Returns the traced program.
      work: Needed FLOPs. None means unknown.
      share: Share of the traced FLOPs that run: a pass trains one expert, and its program has all of them.
    """

    name: str
    command: str
    devices: int
    images: int
    what: str
    trace: Callable[[], Traced]
    work: Work | None = None
    share: float = 1.0


def step_programs(config: TrainConfig, devices: Sequence[jax.Device]) -> Iterator[Program]:
    """Yields the programs of a step, in execution order, then those of an evaluation.

    Raises:
      ConfigError: The model's folder cannot be used, or there are not enough devices.
    """
    system = outline(config, devices)
    sampler, evaluator = system.sampler, system.evaluator
    yield from _weight_sync(system)
    yield from _encoding(system, config)
    images, evaluated = config.sampler.chunk, config.evaluation.batch
    yield _generation("generate", system, sampler, config, images)
    yield _decoding("decode", "decode", system, sampler, images)
    yield from _scoring("score", "decode", system, config.model.size, images)
    yield from _training(system, config)
    yield _generation("evaluate", system, evaluator, config, evaluated)
    if (evaluated, config.evaluation_size) != (images, config.model.size):
        yield _decoding("decode evaluated", "evaluate", system, evaluator, evaluated)
        size = config.evaluation_size
        yield from _scoring("score evaluated", "evaluate", system, size, evaluated)


def _weight_sync(system: System) -> Iterator[Program]:
    rollout = system.rollouts[0]
    programs = trace_reshard(system.start, rollout.group, rollout.dtype)
    for number, traced in enumerate(programs, 1):
        name = "sync" if len(programs) == 1 else f"sync {number}"
        what = "the new weights in the samplers' data type and sharding"
        trace = functools.partial(lambda one: one, traced)
        yield Program(name, "sync", rollout.group.mesh.size, 0, what, trace)


def _encoding(system: System, config: TrainConfig) -> Iterator[Program]:
    weights, sampler = sampler_weights(system), system.sampler
    size, records = sampler.group.mesh.size, step_records(config, sampler.policy.family)
    if sampler.stored is not None:
        family = sampler.policy.family
        block = [example_record(family)] * block_size(family, sampler.group)
        trace = functools.partial(sampler.trace_encode, weights, block)
        what = f"{len(block)} prompts, before the run samples"
        yield Program("encode", "", size, 0, what, trace)
        return
    trace = functools.partial(sampler.trace_encode, weights, records)
    yield Program("encode", "encode", size, 0, f"the {len(records)} prompts of a step", trace)
    if sampler.policy.reads_null:
        trace = functools.partial(sampler.trace_encode, weights, records, null=True)
        yield Program("encode null", "encode", size, 0, "the prompts without a text", trace)


def _generation(
    name: str, system: System, sampler: Sampler, config: TrainConfig, images: int
) -> Program:
    steps, guided = sampler.settings.steps, sampler.policy.sequences == 2
    what = f"{images} images in {steps} steps" + ", two sequences each" * guided
    trace = functools.partial(trace_generate, system, sampler, config, images)
    stored = sampler.settings.length
    work = sampling_work(sampler.policy, sampler.settings.size, steps, images, stored)
    return Program(name, name, sampler.group.mesh.size, images, what, trace, work)


def _decoding(name: str, command: str, system: System, sampler: Sampler, images: int) -> Program:
    trace = functools.partial(sampler.trace_decode, sampler_weights(system), images)
    what = f"{images} images from latents"
    return Program(name, command, sampler.group.mesh.size, images, what, trace)


def _scoring(name: str, command: str, system: System, size: Size, images: int) -> Iterator[Program]:
    """Yields the rewards on the rollout mesh; their seconds are included in decoding."""
    for one in system.rollouts[0].scorers:
        trace = functools.partial(one.trace, images, size)
        what = f"{images} images by the reward {one.name}"
        yield Program(f"{name} by {one.name}", command, one.group.mesh.size, images, what, trace)


def _training(system: System, config: TrainConfig) -> Iterator[Program]:
    samples, size = trained_samples(config), system.placement.trainer.mesh.size
    each_pass = f"{config.trainer.pack} x {config.trainer.micro_batch}"
    what = f"the gradient of {samples} x {config.trained_steps} samples, {each_pass} a pass"
    trace = functools.partial(trace_gradient, system, config, samples)
    work = training_work(config, system.policy.family, samples)
    share = 1 / len(system.policy.experts)
    yield Program("train", "train", size, config.sampler.chunk, what, trace, work, share)
    trace = functools.partial(system.trainer.trace_update, system.start)
    yield Program("update", "update", size, 0, "an optimizer step", trace)


def step_records(config: TrainConfig, family: Family) -> list[Record]:
    """Returns one record per prompt of a step.

    Programs depend on the number of records, and on whether their negative prompts differ.
    """
    records = [example_record(family)] * config.max_groups
    if not negatives_differ(config.prompts.paths):
        return records
    return [{**record, "negative_prompt": str(i)} for i, record in enumerate(records)]


def trace_gradient(system: System, config: TrainConfig, samples: int) -> Traced:
    """Traces the trainer's program for a chunk of `samples` samples; `system` is from `outline`."""
    group = system.placement.trainer
    trajectory = trace_generate(system, system.sampler, config, samples).out_info
    trained = jax.eval_shape(
        lambda made: trained_part(made, jax.random.split(jax.random.key(0), samples)), trajectory
    )
    together = config.algorithm.images_per_sample
    if together > 1:
        count, *shape = trained.x0.shape
        trained = trained._replace(x0=trained.x0.update(shape=(count, together, *shape)))
    arrays = trained, trajectory.sigmas
    trained, sigmas = with_shardings(arrays, sample_shardings(arrays, group))
    records = step_records(config, system.policy.family)
    prompts = system.sampler.encoded(sampler_weights(system), records)
    prompts = with_shardings(prompts, group.replicated)
    row: Any = jax.ShapeDtypeStruct((samples,), np.int32, sharding=group.batch)
    number = row.update(dtype=np.float32)
    largest: Any = jax.ShapeDtypeStruct((), sigmas.dtype, sharding=group.replicated)
    of_images = (
        number.update(shape=(samples, together))
        if together > 1 and not config.algorithm.ranks
        else number
    )
    shared = SharedInputs(prompts, largest)
    if (rewards := system.trainer.rewards) is not None:
        tokens: Any = tuple(
            jax.ShapeDtypeStruct((len(records), one.tokens), np.int32, sharding=group.replicated)
            for one, _ in rewards.scorers
        )
        shared = shared._replace(tokens=tokens, sigmas=sigmas)
    train_batch = TrainBatch(trained, shared, row, of_images, number)
    return system.trainer.trace_accumulate(system.start, system.base, train_batch)


def trace_generate(system: System, sampler: Sampler, config: TrainConfig, images: int) -> Traced:
    """Traces one of the system's samplers, for training or evaluation, for `images` images."""
    windowed = sampler is system.sampler and config.sampler.window.timestep_fraction < 1
    records = step_records(config, system.policy.family)
    steps = config.trained_steps if windowed else 0
    return sampler.trace_generate(sampler_weights(system), records, images, steps)


def sampler_weights(system: System) -> Weights:
    """Returns the shapes of all weights that the first rollout worker holds."""
    return system.rollouts[0].weights(system.start)
