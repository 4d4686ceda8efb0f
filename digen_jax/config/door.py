"""The door: a config comes in as a user wrote it and leaves as a `Recipe`, completed, checked and typed."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from digen_jax.config.checks import check_each, check_machine, check_rules
from digen_jax.config.recipe import Recipe, complete, typed
from digen_jax.files import shipped


def open_recipe(config: ConfigDict | Mapping[str, Any]) -> Recipe:
    """The recipe of a config that has passed all checks which need neither a file nor a device.

    JAX is not started, so that the recipe can say how many virtual devices it shall have.

    Args:
      config: missing fields take their defaults.

    Raises:
      ConfigError: one sentence for each mistake that can be found at once.
    """
    recipe = reopen_recipe(config)
    check_rules(recipe)
    return recipe


def place(recipe: Recipe, devices: int) -> Recipe:
    """The recipe on so many devices of this machine, to which "fitted" meshes are fitted; the last checks.

    Reads the prompt files and imports the rewards. Nothing slow happens, and no model is opened.

    Raises:
      ConfigError: one sentence for each mistake that can be found at once.
    """
    placed = recipe.fitted(devices)
    check_machine(placed, devices)
    return placed


def reopen_recipe(config: ConfigDict | Mapping[str, Any]) -> Recipe:
    """The recipe of a config that an earlier run has checked, maybe by other rules.

    Raises:
      ConfigError: an unknown field, or a value that a field cannot have.
    """
    full = complete(ConfigDict(config))
    check_each(full)
    full.model.folder = shipped(full.model.folder)
    full.prompts.file = shipped(full.prompts.file)
    full.prompts.files = tuple(map(shipped, full.prompts.files))
    full.evaluation.prompts = shipped(full.evaluation.prompts)
    return typed(full)
