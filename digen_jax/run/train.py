"""A whole training run in a workdir: claim it, continue where it was left, train, show the results."""

import pathlib

import jax

from digen_jax.config.recipe import MAY_CHANGE, Recipe
from digen_jax.distributed.engine import RayEngine
from digen_jax.distributed.launch import TrainerPart
from digen_jax.distributed.transfer import Shares, TrainerLink
from digen_jax.distributed.workers import RolloutWorkers, rollout_workers
from digen_jax.engine.hosts import job_devices
from digen_jax.errors import ConfigError
from digen_jax.process.ending import hangs
from digen_jax.process.launching import Place, join_job
from digen_jax.process.remembering import remembering
from digen_jax.process.terminal import fitted
from digen_jax.records.checkpoint import was_saved
from digen_jax.records.checkpoint_folder import saved_steps, steps_done
from digen_jax.records.metrics import read_metrics
from digen_jax.records.records import full_disk, where
from digen_jax.run.following import TrainerMesh, follow_run
from digen_jax.run.loop import Run
from digen_jax.run.opening import place_apart, place_run
from digen_jax.run.stopping import reason_to_stop
from digen_jax.run.workdir import changes, claim_workdir, finished_step, usable
from digen_jax.runtime.log import read_log
from digen_jax.runtime.orders import Orders, is_first, leading


def train(recipe: Recipe, workdir: pathlib.Path, part: TrainerPart | None = None) -> int | None:
    """Runs or continues the training that `recipe` describes, in `workdir`.

    With several processes that train together, all call it and see the workdir; the first one coordinates.

    Args:
      recipe: of the run.
      workdir: its folder.
      part: this process's part in a trainer whose rollout workers are on Ray; None: the devices that train sample, too.

    Returns:
      None if the run is finished; the process's exit code if a signal stopped it before.

    Raises:
      ConfigError: what the recipe asks for cannot work here, or a mistake in the values of the reward.
      Stopped: an indispensable part of the run hangs or dies, such as the reward.
    """
    with remembering(), fitted():
        if part is not None:
            return _train_with_workers(recipe, workdir, part)
        if not is_first():
            return follow_run(recipe, workdir)
        return _lead(recipe, workdir)


def _train_with_workers(recipe: Recipe, workdir: pathlib.Path, part: TrainerPart) -> int | None:
    recipe = place_apart(recipe)
    engine = RayEngine(part.address)
    # Its exit ends the process with code 1 if another thread still frees a stored object.
    hangs("Ray")
    hosts, place = recipe.placement.meshes.trainer.hosts, part.place
    number = place.process if place else 0
    shares = Shares(engine.find(part.mailbox), number, hosts) if hosts > 1 else None
    if number:
        devices = _join(recipe, place)
        return follow_run(recipe, workdir, TrainerMesh(devices, TrainerLink(engine, shares)))
    # In one job with the workers they must start before this process waits for them.
    job = place if part.one_job else None
    with rollout_workers(recipe, engine, part.devices, shares, job) as workers:
        workers.devices = _join(recipe, place)
        return _lead(recipe, workdir, workers)


def _join(recipe: Recipe, place: Place | None) -> list[jax.Device]:
    if place is not None:
        join_job(place)
    return job_devices(recipe.placement.meshes.trainer.devices, "config.placement.trainer")


def _lead(
    recipe: Recipe, workdir: pathlib.Path, workers: RolloutWorkers | None = None
) -> int | None:
    with leading() as orders:
        if workers is None:
            recipe = place_run(recipe, workdir)
        code = lead(recipe, workdir, orders, workers)
        orders.announce("end", (None, code))
    return code


def lead(
    recipe: Recipe, workdir: pathlib.Path, orders: Orders, workers: RolloutWorkers | None = None
) -> int | None:
    """As `train`, in the process that coordinates; `workers` are rollout workers in other processes."""
    asked = recipe.as_json()
    # If another process uses the run's folder, or it is unusable, the claim below finds the reason.
    changed = changes(workdir, asked) if workdir.is_dir() else {}
    with (
        full_disk(workdir),
        claim_workdir(workdir, asked, MAY_CHANGE, lambda: _check_steps(recipe, workdir)),
        usable(workdir),
    ):
        finished = finished_step(workdir) or 0
        stopped = reason_to_stop(recipe.stopping, workdir) if finished else None
        if finished < recipe.steps and not stopped:
            for file, read in {"metrics.jsonl": read_metrics, "commands.jsonl": read_log}.items():
                if (workdir / file).exists():
                    read(workdir / file)  # so that damage is found before anything slow
            _check_checkpoints(workdir)
            run = Run(recipe, workdir, orders, workers)
            return run.train([f"{name}: {change}" for name, change in changed.items()])
    why = f"It has {stopped}" if stopped else "To continue, give a larger config.steps"
    print(f"This run is finished: {finished} steps are done. {why}.")
    print(where(workdir))
    return None


def _check_steps(recipe: Recipe, workdir: pathlib.Path) -> None:
    """Raises ConfigError if a run has done more steps than it is asked for."""
    done = steps_done(workdir / "checkpoints")
    if done > recipe.steps:
        raise ConfigError(
            f"config.steps = {recipe.steps}, but the run in {workdir} has done "
            f"{done} steps already: give {done} or more"
        )


def _check_checkpoints(workdir: pathlib.Path) -> None:
    """Checks that the checkpoints of a run were not deleted, which would otherwise start again at step 0.

    Raises:
      ConfigError: they were deleted.
    """
    metrics, folder = workdir / "metrics.jsonl", workdir / "checkpoints"
    lines = read_metrics(metrics) if metrics.exists() else []
    if lines and not saved_steps(folder) and (was_saved(folder) or not folder.exists()):
        done = lines[-1]["step"]
        raise ConfigError(
            f"{workdir} has the metrics of {done} steps, but no checkpoint: bring {folder} back to continue, or choose "
            "another workdir to start again"
        )
