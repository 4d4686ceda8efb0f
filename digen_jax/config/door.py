"""The door: a config comes in as a user wrote it and leaves as a `Recipe`, completed, checked and typed."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from digen_jax.config.checks import check_each, check_given, check_rules
from digen_jax.config.recipe import Recipe, complete, typed
from digen_jax.config.sections import FITTED
from digen_jax.engine.placement import fitted
from digen_jax.errors import together


def open_recipe(config: ConfigDict, devices: int | None = None) -> Recipe:
    """The recipe of a config that has passed all checks which need no model.

    Reads the prompt files and imports the reward. Nothing slow happens, and no model is opened.

    Args:
      config: missing fields take their defaults.
      devices: how many there are: a "fitted" placement is fitted to them, and the meshes are checked. None: the
        placement stays as it is, and is only checked against other fields.

    Raises:
      ConfigError: one sentence for each mistake that can be found at once.
    """
    full = complete(config)
    with together() as one:
        with one():
            check_given(full)
        with one():
            check_each(full)
            recipe = typed(full)
            if devices is not None and recipe.placement.sizes == FITTED:
                recipe = recipe.with_meshes(fitted(recipe.placement.meshes, devices))
            check_rules(recipe, devices)
    return recipe


def reopen_recipe(config: ConfigDict | Mapping[str, Any]) -> Recipe:
    """The recipe of a config that an earlier run has checked, or of a run that is only planned.

    Its files need not exist and its reward need not be importable.

    Raises:
      ConfigError: an unknown field, or a value that a field cannot have.
    """
    full = complete(ConfigDict(config))
    check_each(full)
    return typed(full)
