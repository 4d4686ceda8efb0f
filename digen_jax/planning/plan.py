"""From a recipe to a plan: the shape of its step, the meshes of a layout, and the best layout."""

import dataclasses
from typing import Any

from flax.traverse_util import flatten_dict

from digen_jax.config.checks import check_devices
from digen_jax.config.sections import AUTO, GIVEN
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.planning.calibration import Calibration
from digen_jax.scheduling.layouts import Footprint, PoolLayout, Problem, Scaling, device_bytes
from digen_jax.scheduling.planner import Plan, make_plan
from digen_jax.scheduling.settings import Settings


def step_settings(recipe: TrainConfig) -> Settings:
    """The scheduler's settings for one step of a recipe, with a policy lag of 1 if early training permits it."""
    order = recipe.runtime.deterministic_order
    ordered = order == "yes" or (order == "auto" and not recipe.runtime.max_incomplete_groups)
    max_policy_lag = 0 if recipe.runtime.max_incomplete_groups else 1
    return dataclasses.replace(
        recipe.scheduler, steps=1, max_policy_lag=max_policy_lag, ordered=ordered
    )


def make_problem(
    recipe: TrainConfig,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> Problem:
    """The planning problem of a recipe on `devices` devices; the last two arguments as in `Problem`."""
    return Problem(
        devices,
        step_settings(recipe),
        calibration.costs,
        Scaling(calibration.worker_serial, recipe.sampler.chunk),
        Scaling(calibration.trainer_serial, recipe.trainer.micro_batch),
        recipe.trained_steps,
        calibration.scorers,
        footprint,
        device_memory,
        recipe.placement.rollout.tensor,
        recipe.placement.trainer.tensor,
        recipe.placement.rollout.sequence,
        recipe.placement.trainer.sequence,
    )


def auto_plan(
    recipe: TrainConfig,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> Plan:
    """The best layout that leaves everything else in the recipe as it is, its policy lag included.

    Args:
      recipe: only the rules and the axes tensor and sequence of its placement are read.
      devices: their number; all are used.
      calibration: costs on one device.
      footprint: the model's sizes (`model_footprint`), for the axes fsdp; None: these are 1.
      device_memory: bytes of a device, to exclude layouts that need more; None: any amount.

    Raises:
      ConfigError: no layout can work.
    """
    problem = make_problem(recipe, devices, calibration, footprint, device_memory)
    settings = dataclasses.replace(problem.settings, max_policy_lag=recipe.runtime.max_policy_lag)
    problem = dataclasses.replace(problem, settings=settings)

    def keeps(layout: PoolLayout) -> bool:
        if not can_run(recipe, problem, layout):
            return False
        sizes = meshes(problem, layout)
        return suited(recipe, problem, layout).with_meshes(sizes) == recipe.with_meshes(sizes)

    return make_plan(problem, keeps)


def suited(recipe: TrainConfig, problem: Problem, layout: PoolLayout) -> TrainConfig:
    """The recipe of a layout's run: its meshes, chunks and policy lag, and settings that fit them.

    If the workers that sample cannot split the evaluation's batch, this takes the next larger batch that they can.
    """
    asked, batch = recipe.placement.mode, recipe.evaluation.batch
    pack, parts = recipe.trainer.pack, layout.sampling_parts
    sizes = {"mode": GIVEN if asked == AUTO else asked, **meshes(problem, layout)._asdict()}
    return dataclasses.replace(
        recipe,
        placement=dataclasses.replace(recipe.placement, **sizes),
        runtime=dataclasses.replace(recipe.runtime, max_policy_lag=layout.lag),
        sampler=dataclasses.replace(recipe.sampler, chunk=layout.chunk),
        trainer=dataclasses.replace(recipe.trainer, pack=-(-pack // layout.time) * layout.time),
        evaluation=dataclasses.replace(recipe.evaluation, batch=-(-batch // parts) * parts),
    )


def overrides(
    recipe: TrainConfig, problem: Problem, layout: PoolLayout, planned: TrainConfig | None = None
) -> dict[str, Any]:
    """The fields of a recipe's config that change in a layout's run, by dotted name.

    `planned` is the recipe for which the layout was planned; None: the same recipe.
    """
    chosen = suited(planned or recipe, problem, layout)
    now, then = (flatten_dict(one.as_json(), sep=".") for one in (recipe, chosen))
    return {name: value for name, value in then.items() if value != now[name]}


def can_run(recipe: TrainConfig, problem: Problem, layout: PoolLayout) -> bool:
    """Whether a run can have the workers of a layout, and their meshes can divide its batches."""
    if layout.workers > 1 and recipe.runtime.max_incomplete_groups:
        return False
    try:
        check_devices(suited(recipe, problem, layout), problem.devices)
    except ConfigError:
        return False
    return True


def meshes(problem: Problem, layout: PoolLayout) -> MeshSizes:
    """The meshes of a layout, with axes fsdp that fit the memory."""
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
