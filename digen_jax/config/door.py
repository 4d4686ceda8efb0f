"""The door: a config comes in as a user wrote it, and goes on as a `Recipe`, completed, checked and typed."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from digen_jax.config.checks import check_each, check_given, check_rules
from digen_jax.config.recipe import Recipe, complete, typed
from digen_jax.config.sections import FITTED
from digen_jax.engine.placement import fitted
from digen_jax.errors import together


def open_recipe(config: ConfigDict, devices: int | None = None) -> Recipe:
    """What a run takes of a config, once nothing in it is left that cannot work.

    Reads the prompt files and imports the reward, nothing slow; no model is opened.

    Args:
      config: what is left out of it has its default.
      devices: how many there are: a placement that is to be fitted is, and the meshes are checked. None: the
        placement stays as it is, and is checked with what it goes with only.

    Raises:
      ConfigError: the sentences of all mistakes that can be told at once.
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
    """As `open_recipe`, of what needs no second look: the config of a run, or of one that is only planned.

    So its files need not be there any more, or not yet, and its reward not importable.

    Raises:
      ConfigError: unknown fields, or fields that cannot be what they are.
    """
    full = complete(ConfigDict(config))
    check_each(full)
    return typed(full)
