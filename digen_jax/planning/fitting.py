"""Fits a config on a topology: the planner's layout with its compiled programs, or a smaller config."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp

from digen_jax.assemble import pipeline_of
from digen_jax.config.sections import Frozen
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.models.layers import Remat
from digen_jax.parallel.mesh import FSDP
from digen_jax.parallel.placement import check_processes
from digen_jax.planning.costs import Calibration
from digen_jax.planning.estimate import Topology, calibrate
from digen_jax.planning.hardware import GB
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.plan import (
    best_plan,
    can_run,
    changed_fields,
    make_problem,
    meshes,
    step_settings,
)
from digen_jax.planning.report import program_tables
from digen_jax.policies import is_precomputed, on_devices
from digen_jax.scheduling.layouts import PoolLayout, Problem, divisors
from digen_jax.scheduling.planner import Plan, layouts
from digen_jax.scheduling.settings import Costs

SPLIT = ((".*", FSDP),)
UNKNOWN = Calibration(Costs(1.0, 1.0), "nothing")  # of configs whose programs are not compiled yet


class Fit(NamedTuple):
    """Plan of a config that fits.

    Attributes:
      plan: The plan; only its choice includes the memory of compiled programs.
      config: The given config, or a smaller one.
      calibration: Costs of the first config whose programs all compiled.
    """

    plan: Plan
    config: TrainConfig
    calibration: Calibration


def fit_plan(config: TrainConfig, target: Topology, write: Callable[[str], None]) -> Fit:
    """Returns the best layout of the config that fits, or of the first smaller config that does.

    Configs whose parameters, optimizer state and samples alone do not fit are not compiled.

    Args:
      config: Config with a local model folder.
      target: Devices to plan for.
      write: Called with the tables of the programs, failures to fit, and the alternatives tried.

    Raises:
      ConfigError: Nothing that was tried fits, or the model's folder cannot be used.
    """
    calibration, count, changes = None, len(target.devices), ""
    for candidate in (config, *smaller_configs(config, count)):
        fields = changed_fields(config, candidate)
        changes = ", ".join(f"config.{name}={value}" for name, value in fields.items())
        if changes:
            write(f"tries {changes}")
        footprint, costs = model_footprint(candidate), calibration or UNKNOWN
        problem = make_problem(candidate, count, costs, footprint, target.memory)
        runs = functools.partial(_can_run, candidate, problem, target.devices)
        try:
            layouts(problem, runs)
        except ConfigError as error:
            write(f"does not fit, because {error}")
            continue
        found = target.assess(candidate)
        refused = [one for one in found if not one.fits]
        for one in refused:
            write(
                f"the config does not fit, because {one.program.name} needs {one.compiled.peak / GB:.1f} GB of a "
                f"device ({target.how})"
            )
        if refused:
            continue
        if calibration is None:
            write(f"\n{program_tables(found, target)}\n")
            source = f"the programs of the config on {target.name} ({target.how})"
            calibration = calibrate(candidate, found, target.chip, source)
            problem = make_problem(candidate, count, calibration, footprint, target.memory)
        known = {on_devices(candidate, count).placement.meshes: found}
        try:
            plan = best_plan(candidate, problem, runs, target.assess, write, known, target.how)
        except ConfigError as error:
            write(f"does not fit, because {error}")
            continue
        write(f"it fits ({target.how})" + (f" with {changes}" if changes else ""))
        return Fit(plan, candidate, calibration)
    also = f", also with {changes}" if changes else ""
    raise ConfigError(
        f"{target.name} is too small for this config{also}: choose a slice with more or larger devices"
    )


def _can_run(
    config: TrainConfig, problem: Problem, devices: Sequence[jax.Device], layout: PoolLayout
) -> bool:
    """Like `can_run`; also whether a run can divide the devices of several processes like the layout."""
    if not can_run(config, problem, layout):
        return False
    try:
        check_processes(meshes(problem, layout), devices)
    except ConfigError:
        return False
    return True


def smaller_configs(config: TrainConfig, devices: int) -> Iterator[TrainConfig]:
    """Yields configs that need less memory, first those that compute the same, then with a smaller `precision.frozen`.

    Without a LoRA, weights are not quantized.
    """
    yield from _that_compute_the_same(config, devices)
    frozen: tuple[Frozen, ...] = ("bfloat16", "int8") if config.lora.rank else ("bfloat16",)
    now = jnp.dtype(config.precision.stored).itemsize
    for dtype in (one for one in frozen if jnp.dtype(one).itemsize < now):
        precision = dataclasses.replace(config.precision, frozen=dtype)
        changed = dataclasses.replace(config, precision=precision)
        yield changed
        yield from _that_compute_the_same(changed, devices)


def _that_compute_the_same(config: TrainConfig, devices: int) -> Iterator[TrainConfig]:
    """Yields the config with more remat, then also with encoded prompts, sharded parameters, fewer images per pass.

    Skips changes that the config already has or that its batch does not allow.
    """
    by_memory = get_args(Remat)
    for remat in by_memory[by_memory.index(config.model.remat) + 1 :]:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        yield config
    if not is_precomputed(config, pipeline_of(config)[1]):
        prompts = dataclasses.replace(config.prompts, encoding="precomputed")
        config = dataclasses.replace(config, prompts=prompts)
        yield config
    if devices > 1 and not any(FSDP in rule for rule in config.placement.rules):
        placement = dataclasses.replace(config.placement, rules=SPLIT)
        config = dataclasses.replace(config, placement=placement)
        yield config
    trainer = on_devices(config, devices).placement.trainer
    unit = config.algorithm.images_per_sample * trainer.images
    each = config.trainer.micro_batch // unit
    for fewer in sorted(divisors(each), reverse=True)[1:]:
        images, evaluation = fewer * unit, config.evaluation
        changed = dataclasses.replace(
            config,
            sampler=dataclasses.replace(config.sampler, chunk=config.sampler.chunk * fewer // each),
            trainer=dataclasses.replace(config.trainer, micro_batch=images),
            evaluation=dataclasses.replace(evaluation, batch=min(evaluation.batch, images)),
        )
        try:
            step_settings(changed)
            on_devices(changed, devices)
        except ConfigError:
            continue
        yield changed
