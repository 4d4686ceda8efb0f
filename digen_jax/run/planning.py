"""From a config to a plan: its step, a candidate's sizes of meshes, `placement = "auto"`."""

import dataclasses
import pathlib
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from digen_jax.config import checks, recipe, sections
from digen_jax.engine.placement import fitted
from digen_jax.errors import ConfigError, blame
from digen_jax.inference.model import run_config
from digen_jax.run.footprint import model_footprint
from digen_jax.run.step_costs import measured_costs
from digen_jax.scheduling.planner import candidate as of
from digen_jax.scheduling.planner.calibration import Calibration
from digen_jax.scheduling.planner.candidate import Candidate
from digen_jax.scheduling.planner.memory import device_bytes
from digen_jax.scheduling.planner.problem import Footprint, Problem, Scaling
from digen_jax.scheduling.planner.search import Simulations, budget, search
from digen_jax.scheduling.planner.space import candidates
from digen_jax.scheduling.settings import Settings


def step_settings(config: ConfigDict) -> Settings:
    """The scheduler's view of a config's step, with every tactic allowed; early groups rule asynchrony out."""
    batch = config.batch
    settings = dataclasses.replace(
        sections.scheduler_settings(config),
        steps=1,
        staleness=0 if config.runtime.early_groups else 1,
        ordered=False,
        tag_fragments=batch.groups * batch.images // config.sampler.fragment,
    )
    with blame("config.batch and config.sampler.fragment: ", (ConfigError,)):
        settings.check()
    return settings


def make_problem(
    config: ConfigDict,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> Problem:
    """What is to be planned for a complete config on so many devices; the last two as in `Problem`."""
    return Problem(
        devices,
        step_settings(config),
        calibration.costs,
        Scaling(calibration.worker_serial, config.sampler.fragment),
        Scaling(calibration.trainer_serial, config.trainer.micro_batch),
        sections.trained_steps(config),
        calibration.scorers,
        footprint,
        device_memory,
    )


def auto_placement(
    config: ConfigDict,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> dict[str, dict[str, int]]:
    """The best placement by simulation: the config's sections `placement.rollout` and `.trainer`.

    What is simulated of each is what the run would do there: with the tactics that the config has switched on.

    Args:
      config: complete; what it says of the placement is not read.
      devices: how many there are; all are used.
      calibration: costs on one device.
      footprint: the model's sizes (`model_footprint`), for the axes fsdp; None: they are 1.
      device_memory: bytes, where placements that need more are to be refused.

    Raises:
      ConfigError: no placement can work.
    """
    problem = make_problem(config, devices, calibration, footprint, device_memory)
    runtime = config.runtime
    settings = dataclasses.replace(
        problem.settings, staleness=runtime.staleness, tag_fragments=runtime.tag_fragments
    )
    problem = dataclasses.replace(problem, settings=settings)
    own = dataclasses.replace(sections.scheduler_settings(config), steps=1)
    found = [
        c
        for c in candidates(problem)
        if (not c.workers or of.settings(problem, c) == own) and _runs(config, problem, c)
    ]
    best = search(Simulations(problem), found, budget(found))
    return placement_section(problem, best.candidate)


def placed(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
    """A complete config whose placement is one for the devices at hand, as its `sizes` say.

    With "auto" it is that of the run in `workdir`, else the planner's choice. What commands cost is measured
    first, on one of the devices, which compiles. There publication moves nothing, so the plan takes it to be
    nearly free.

    Raises:
      ConfigError: something of the config cannot work, or no placement can.
    """
    if not recipe.is_automatic(config):
        return fitting(config)
    if (workdir / "config.json").exists():
        known = run_config(workdir).placement
        return recipe.resized(config, {"rollout": known.rollout, "trainer": known.trainer})
    alone = recipe.resized(config, recipe.one_device())
    checks.check(alone)
    devices = jax.device_count()
    print(
        f"config.placement = 'auto': times each part of a step on one of the {devices} devices, compiling it first",
        flush=True,
    )
    calibration = measured_costs(alone, note=lambda text: print(f"  {text}", flush=True))
    sizes = auto_placement(alone, devices, calibration, model_footprint(alone))
    print(f"placement chosen by {calibration.source}: {sizes}", flush=True)
    return recipe.resized(config, sizes)


def fitting(config: ConfigDict) -> ConfigDict:
    """A complete config with smaller meshes where there are too few devices for them and its placement says so."""
    placement, devices = config.placement, jax.device_count()
    if placement.sizes != recipe.FITTED:
        return config
    sizes = fitted(placement, devices)
    wanted = {"rollout": placement.rollout.to_dict(), "trainer": placement.trainer.to_dict()}
    if sizes != wanted and devices > 1:
        print(f"config.placement is fitted to {devices} devices: {sizes}", flush=True)
    return recipe.resized(config, sizes)


def overrides(config: ConfigDict, problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """The fields of a complete config that a candidate's run has otherwise, by dotted name.

    Where the mesh that samples cannot split evaluation's batch, the next larger one that it can is taken.
    """
    section, settings = placement_section(problem, candidate), problem.settings
    time, batch = candidate.time, config.evaluation.batch
    sampling = candidate.worker_devices or candidate.trainer
    fields = {
        "placement.sizes": recipe.GIVEN if recipe.is_automatic(config) else config.placement.sizes,
        **{
            f"placement.{mesh}.{axis}": n
            for mesh, axes in section.items()
            for axis, n in axes.items()
        },
        "runtime.tag_fragments": settings.tag_fragments if candidate.tag else 0,
        "runtime.staleness": settings.staleness if candidate.asynchrony else 0,
        "trainer.pack": -(-config.trainer.pack // time) * time,
        "evaluation.batch": -(-batch // sampling) * sampling,
    }
    now = flatten_dict(config.to_dict(), sep=".")
    return {name: value for name, value in fields.items() if value != now[name]}


def can_run(config: ConfigDict, problem: Problem, candidate: Candidate) -> bool:
    """Whether a config with a candidate's `overrides` can divide its batches among the meshes."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(overrides(config, problem, candidate))
    return _divides(changed, problem.devices)


def _divides(config: ConfigDict, devices: int) -> bool:
    try:
        checks.check_devices(config, devices)
    except ConfigError:
        return False
    return True


def _runs(config: ConfigDict, problem: Problem, candidate: Candidate) -> bool:
    """Whether a config's batches can be divided among a candidate's meshes."""
    if config.trainer.pack % candidate.time:
        return False
    sizes = placement_section(problem, candidate)
    return _divides(recipe.resized(config, sizes), problem.devices)


def placement_section(problem: Problem, candidate: Candidate) -> dict[str, dict[str, int]]:
    """{rollout: {workers, data, fsdp}, trainer: {data, fsdp, time}}; rollout's data 0: colocated."""
    rollout, trainer = 1, 1
    if problem.footprint is not None:
        held = device_bytes(problem, candidate)
        rollout, trainer = held.worker_fsdp, held.trainer_fsdp
    return {
        "rollout": {
            "workers": max(1, candidate.workers),
            "data": candidate.worker_devices // rollout,
            "fsdp": rollout,
        },
        "trainer": {"data": candidate.data // trainer, "fsdp": trainer, "time": candidate.time},
    }
