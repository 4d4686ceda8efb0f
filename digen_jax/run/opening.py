"""Opens a run: its placement on the devices of this process, its rewards and its system."""

import dataclasses
import functools
import json
import pathlib
from contextlib import suppress

import jax

from digen_jax.assemble import build, read_scorers
from digen_jax.config.checks import check_meshes, check_rules
from digen_jax.config.door import place
from digen_jax.config.recipe import Recipe
from digen_jax.config.sections import AUTO, GIVEN, PlacementSection
from digen_jax.distributed.workers import RolloutWorkers
from digen_jax.encoding.ahead import prepare
from digen_jax.encoding.reached import reached
from digen_jax.engine.placement import ONE_DEVICE, MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.engine.system import System
from digen_jax.errors import ConfigError
from digen_jax.inference.model import run_recipe
from digen_jax.planning.calibration import Calibration
from digen_jax.planning.footprint import model_footprint
from digen_jax.planning.plan import auto_plan, make_problem, meshes
from digen_jax.planning.programs import measured_programs
from digen_jax.planning.step_costs import measured_costs
from digen_jax.process.launching import MEETING
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.pool import RewardPool
from digen_jax.run.own_mesh import build_trainer
from digen_jax.run.positions import Positions
from digen_jax.run.report import print_warnings
from digen_jax.run.scorers import try_files, try_scorers
from digen_jax.run.workdir import own_claim
from digen_jax.runtime.orders import Orders, several
from digen_jax.scheduling.deadlines import Deadline
from digen_jax.scheduling.planner.memory import Layout, device_bytes
from digen_jax.scheduling.planner.plan import Plan
from digen_jax.scheduling.settings import Costs


def open_system(
    recipe: Recipe,
    workdir: pathlib.Path,
    orders: Orders,
    positions: Positions,
    workers: RolloutWorkers | None = None,
) -> tuple[System, RewardPool]:
    """Tries the rewards, encodes the prompts if they are precomputed, and reads the model.

    Args:
      recipe: The validated config.
      workdir: Folder of the run.
      orders: Announces common work to the other processes that train: see `following`.
      positions: The checkpoints of the run.
      workers: Rollout workers in other processes. None means that all workers are in this one.

    Returns:
      The system, and the rewards, which the caller closes.

    Raises:
      ConfigError: A reward, a prompt file or the model is invalid, or a process has another config.
    """
    devices = jax.devices() if workers is None else workers.devices
    orders.announce("begin", json.dumps([recipe.as_json(), own_claim()]))
    orders.hear(MEETING)
    oldest = positions.oldest() or 0
    if workers is not None:
        # A worker may be ready before the model is read here: it need not draw the steps before the checkpoint.
        workers.step = oldest
    drawn = functools.partial(reached, recipe, workdir / "prompts", oldest)
    encoding = prepare(recipe, devices, drawn, "trainer" if workers else None)
    found, pool = resolve(recipe.rewards, meshes=True), recipe.reward_pool
    seconds = Deadline(recipe.runtime.deadline).seconds
    rewards = RewardPool(found, pool.processes, pool.retries, seconds)
    try:
        scorers = () if workers else read_scorers(recipe, devices)
        check_canaries(found, rewards.score)
        try_files(recipe, rewards.score)
        orders.announce("try")
        if scorers:
            try_scorers(recipe, scorers)
        if encoding is not None:
            print_warnings(recipe, encoding.family)
        with orders.together("encode"):
            if encoding is not None:
                encoding.run()
        system = (
            build_trainer(recipe, devices)
            if workers
            else build(recipe, devices).with_scorers(scorers)
        )
        if encoding is None:
            print_warnings(recipe, system.policy.family)
    except BaseException:  # Ctrl-C, too: otherwise the reward's processes would continue
        rewards.close()
        raise
    return system, rewards


def place_run(recipe: Recipe, workdir: pathlib.Path) -> Recipe:
    """The recipe of a run in `workdir`, on the available devices.

    With `placement.sizes` "auto" it has the placement of the run in `workdir`, else the planner's choice.

    Raises:
      ConfigError: a setting or the placement cannot work here.
    """
    if recipe.placement.sizes != AUTO:
        return place_here(recipe)
    if several():
        raise ConfigError(
            "config.placement = 'auto' plans for one process only: give config.placement a trainer that "
            "takes all devices of all processes, and rollout.data = 0"
        )
    devices = jax.device_count()
    if (workdir / "config.json").exists():
        return place(recipe.with_meshes(run_recipe(workdir).placement.meshes), devices)
    planned = recipe.with_meshes(planned_meshes(recipe))
    check_meshes(planned, devices)
    return planned


def place_here(recipe: Recipe) -> Recipe:
    """A recipe on the available devices; prints its meshes if they were made smaller for them.

    Raises:
      ConfigError: a setting cannot work here, or there is one device for given meshes of several.
    """
    devices, (rollout, trainer) = jax.device_count(), recipe.placement.meshes
    wanted = rollout.devices * rollout.workers, trainer.devices * trainer.workers
    # A config without sizes, which has the default ones, trains on one device.
    chosen = recipe.placement.meshes != PlacementSection().meshes
    if devices == 1 < sum(wanted) and chosen and recipe.placement.sizes == GIVEN:
        raise ConfigError(
            f"config.placement.rollout wants {wanted[0]} and config.placement.trainer {wanted[1]} devices, but there "
            "is 1: set config.placement.sizes to 'fitted', which samples and trains on it in turn"
        )
    placed = place(recipe, devices)
    sizes = placed.placement.meshes
    if sizes != recipe.placement.meshes and devices > 1:
        print(f"config.placement is fitted to {devices} devices: {sizes.plain()}", flush=True)
    return placed


def place_apart(recipe: Recipe) -> Recipe:
    """A recipe whose workers are separate processes: no mesh is made smaller for the devices of this one.

    Raises:
      ConfigError: a setting cannot work.
    """
    rollout, trainer = recipe.placement.meshes
    return place(recipe, rollout.devices * rollout.workers + trainer.devices)


def place_alone(recipe: Recipe) -> Recipe:
    """A recipe on one device, which samples and trains, whatever its placement.

    Raises:
      ConfigError: a setting cannot work there.
    """
    return place(recipe.with_meshes(ONE_DEVICE), jax.device_count())


def planned_meshes(recipe: Recipe) -> MeshSizes:
    """Chooses the workers of a run on the available devices by the planner.

    Costs are measured first, which compiles: on one device, or on all devices, which share the parameters, if one
    cannot hold the training. On one mesh weight sync moves nothing, so the plan takes it to be nearly free. If the
    devices report their memory, as GPUs and TPUs do, the programs are compiled for each device's share and layouts
    that need more are excluded.

    Raises:
      ConfigError: no layout can work.
    """
    devices, memory = jax.device_count(), _device_memory()
    alone = place_alone(recipe)
    footprint = model_footprint(alone)
    where = f"one of the {devices} devices"
    if memory is not None and devices > 1:
        problem = make_problem(alone, 1, Calibration(Costs(1.0, 1.0), "none"), footprint)
        if device_bytes(problem, Layout(1, 1)).largest > memory:
            all_devices = TrainerAxes(data=1, fsdp=devices)
            sizes = MeshSizes(RolloutAxes(data=0), all_devices)
            alone, where = place(recipe.with_meshes(sizes), devices), f"all {devices} devices"
    print(
        f"config.placement = 'auto': times each part of a step on {where}, compiling it first",
        flush=True,
    )

    def note(text: str) -> None:
        print(f"  {text}", flush=True)

    calibration = measured_costs(alone, note=note)
    if memory is not None:
        footprint = dataclasses.replace(footprint, programs=measured_programs(alone, note))
    plan = auto_plan(alone, devices, calibration, footprint, memory)
    sizes = meshes(plan.problem, plan.choice.layout)
    print(f"placement chosen by {calibration.source}: {sizes.plain()}", flush=True)
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
    """A layout and its speed by simulation, in words."""
    choice, devices = plan.choice, plan.problem.devices
    return (
        f"{choice.layout.describe()}: {choice.images_per_device_second * devices:.3g} images/s, "
        f"{choice.utilisation:.0%} of the bound (G + T)/N"
    )


def _device_memory() -> int | None:
    """Bytes that a program may take of a device; None: the backend does not tell, as that of CPUs."""
    told = jax.local_devices()[0].memory_stats()
    return told.get("bytes_limit") if told else None
