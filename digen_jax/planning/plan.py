"""The planning problem of a config, its best layout, and the placement of a run with `placement.mode` "auto"."""

import dataclasses
import functools
import pathlib
from contextlib import suppress
from typing import Any

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
from digen_jax.planning.estimate import measured_costs
from digen_jax.planning.memory import compiled_temporaries, model_footprint
from digen_jax.policies import place_on_one_device
from digen_jax.process.job import several
from digen_jax.scheduling.layouts import Footprint, PoolLayout, Problem, Scaling, device_bytes
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
) -> Plan:
    """Returns the best layout that changes nothing else in the config, including its policy lag.

    Args:
      config: Config; only the rules and the axes tensor and sequence of its placement are read.
      devices: Number of devices; all are used.
      calibration: Costs on one device.
      footprint: Sizes of the model (`model_footprint`), for the axes fsdp. None means that these are 1.
      device_memory: Bytes per device; layouts that need more are excluded. None means no limit.

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

    return make_plan(problem, keeps)


def suited(config: TrainConfig, problem: Problem, layout: PoolLayout) -> TrainConfig:
    """Returns the config of a layout's run: its meshes, chunks and policy lag, and settings that fit them.

    If the sampling workers cannot split the evaluation batch, uses the next larger batch that they can split.
    """
    mode, batch = config.placement.mode, config.evaluation.batch
    pack, parts = config.trainer.pack, layout.sampling_parts
    sizes = {"mode": GIVEN if mode == AUTO else mode, **meshes(problem, layout)._asdict()}
    return dataclasses.replace(
        config,
        placement=dataclasses.replace(config.placement, **sizes),
        runtime=dataclasses.replace(config.runtime, max_policy_lag=layout.lag),
        sampler=dataclasses.replace(config.sampler, chunk=layout.chunk),
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
    devices report their memory, as GPUs and TPUs do, the programs are compiled for each device's share and layouts
    that need more are excluded.

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
    if memory is not None:
        footprint = dataclasses.replace(footprint, programs=compiled_temporaries(alone, note))
    plan = auto_plan(alone, devices, calibration, footprint, memory)
    sizes = meshes(plan.problem, plan.choice.layout)
    print(f"placement chosen by {calibration.source}: {sizes.as_dict()}", flush=True)
    note(_predicted(plan))
    runtime = dataclasses.replace(alone.runtime, max_policy_lag=1)
    lagging = dataclasses.replace(alone, runtime=runtime)
    with suppress(ConfigError):  # the algorithm or early training may not allow it
        check_rules(lagging)
        if not alone.runtime.max_policy_lag:
            gain = _predicted(auto_plan(lagging, devices, calibration, footprint, memory))
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
