"""Fits a config on a topology: the planner's layout with its compiled programs, or a smaller config."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast, get_args

import jax

from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.models.layers import Remat
from digen_jax.parallel.mesh import FSDP
from digen_jax.parallel.placement import check_processes
from digen_jax.planning.costs import Calibration
from digen_jax.planning.estimate import ProgramCost, Topology, calibrate
from digen_jax.planning.hardware import GB
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.plan import (
    can_run,
    changed_fields,
    make_problem,
    meshes,
    step_settings,
    suited,
)
from digen_jax.planning.report import program_tables
from digen_jax.policies import on_devices
from digen_jax.scheduling.layouts import (
    DeviceBytes,
    PoolLayout,
    Problem,
    Programs,
    device_bytes,
    divisors,
)
from digen_jax.scheduling.planner import Plan, make_plan

SPLIT = ((".*", FSDP),)


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

    Args:
      config: Config with a local model folder.
      target: Devices to plan for.
      write: Called with the tables of the programs, failures to fit, and the alternatives tried.

    Raises:
      ConfigError: Nothing that was tried fits, or the model's folder cannot be used.
    """
    calibration, tried = None, []
    for candidate in (config, *smaller_configs(config, len(target.devices))):
        fields = changed_fields(config, candidate)
        changes = ", ".join(f"config.{name}={value}" for name, value in fields.items())
        if changes:
            write(f"tries {changes}")
            tried.append(changes)
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
        plan, why = best_layout(candidate, calibration, target, found, write)
        if plan is not None:
            write(f"it fits ({target.how})" + (f" with {changes}" if changes else ""))
            return Fit(plan, candidate, calibration)
        if why:
            write(f"does not fit, because {why}")
    also = f", also with {'; '.join(tried)}" if tried else ""
    raise ConfigError(
        f"{target.name} is too small for this config{also}: choose a slice with more or larger devices"
    )


def smaller_configs(config: TrainConfig, devices: int) -> Iterator[TrainConfig]:
    """Yields the config with more remat, then also with sharded parameters, then with ever fewer images per pass.

    Skips changes that the config already has or that its batch does not allow.
    """
    by_memory = get_args(Remat)
    for remat in by_memory[by_memory.index(config.model.remat) + 1 :]:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        yield config
    if not any(FSDP in rule for rule in config.placement.rules):
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


def best_layout(
    config: TrainConfig,
    calibration: Calibration,
    target: Topology,
    found: list[ProgramCost],
    write: Callable[[str], None],
) -> tuple[Plan | None, str]:
    """Returns the best layout that fits, with programs compiled on its own meshes, or (None, reason).

    A layout that does not fit rules out all layouts whose devices have larger shares of the images. `found` are the
    programs on the config's meshes.
    """
    count = len(target.devices)
    problem = make_problem(config, count, calibration, model_footprint(config), target.memory)
    ruled_out: list[Callable[[PoolLayout], bool]] = []
    known = {on_devices(config, count).placement.meshes: found}

    def allowed(layout: PoolLayout) -> bool:
        return (
            can_run(config, problem, layout)
            and _divides_processes(problem, layout, target.devices)
            and not any(rule(layout) for rule in ruled_out)
        )

    def with_programs(given: Problem, layout: PoolLayout) -> Problem:
        sizes = meshes(given, layout)
        if sizes not in known:
            known[sizes] = target.assess(suited(config, given, layout))
        return with_temporaries(problem, config, layout, known[sizes])

    while True:
        try:
            plan = make_plan(problem, allowed)
        except ConfigError as error:
            return None, "" if ruled_out else str(error)
        layout = plan.choice.layout
        full = with_programs(problem, layout)
        if meshes(full, layout) != meshes(problem, layout):
            # Programs need memory, too, so the fsdp axes are larger and the programs differ.
            full = with_programs(full, layout)
        held = device_bytes(full, layout)
        if target.memory is None or held.largest <= target.memory:
            choice = dataclasses.replace(plan.choice, memory=held)
            rows = tuple(choice if row is plan.choice else row for row in plan.best)
            return dataclasses.replace(plan, problem=full, choice=choice, best=rows), ""
        write(_refusal(layout, held, target))
        ruled_out.append(functools.partial(at_least_as_full, layout, held, target.memory))


def _refusal(layout: PoolLayout, held: DeviceBytes, target: Topology) -> str:
    """Returns a message with the layout and the largest parts of its fullest device's memory."""
    devices = {
        "a device that trains": held.trainer,
        "a device that only samples": held.worker,
        "a device that encodes prompts first": held.encode,
    }
    name, parts = max(devices.items(), key=lambda device: sum(device[1].values()))
    most = sorted(parts.items(), key=lambda part: -part[1])[:4]
    what = ", ".join(f"{what} {size / GB:.1f}" for what, size in most)
    return (
        f"{layout.describe()} does not fit, because {name} needs {sum(parts.values()) / GB:.1f} GB of "
        f"{(target.memory or 0) / GB:.1f} ({target.how}): {what}"
    )


def _divides_processes(problem: Problem, layout: PoolLayout, devices: Sequence[jax.Device]) -> bool:
    """Returns whether the devices of several processes are divided in a way that a run supports."""
    try:
        check_processes(meshes(problem, layout), devices)
    except ConfigError:
        return False
    return True


def at_least_as_full(
    failed: PoolLayout, held: DeviceBytes, limit: float, other: PoolLayout
) -> bool:
    """Returns whether another layout's devices have at least the shares and the roles of the too-full devices."""
    if max(sum(held.trainer.values()), sum(held.worker.values())) <= limit:
        return other.sampling_parts <= failed.sampling_parts  # the text encoders do not fit
    if failed.lag > other.lag:
        return False
    if sum(held.trainer.values()) <= limit:
        return other.rollout > 0 and other.rollout_images <= failed.rollout_images
    if failed.samples and not other.samples:
        return False
    return (
        other.workers <= failed.workers and other.data <= failed.data and other.time <= failed.time
    )


def with_temporaries(
    problem: Problem, config: TrainConfig, layout: PoolLayout, found: list[ProgramCost]
) -> Problem:
    """Returns the problem with the temporary memory of compiled programs, valid for this layout only."""
    # A program that was not compiled, because another does not fit, counts as 0.
    temporaries = Counter({one.program.name: one.compiled.temporaries for one in found})
    images = -(-config.sampler.chunk // layout.sampling_parts)
    footprint = cast(Any, problem.footprint)
    sampling: dict[str, float] = {
        "encoding": max(temporaries["encode"], temporaries["encode null"]),
        # Excludes trajectories, which are counted separately.
        "generating": max(0, temporaries["generate"] - footprint.trajectory * images),
        "evaluating": temporaries["evaluate"],
        "decoding": max(temporaries["decode"], temporaries["decode evaluated"]),
        "scoring": max(
            (size for name, size in temporaries.items() if name.startswith("score")), default=0
        ),
    }
    programs = Programs(
        lambda data, time: temporaries["train"],
        lambda tuned: temporaries["update"],
        lambda *mesh: sampling,
    )
    return dataclasses.replace(problem, footprint=dataclasses.replace(footprint, programs=programs))
