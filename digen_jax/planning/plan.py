"""The planning problem of a config, its best layout, and the placement of a run with `placement.mode` "auto"."""

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, cast

import jax
from flax.traverse_util import flatten_dict

from digen_jax.assemble import parameter_shapes, pipeline_of
from digen_jax.config.checks import check_devices, check_meshes, check_rules
from digen_jax.config.load import fit_config
from digen_jax.config.sections import AUTO, GIVEN
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, prefix_errors
from digen_jax.families import check_parts
from digen_jax.inference.model import read_run_config
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.planning.costs import Calibration
from digen_jax.planning.estimate import ProgramCost, compile_programs, measured_costs
from digen_jax.planning.hardware import GB
from digen_jax.planning.memory import model_footprint
from digen_jax.policies import place_on_one_device
from digen_jax.process.job import several
from digen_jax.scheduling.layouts import (
    DeviceBytes,
    Footprint,
    PoolLayout,
    Problem,
    Programs,
    Scaling,
    device_bytes,
)
from digen_jax.scheduling.planner import Plan, make_plan
from digen_jax.scheduling.settings import Costs, Settings


def step_settings(config: TrainConfig) -> Settings:
    """Returns the scheduler's settings for one step, with a policy lag of 1 if early training permits it."""
    order = config.runtime.deterministic_order
    ordered = order == "yes" or (order == "auto" and not config.runtime.max_incomplete_groups)
    max_policy_lag = 0 if config.runtime.max_incomplete_groups else 1
    return dataclasses.replace(
        config.scheduler, steps=1, max_policy_lag=max_policy_lag, ordered=ordered
    )


def make_problem(
    config: TrainConfig,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> Problem:
    """Returns the planning problem on `devices` devices; see `Problem` for the last two arguments."""
    return Problem(
        devices,
        step_settings(config),
        calibration.costs,
        Scaling(calibration.worker_serial, config.sampler.chunk),
        Scaling(calibration.trainer_serial, config.trainer.micro_batch),
        config.trained_steps,
        calibration.scorers,
        footprint,
        device_memory,
        config.placement.rollout.tensor,
        config.placement.trainer.tensor,
        config.placement.rollout.sequence,
        config.placement.trainer.sequence,
    )


def auto_plan(
    config: TrainConfig,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
    note: Callable[[str], None] | None = None,
) -> Plan:
    """Returns the best layout that changes nothing else in the config, including its policy lag.

    Args:
      config: Config; only the rules and the axes tensor and sequence of its placement are read.
      devices: Number of devices; all are used.
      calibration: Costs on one device.
      footprint: Sizes of the model (`model_footprint`), for the axes fsdp. None means that these are 1.
      device_memory: Bytes per device; layouts that need more are excluded. None means no limit.
      note: Called with the programs of layouts, which are compiled here for their temporary memory. None means that
        this memory is not counted.

    Raises:
      ConfigError: No layout can work.
    """
    problem = make_problem(config, devices, calibration, footprint, device_memory)
    settings = dataclasses.replace(problem.settings, max_policy_lag=config.runtime.max_policy_lag)
    problem = dataclasses.replace(problem, settings=settings)

    def keeps(layout: PoolLayout) -> bool:
        if not can_run(config, problem, layout):
            return False
        sizes = meshes(problem, layout)
        return suited(config, problem, layout).with_meshes(sizes) == config.with_meshes(sizes)

    if note is None or device_memory is None:
        return make_plan(problem, keeps)
    assess = functools.partial(compile_programs, devices=jax.devices()[:devices], note=note)
    return best_plan(config, problem, keeps, assess, note)


def best_plan(
    config: TrainConfig,
    problem: Problem,
    runs: Callable[[PoolLayout], bool],
    assess: Callable[[TrainConfig], list[ProgramCost]],
    write: Callable[[str], None],
    known: Mapping[MeshSizes, list[ProgramCost]] = MappingProxyType({}),
    how: str = "compiled",
) -> Plan:
    """Returns the plan with the best layout that fits, including the temporary memory of programs on its own meshes.

    A layout that does not fit rules out all layouts whose devices have larger shares of the images. In the plan only
    the memory of the choice includes its programs.

    Args:
      config: Config.
      problem: Its planning problem, with a footprint without programs.
      runs: Whether a run can have a layout.
      assess: Returns the programs of a config.
      write: Called with each layout that does not fit.
      known: Programs on meshes that have been assessed.
      how: Source of the numbers, as a word.

    Raises:
      ConfigError: No layout can work.
    """
    ruled_out: list[Callable[[PoolLayout], bool]] = []
    found, limit = dict(known), problem.device_memory

    def with_programs(given: Problem, layout: PoolLayout) -> Problem:
        sizes = meshes(given, layout)
        if sizes not in found:
            found[sizes] = assess(suited(config, given, layout))
        return with_temporaries(problem, config, layout, found[sizes])

    while True:
        try:
            plan = make_plan(problem, lambda one: runs(one) and not any(f(one) for f in ruled_out))
        except ConfigError as error:
            if ruled_out:
                raise ConfigError(
                    "no other layout fits: use more devices, or settings that need less memory, which "
                    "launch/plan.py --topology tries"
                ) from error
            raise
        layout = plan.choice.layout
        full = with_programs(problem, layout)
        if meshes(full, layout) != meshes(problem, layout):
            # Programs need memory, too, so the fsdp axes are larger and the programs differ.
            full = with_programs(full, layout)
        held = device_bytes(full, layout)
        if limit is None or held.largest <= limit:
            choice = dataclasses.replace(plan.choice, memory=held)
            rows = tuple(choice if row is plan.choice else row for row in plan.best)
            return dataclasses.replace(plan, problem=full, choice=choice, best=rows)
        write(_refusal(layout, held, limit, how))
        ruled_out.append(functools.partial(at_least_as_full, layout, held, limit))


def _refusal(layout: PoolLayout, held: DeviceBytes, limit: float, how: str) -> str:
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
        f"{limit / GB:.1f} ({how}): {what}"
    )


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
    programs = Programs(temporaries["train"], temporaries["update"], sampling)
    return dataclasses.replace(problem, footprint=dataclasses.replace(footprint, programs=programs))


def suited(config: TrainConfig, problem: Problem, layout: PoolLayout) -> TrainConfig:
    """Returns the config of a layout's run: its meshes and policy lag, and settings that fit them.

    If the sampling workers cannot split the evaluation batch, uses the next larger batch that they can split.
    """
    mode, batch = config.placement.mode, config.evaluation.batch
    pack, parts = config.trainer.pack, layout.sampling_parts
    sizes = {"mode": GIVEN if mode == AUTO else mode, **meshes(problem, layout)._asdict()}
    return dataclasses.replace(
        config,
        placement=dataclasses.replace(config.placement, **sizes),
        runtime=dataclasses.replace(config.runtime, max_policy_lag=layout.lag),
        trainer=dataclasses.replace(config.trainer, pack=-(-pack // layout.time) * layout.time),
        evaluation=dataclasses.replace(config.evaluation, batch=-(-batch // parts) * parts),
    )


def changed_fields(config: TrainConfig, other: TrainConfig) -> dict[str, Any]:
    """Returns the fields of another config that differ, by dotted name."""
    now, then = (flatten_dict(one.as_json(), sep=".") for one in (config, other))
    return {name: value for name, value in then.items() if value != now[name]}


def can_run(config: TrainConfig, problem: Problem, layout: PoolLayout) -> bool:
    """Returns whether a run can have the workers of a layout, and their meshes can divide its batches."""
    if layout.workers > 1 and config.runtime.max_incomplete_groups:
        return False
    try:
        check_devices(suited(config, problem, layout), problem.devices)
    except ConfigError:
        return False
    return True


def meshes(problem: Problem, layout: PoolLayout) -> MeshSizes:
    """Returns the meshes of a layout, with fsdp axes that fit into memory."""
    rollout, trainer = 1, 1
    if problem.footprint is not None:
        held = device_bytes(problem, layout)
        rollout, trainer = held.worker_fsdp, held.trainer_fsdp
    return MeshSizes(
        RolloutAxes(
            data=layout.rollout_images // rollout,
            fsdp=rollout,
            workers=max(1, layout.rollout),
            tensor=problem.worker_tensor,
            sequence=problem.worker_sequence,
        ),
        TrainerAxes(
            data=layout.data // trainer,
            fsdp=trainer,
            time=layout.time,
            tensor=problem.trainer_tensor,
            sequence=problem.trainer_sequence,
            workers=layout.workers,
            samples=layout.samples and layout.rollout > 0,
        ),
    )


def place_run(config: TrainConfig, workdir: pathlib.Path) -> TrainConfig:
    """Returns the config of a run in `workdir` with the meshes of an earlier start there, or else the planner's.

    Raises:
      ConfigError: A setting or the placement cannot work here.
    """
    if several():
        raise ConfigError(
            "config.placement = 'auto' plans for one process only: set config.placement.trainer to all "
            "devices of all processes, and rollout.data = 0"
        )
    devices = jax.device_count()
    if (workdir / "config.json").exists():
        return fit_config(config.with_meshes(read_run_config(workdir).placement.meshes), devices)
    planned = config.with_meshes(planned_meshes(config))
    check_meshes(planned, devices)
    return planned


def planned_meshes(config: TrainConfig) -> MeshSizes:
    """Returns the meshes that the planner chooses for a run on the available devices.

    Costs are measured first, which compiles: on one device, or on all devices with sharded parameters if one device
    cannot hold the training. On one mesh weight sync moves no data, so the plan counts it as nearly free. If the
    devices report their memory, as GPUs and TPUs do, the programs of a layout are compiled and layouts that need more
    are excluded.

    Raises:
      ConfigError: No layout can work, or weights are missing.
    """
    devices, memory = jax.device_count(), _device_memory()
    alone = place_on_one_device(config)
    folder, family = pipeline_of(alone)
    with prefix_errors("config.model.folder: "):  # measuring takes minutes and reads no weights
        check_parts(family, folder, {*family.trained, *parameter_shapes(alone, family).frozen})
    footprint = model_footprint(alone)
    where = f"one of the {devices} devices"
    if memory is not None and devices > 1:
        problem = make_problem(alone, 1, Calibration(Costs(1.0, 1.0), "none"), footprint)
        if device_bytes(problem, PoolLayout(1, 1)).largest > memory:
            all_devices = TrainerAxes(data=1, fsdp=devices)
            sizes = MeshSizes(RolloutAxes(data=0), all_devices)
            alone, where = fit_config(config.with_meshes(sizes), devices), f"all {devices} devices"
    print(f"config.placement = 'auto': timing each part of a step on {where}", flush=True)
    note = functools.partial(print, " ", flush=True)
    calibration = measured_costs(alone, note)
    plan = auto_plan(alone, devices, calibration, footprint, memory, note)
    sizes = meshes(plan.problem, plan.choice.layout)
    print(f"placement chosen by {calibration.source}: {sizes.as_dict()}", flush=True)
    note(_predicted(plan))
    runtime = dataclasses.replace(alone.runtime, max_policy_lag=1)
    lagging = dataclasses.replace(alone, runtime=runtime)
    with suppress(ConfigError):  # the algorithm or early training may not allow it
        check_rules(lagging)
        if not alone.runtime.max_policy_lag:
            gain = _predicted(auto_plan(lagging, devices, calibration, footprint, memory, note))
            note(f"with --config.runtime.max_policy_lag=1: {gain}")
    return sizes


def _predicted(plan: Plan) -> str:
    """Describes a layout and its simulated speed."""
    choice, devices = plan.choice, plan.problem.devices
    return (
        f"{choice.layout.describe()}: {choice.images_per_device_second * devices:.3g} images/s, "
        f"{choice.utilisation:.0%} of the bound (G + T)/N"
    )


def _device_memory() -> int | None:
    """Returns the bytes per device that programs may use. None means that the backend, such as a CPU, reports none."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
