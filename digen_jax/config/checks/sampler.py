"""Checks of the steps that are sampled and trained: a part of `checks`."""

from digen_jax.algorithms.subsets import share_of_timesteps
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError, blame, check_divides
from digen_jax.flow.steps import KINDS, Ode


def check_sampler(recipe: Recipe) -> None:
    """Refuses a window, a fraction of it, or start noise that cannot work.

    Raises:
      ConfigError: names the field and what to change.
    """
    if recipe.noisy_steps or recipe.algorithm.objective == "transitions":
        _check_window(recipe)
    _check_noise(recipe)


def _check_window(recipe: Recipe) -> None:
    with blame("config.sampler.window."):
        recipe.window.check(recipe.sampler.steps)
        if recipe.algorithm.objective == "transitions":
            share_of_timesteps(recipe.noisy_steps, recipe.sampler.window.fraction)


def _check_noise(recipe: Recipe) -> None:
    """Refuses one start noise for a whole group where nothing else is random: its images would be equal."""
    kind = recipe.sampler.kind
    if recipe.sampler.shared_noise and issubclass(KINDS[kind], Ode):
        raise ConfigError(
            "config.sampler.shared_noise = True makes all images of a group equal, as a sampler of "
            f"config.sampler.kind = {kind!r} adds no noise: set it to False"
        )


def check_pack(recipe: Recipe) -> None:
    """A pass takes `pack` steps, split over the mesh axis "time"; no part may be padding only.

    Raises:
      ConfigError: names the fields and what to change.
    """
    pack, time = recipe.trainer.pack, recipe.placement.trainer.time
    check_divides(
        "config.placement.trainer.time",
        time,
        "config.trainer.pack",
        pack,
        "as the steps of a pass are split evenly over that axis",
    )
    steps = recipe.trained_steps
    most = steps + -steps % time
    if pack > most:
        where = (
            "noise levels of config.algorithm.times"
            if recipe.algorithm.objective == "matching"
            else "trained steps of config.sampler.window"
        )
        raise ConfigError(
            f"config.trainer.pack = {pack} is more than the {steps} {where} fill: set it to {most} or less"
        )
