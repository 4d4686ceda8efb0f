"""From a run's parts and its recipe to the driver: the scheduler's settings and what the executors are told."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from digen_jax.config.recipe import Recipe
from digen_jax.engine.system import System
from digen_jax.engine.trainer import TrainState
from digen_jax.errors import ConfigError
from digen_jax.rewards.built_in import on_mesh
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Begun, Driver
from digen_jax.runtime.evaluation import Evaluation
from digen_jax.runtime.executors import Duties, Executors, Samples
from digen_jax.runtime.link import Link
from digen_jax.runtime.log import CommandLog
from digen_jax.runtime.orders import Orders
from digen_jax.runtime.watch import Watch
from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.costs import GUESSED
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Settings


def make_driver(
    system: System,
    recipe: Recipe,
    state: TrainState,
    batches: Iterator[list[dict[str, Any]]],
    rewards: RewardPool,
    first: int = 0,
    begun: Begun | None = None,
    log: CommandLog | list[Command] | None = None,
    orders: Orders | None = None,
    watch: Watch | None = None,
    held_out: Sequence[dict[str, Any]] = (),
    evaluated: Callable[[int, Evaluation], None] = lambda version, found: None,
    link: Link | None = None,
    samplers: Sequence[Samples] = (),
) -> Driver:
    """What drives a run from a step on.

    Args:
      system: the parts of the run.
      recipe: of the run.
      state: of the trainer before the step `first`.
      batches: the prompt records of every step from `first` on.
      rewards: scores; closed by who opened it.
      first: the number of steps that are done.
      begun: what was in flight when `state` was saved; None: nothing, as before the first step.
      log: gets all commands in their order.
      orders: tells other processes what is done as it begins.
      watch: has what takes too long given up; None: nothing is.
      held_out: the prompts of evaluations; none: nothing is evaluated.
      evaluated: is called with a version and its evaluation.
      link: to other processes; None: all meshes are in this one.
      samplers: the sampling meshes in other processes that are there already.
    """
    if begun is None and first:
        raise ValueError(f"{first} steps are done, but what the scheduler knew of them is missing")
    kept, settings = begun.kept if begun else {}, scheduled(recipe, held_out)
    told = duties(recipe, held_out)
    executors = Executors(system, settings, told, state, batches, first, kept, link)
    for sampler in samplers:
        executors.join(sampler)
    if begun is None:
        scheduler = Scheduler(settings, GUESSED)
    else:
        costs = None if begun.layout == recipe.layout else GUESSED
        try:
            scheduler = Scheduler.resume(begun.scheduler, settings, costs)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                "the newest checkpoint is of an older version of digen_jax, whose scheduler had another state: "
                "continue with that version, or start in a new --workdir"
            ) from error
    return Driver(executors, scheduler, rewards, begun, log, orders, watch, evaluated)


def duties(recipe: Recipe, held_out: Sequence[dict[str, Any]] = ()) -> Duties:
    """What the executors are told beside the scheduler's settings."""
    names = tuple(name for one in recipe.rewards for name in one.entries.values())
    samples = recipe.placement.trainer.samples
    return Duties(names, held_out, samples, recipe.runtime.tag_weights, on_mesh(recipe.rewards))


def scheduled(recipe: Recipe, held_out: Sequence[dict[str, Any]]) -> Settings:
    """The scheduler's settings of a run that evaluates on these prompts; none: it does not."""
    settings, algorithm = recipe.scheduler, recipe.algorithm
    if not held_out:
        return settings
    return dataclasses.replace(
        settings,
        evaluate_every=recipe.evaluation.every,
        evaluation_images=len(held_out),
        show_every=recipe.pictures.every,
        shown_images=recipe.pictures.images,
        evaluation_batch=recipe.evaluation.batch,
        # The trained parameters are not what samples, or their average is evaluated.
        evaluated_apart=recipe.trainer.ema > 0
        or algorithm.publishes_copy
        or algorithm.set_steps > 0,
    )
