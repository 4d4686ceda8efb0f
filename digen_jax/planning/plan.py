"""The planning problem of a config, the meshes of a layout, and the best layout for a number of devices."""

import dataclasses
from typing import Any

from flax.traverse_util import flatten_dict

from digen_jax.config.checks import check_devices
from digen_jax.config.sections import AUTO, GIVEN
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.planning.costs import Calibration
from digen_jax.scheduling.layouts import Footprint, PoolLayout, Problem, Scaling, device_bytes
from digen_jax.scheduling.planner import Plan, make_plan
from digen_jax.scheduling.settings import Settings


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
