"""Opens a run's config with a placement for the devices at hand, which the planner chooses if asked."""

import dataclasses
import pathlib

import jax
from ml_collections import ConfigDict

from digen_jax.config.door import open_recipe
from digen_jax.config.recipe import Recipe, complete, resized
from digen_jax.config.sections import AUTO
from digen_jax.engine.placement import ONE_DEVICE, MeshSizes
from digen_jax.errors import ConfigError
from digen_jax.inference.model import run_recipe
from digen_jax.run.footprint import model_footprint
from digen_jax.run.planning import auto_placement
from digen_jax.run.programs import measured_programs
from digen_jax.run.step_costs import measured_costs
from digen_jax.runtime.orders import several


def open_run(config: ConfigDict, workdir: pathlib.Path) -> Recipe:
    """The recipe of a run in `workdir`, on the devices at hand.

    With `placement.sizes` "auto" it has the placement of the run in `workdir`, else the planner's choice.

    Raises:
      ConfigError: a setting or the placement cannot work.
    """
    full = complete(config)
    if full.placement.sizes != AUTO:
        return open_fitted(full)
    if several():
        raise ConfigError(
            "config.placement = 'auto' plans for one process only: give config.placement a trainer that "
            "takes all devices of all processes, and rollout.data = 0"
        )
    begun = (workdir / "config.json").exists()
    sizes = run_recipe(workdir).placement.meshes if begun else planned_meshes(full)
    return open_recipe(resized(full, sizes), jax.device_count())


def open_fitted(config: ConfigDict) -> Recipe:
    """A config's recipe on the devices at hand; prints its meshes if they were made smaller for them.

    Raises:
      ConfigError: a setting cannot work.
    """
    devices, full = jax.device_count(), complete(config)
    recipe = open_recipe(full, devices)
    sizes = recipe.placement.meshes.plain()
    wanted = {name: full.placement[name].to_dict() for name in sizes}
    if sizes != wanted and devices > 1:
        print(f"config.placement is fitted to {devices} devices: {sizes}", flush=True)
    return recipe


def open_alone(config: ConfigDict) -> Recipe:
    """A config's recipe on one device, which samples and trains, whatever its placement.

    Raises:
      ConfigError: a setting cannot work there.
    """
    return open_recipe(resized(complete(config), ONE_DEVICE), jax.device_count())


def planned_meshes(config: ConfigDict) -> MeshSizes:
    """The planner's choice for a config on the devices at hand.

    Costs are measured first, on one of the devices, which compiles. On one device publication moves
    nothing, so the plan takes it to be nearly free. If the devices tell how much memory they have, as GPUs
    and TPUs do, the programs are compiled for each device's share and placements that need more are excluded.

    Raises:
      ConfigError: a setting cannot work, or no placement can.
    """
    alone, devices = open_alone(config), jax.device_count()
    print(
        f"config.placement = 'auto': times each part of a step on one of the {devices} devices, compiling it first",
        flush=True,
    )

    def note(text: str) -> None:
        print(f"  {text}", flush=True)

    calibration = measured_costs(alone, note=note)
    footprint, memory = model_footprint(alone), _device_memory()
    if memory is not None:
        footprint = dataclasses.replace(footprint, programs=measured_programs(alone, note))
    sizes = auto_placement(alone, devices, calibration, footprint, memory)
    print(f"placement chosen by {calibration.source}: {sizes.plain()}", flush=True)
    return sizes


def _device_memory() -> int | None:
    """Bytes that a program may take of a device; None: the backend does not tell, as that of CPUs."""
    told = jax.local_devices()[0].memory_stats()
    return told.get("bytes_limit") if told else None
