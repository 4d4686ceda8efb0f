"""Placement of a run on the available devices, chosen by the planner (`placement.mode` "auto")."""

import dataclasses
import pathlib
from contextlib import suppress

import jax

from digen_jax.config.checks import check_meshes, check_rules
from digen_jax.config.load import fit_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.inference.model import read_run_config
from digen_jax.parallel.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.planning.costs import Calibration
from digen_jax.planning.estimate import measured_costs
from digen_jax.planning.memory import compiled_temporaries, model_footprint
from digen_jax.planning.plan import auto_plan, make_problem, meshes
from digen_jax.policies import place_on_one_device
from digen_jax.process.job import several
from digen_jax.scheduling.layouts import PoolLayout, device_bytes
from digen_jax.scheduling.planner import Plan
from digen_jax.scheduling.settings import Costs


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
      ConfigError: No layout can work.
    """
    devices, memory = jax.device_count(), _device_memory()
    alone = place_on_one_device(config)
    footprint = model_footprint(alone)
    where = f"one of the {devices} devices"
    if memory is not None and devices > 1:
        problem = make_problem(alone, 1, Calibration(Costs(1.0, 1.0), "none"), footprint)
        if device_bytes(problem, PoolLayout(1, 1)).largest > memory:
            all_devices = TrainerAxes(data=1, fsdp=devices)
            sizes = MeshSizes(RolloutAxes(data=0), all_devices)
            alone, where = fit_config(config.with_meshes(sizes), devices), f"all {devices} devices"
    print(
        f"config.placement = 'auto': compiling and timing each part of a step on {where}",
        flush=True,
    )

    def note(text: str) -> None:
        print(f"  {text}", flush=True)

    calibration = measured_costs(alone, note)
    if memory is not None:
        footprint = dataclasses.replace(footprint, programs=compiled_temporaries(alone, note))
    plan = auto_plan(alone, devices, calibration, footprint, memory)
    sizes = meshes(plan.problem, plan.choice.layout)
    print(f"placement chosen by {calibration.source}: {sizes.as_dict()}", flush=True)
    note(_predicted(plan))
    lagging = dataclasses.replace(
        alone, runtime=dataclasses.replace(alone.runtime, max_policy_lag=1)
    )
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
