"""The trial of a run's rewards, before anything slow starts."""

from collections.abc import Callable
from typing import Any

from digen_jax.config.recipe import Recipe
from digen_jax.engine.scoring import Scoring
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.prompts.files import read_prompt_file, read_prompt_files
from digen_jax.rewards import Rewards
from digen_jax.rewards.built_in import on_mesh
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.trial import try_out


def try_files(recipe: Recipe, score: Callable[..., Any]) -> None:
    """Tries rewards on the prompts of training and of evaluation, with made-up images of the size that each has.

    Args:
      recipe: the run's.
      score: as `RewardPool.score`.

    Raises:
      ConfigError: see `try_out`.
    """
    size = recipe.evaluation_size
    training = read_prompt_files(recipe.prompts.paths)
    try_out(score, training, recipe.model.height, recipe.model.width)
    try_out(score, [read_prompt_file(recipe.evaluation.prompts)], size.height, size.width)


def try_scorers(recipe: Recipe, scorers: tuple[Scoring, ...]) -> None:
    """Lets them score their canaries, and made-up pictures of the first prompts; with several processes in all.

    Raises:
      ConfigError: a score is not as it must be.
    """
    found = Rewards(tuple(named(on_mesh(recipe.rewards), scorers).values()))
    check_canaries(found, found.score)
    try_files(recipe, found.score)
