"""Checks of a config's groups and advantages: a part of `checks`."""

import math
from collections.abc import Sequence

from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError, blame, together


def check_advantages(recipe: Recipe) -> None:
    """Refuses advantages that are undefined for groups of this size; `check_weights` must have passed."""
    with blame("config.advantages."):
        recipe.advantages.check(recipe.batch.images)


def check_candidates(recipe: Recipe) -> None:
    """Refuses groups that share chunks where one of them may be replaced."""
    if recipe.runtime.max_candidates:
        _check_one_group(
            recipe,
            "as with config.runtime.max_candidates a group that is replaced must not share a chunk",
            recipe.batch.images,
        )


def check_early(recipe: Recipe) -> None:
    """Refuses training before groups are complete where it is not exact or has no effect.

    `Algorithm.check_early` checks the algorithm's settings.

    Raises:
      ConfigError: ratios are not 1, groups may be replaced, or a chunk is all that the trainer would wait for.
    """
    early = f"config.runtime.max_incomplete_groups = {recipe.runtime.max_incomplete_groups}"
    names = [name for one in recipe.rewards for name in one.entries.values()]
    if not recipe.runtime.max_incomplete_groups:
        return
    if not recipe.algorithm.may_train_early:
        raise ConfigError(
            f"{early} is for policy_gradient, whose loss may be linear in the advantages, and not for "
            f"{recipe.algorithm.name}: set it to 0"
        )
    with together() as one:
        for name, value, needed, why in (
            (
                "runtime.max_policy_lag",
                recipe.runtime.max_policy_lag,
                0,
                "older weights' ratios are not 1",
            ),
            ("trainer.updates", recipe.trainer.updates, 1, "after an update ratios are not 1"),
            (
                "placement.trainer.workers",
                recipe.placement.trainer.workers,
                1,
                "one worker has to train a whole group",
            ),
            (
                "runtime.max_candidates",
                recipe.runtime.max_candidates,
                0,
                "only of a complete group it is known whether it is replaced",
            ),
            (
                "rewards",
                ", ".join(names),
                ", ".join(names[:1]),
                "it is shown to be exact for a single reward only",
            ),
        ):
            if value != needed:
                with one():
                    raise ConfigError(
                        f"{early} cannot go with config.{name} = {value}, as {why}: set that to {needed}, or "
                        "config.runtime.max_incomplete_groups to 0"
                    )
        if recipe.runtime.ordered == "yes":
            with one():
                raise ConfigError(
                    f"{early} cannot go with config.runtime.ordered = 'yes', as what is trained before its "
                    "group is complete depends on arrival: set that to 'auto', or "
                    "config.runtime.max_incomplete_groups to 0"
                )
        if len(names) == 1:
            with one(), blame("config.advantages."):
                recipe.advantages.check_early()


def check_early_chunks(recipe: Recipe) -> None:
    """Refuses chunks that hold several groups, or everything that the trainer would wait for."""
    early = f"config.runtime.max_incomplete_groups = {recipe.runtime.max_incomplete_groups}"
    chunk, images = recipe.sampler.chunk, recipe.batch.images
    if not recipe.runtime.max_incomplete_groups:
        return
    less = recipe.advantages.std == "group"
    most = images // 2 if less else images
    _check_one_group(recipe, f"as with {early} a chunk belongs to one group", most)
    if less and chunk == images:
        raise ConfigError(
            f"{early} changes nothing where config.sampler.chunk = {chunk} is a whole group: set "
            "that to less, or config.runtime.max_incomplete_groups to 0"
        )


def _check_one_group(recipe: Recipe, why: str, most: int) -> None:
    """Refuses chunks that hold several groups; `why` gives the reason, `most` is the largest size to suggest."""
    chunk, images = recipe.sampler.chunk, recipe.batch.images
    if images % chunk:
        sizes = [size for size in range(1, most + 1) if images % size == 0]
        raise ConfigError(
            f"config.sampler.chunk = {chunk} must divide config.batch.images = {images}, {why}: "
            f"set {smaller_chunks(recipe, sizes)}"
        )


def smaller_chunks(recipe: Recipe, sizes: Sequence[int]) -> str:
    """The fields to set, micro-batch included, for the largest of some sizes that the meshes can split."""
    meshes = (recipe.placement.rollout, recipe.placement.trainer)
    split = math.lcm(*(max(1, mesh.images) for mesh in meshes))
    size = max([size for size in sizes if size % split == 0] or sizes)
    fields = "config.sampler.chunk"
    if size % recipe.trainer.micro_batch:
        fields += " and config.trainer.micro_batch"
    return f"{fields} to {size}"
