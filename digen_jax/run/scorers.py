"""The trial of the rewards that a run computes on its meshes."""

from digen_jax.config.recipe import Recipe
from digen_jax.engine.scoring import Scoring
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.prompts.files import read_prompt_file, read_prompt_files
from digen_jax.rewards import Rewards
from digen_jax.rewards.built_in import on_mesh
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.trial import try_out


def try_scorers(recipe: Recipe, scorers: tuple[Scoring, ...]) -> None:
    """Lets them score their canaries, and made-up pictures of the first prompts; with several processes in all.

    Raises:
      ConfigError: a score is not as it must be.
    """
    found = Rewards(tuple(named(on_mesh(recipe.rewards), scorers).values()))
    held_out = read_prompt_file(recipe.evaluation.prompts)
    files = *read_prompt_files(recipe.prompts.paths), held_out
    check_canaries(found, found.score)
    try_out(found.score, files, recipe.model.height, recipe.model.width)
