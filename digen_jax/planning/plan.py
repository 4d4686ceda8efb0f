"""From a recipe to a plan: its step, the mesh sizes of a proposal, and the best proposal."""

import dataclasses
from typing import Any

from flax.traverse_util import flatten_dict

from digen_jax.config.checks import check_devices
from digen_jax.config.recipe import Recipe
from digen_jax.config.sections import AUTO, GIVEN
from digen_jax.engine.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner import proposal as of
from digen_jax.scheduling.planner.calibration import Calibration
from digen_jax.scheduling.planner.memory import device_bytes
from digen_jax.scheduling.planner.problem import Footprint, Problem, Scaling
from digen_jax.scheduling.planner.proposal import Proposal
from digen_jax.scheduling.planner.search import Simulations, budget, search
from digen_jax.scheduling.planner.space import proposals
from digen_jax.scheduling.settings import Settings


def step_settings(recipe: Recipe) -> Settings:
    """The scheduler's settings for one step of a recipe, with every tactic allowed that early groups permit."""
    batch = recipe.batch
    return dataclasses.replace(
        recipe.scheduler,
        steps=1,
        staleness=0 if recipe.runtime.early_groups else 1,
        ordered=False,
        tag_fragments=batch.groups * batch.images // recipe.sampler.fragment,
    )


def make_problem(
    recipe: Recipe,
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
        Scaling(calibration.worker_serial, recipe.sampler.fragment),
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


def auto_placement(
    recipe: Recipe,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> MeshSizes:
    """The best placement by simulation.

    Each proposal is simulated as the run would use it: with the tactics that the recipe has switched on.

    Args:
      recipe: only the rules and the axes tensor of its placement are read.
      devices: their number; all are used.
      calibration: costs on one device.
      footprint: the model's sizes (`model_footprint`), for the axes fsdp; None: these are 1.
      device_memory: bytes of a device, to refuse placements that need more.

    Raises:
      ConfigError: no placement can work.
    """
    problem = make_problem(recipe, devices, calibration, footprint, device_memory)
    runtime = recipe.runtime
    settings = dataclasses.replace(
        problem.settings, staleness=runtime.staleness, tag_fragments=runtime.tag_fragments
    )
    problem = dataclasses.replace(problem, settings=settings)
    own = dataclasses.replace(recipe.scheduler, steps=1)
    found = [
        c
        for c in proposals(problem)
        if (not c.workers or of.settings(problem, c) == own) and _runs(recipe, problem, c)
    ]
    best = search(Simulations(problem), found, budget(found))
    return meshes(problem, best.proposal)


def suited(recipe: Recipe, problem: Problem, proposal: Proposal) -> Recipe:
    """The recipe of a proposal's run, with its meshes and tactics, and settings that fit them.

    If the sampling mesh cannot split the evaluation's batch, this takes the next larger batch that it can split.
    """
    settings, asked = problem.settings, recipe.placement.sizes
    time, batch = proposal.time, recipe.evaluation.batch
    sampling = proposal.worker_images or proposal.data * proposal.time
    found = meshes(problem, proposal)._asdict()
    return dataclasses.replace(
        recipe,
        placement=dataclasses.replace(
            recipe.placement, sizes=GIVEN if asked == AUTO else asked, **found
        ),
        runtime=dataclasses.replace(
            recipe.runtime,
            tag_fragments=settings.tag_fragments if proposal.tag else 0,
            staleness=settings.staleness if proposal.asynchrony else 0,
        ),
        trainer=dataclasses.replace(recipe.trainer, pack=-(-recipe.trainer.pack // time) * time),
        evaluation=dataclasses.replace(recipe.evaluation, batch=-(-batch // sampling) * sampling),
    )


def overrides(
    recipe: Recipe, problem: Problem, proposal: Proposal, planned: Recipe | None = None
) -> dict[str, Any]:
    """The fields of a recipe's config that change in a proposal's run, by dotted name.

    `planned` is the recipe that the proposal was made for, None: the same.
    """
    chosen = suited(planned or recipe, problem, proposal)
    now, then = (flatten_dict(one.as_json(), sep=".") for one in (recipe, chosen))
    return {name: value for name, value in then.items() if value != now[name]}


def can_run(recipe: Recipe, problem: Problem, proposal: Proposal) -> bool:
    """Whether the meshes of a proposal's run can divide its batches."""
    return _divides(suited(recipe, problem, proposal), problem.devices)


def _divides(recipe: Recipe, devices: int) -> bool:
    try:
        check_devices(recipe, devices)
    except ConfigError:
        return False
    return True


def _runs(recipe: Recipe, problem: Problem, proposal: Proposal) -> bool:
    """Whether a proposal's meshes can divide a recipe's batches."""
    if recipe.trainer.pack % proposal.time:
        return False
    return _divides(recipe.with_meshes(meshes(problem, proposal)), problem.devices)


def meshes(problem: Problem, proposal: Proposal) -> MeshSizes:
    """The meshes of a proposal, with axes fsdp that fit the memory; without rollout workers it is colocated."""
    rollout, trainer = 1, 1
    if problem.footprint is not None:
        held = device_bytes(problem, proposal)
        rollout, trainer = held.worker_fsdp, held.trainer_fsdp
    workers = max(1, proposal.workers)
    return MeshSizes(
        RolloutAxes(
            proposal.worker_images // rollout,
            rollout,
            workers,
            proposal.worker_tensor,
            proposal.worker_sequence,
        ),
        TrainerAxes(
            proposal.data // trainer, trainer, proposal.time, proposal.tensor, proposal.sequence
        ),
    )
