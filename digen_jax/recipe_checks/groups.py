"""What a complete config must say of its groups, their rewards and advantages: a part of `recipe_checks`."""

import math
from typing import get_args

from ml_collections import ConfigDict

from digen_jax.algorithms.advantages import Baseline, Combine, DDof, Std
from digen_jax.recipe import advantage_settings
from digen_jax.rewards import names_in
from digen_jax.settings import ConfigError, blame, check_choice, check_divides


def check_weights(config: ConfigDict) -> None:
    """Refuses weights that do not fit the rewards."""
    names, weights = names_in(config.reward.name), tuple(config.reward.weights)
    if not weights:
        return
    given = f"config.reward.weights = {weights}"
    if not all(type(weight) in (int, float) and math.isfinite(weight) for weight in weights):
        raise ConfigError(f"{given} must hold finite numbers")
    if len(weights) != len(names):
        raise ConfigError(
            f"{given} must have a weight for each of the {len(names)} rewards of config.reward.name = "
            f"{config.reward.name!r}, or be () where all weigh 1"
        )
    if not any(weights):
        raise ConfigError(
            f"{given} leaves nothing to train on: give a reward a weight other than 0"
        )


def check_advantages(config: ConfigDict) -> None:
    """Refuses advantages that groups of this size do not have; the rewards' weights are checked."""
    choices = {"baseline": Baseline, "std": Std, "ddof": DDof, "combine": Combine}
    for name, choice in choices.items():
        value = config.advantages[name]
        check_choice(f"config.advantages.{name}", value, get_args(choice))
    with blame("config.advantages."):
        advantage_settings(config).check(config.batch.images, config.batch.groups)
    count = config.advantages.best_and_worst
    if count:
        check_divides(
            "config.batch.images",
            config.batch.images,
            "config.sampler.fragment",
            config.sampler.fragment,
            f"as with config.advantages.best_and_worst = {count} a fragment holds whole groups",
        )


def check_candidates(config: ConfigDict) -> None:
    """Refuses dynamic sampling that cannot work.

    Raises:
      ConfigError: fewer candidates than groups, or groups that share fragments.
    """
    most, redundant = config.runtime.max_candidates, config.runtime.redundant_groups
    least = config.batch.groups + redundant
    if redundant and not most:
        raise ConfigError(
            f"config.runtime.redundant_groups = {redundant} is for dynamic sampling, which is off: set "
            f"config.runtime.max_candidates to {least} or more, or config.runtime.redundant_groups to 0"
        )
    if not most:
        return
    if most < least:
        raise ConfigError(
            f"config.runtime.max_candidates = {most} must be at least config.batch.groups + "
            f"config.runtime.redundant_groups = {least}, or 0 for no dynamic sampling"
        )
    check_divides(
        "config.sampler.fragment",
        config.sampler.fragment,
        "config.batch.images",
        config.batch.images,
        "as with config.runtime.max_candidates a group that is replaced must not share a fragment",
    )


def check_early(config: ConfigDict) -> None:
    """Refuses training before groups are complete where it is not exact, or nothing would be early.

    What else the algorithm must be like for it is for `PolicyGradient.check_early` to say.

    Raises:
      ConfigError: ratios that are not 1, groups that may be replaced, or fragments that are not less
        than what has to be waited for otherwise.
    """
    early, names = (
        f"config.runtime.early_groups = {config.runtime.early_groups}",
        names_in(config.reward.name),
    )
    if not config.runtime.early_groups:
        return
    if config.algorithm.name != "policy_gradient":
        raise ConfigError(
            f"{early} is for policy_gradient, whose loss may be linear in the advantages, and not for "
            f"{config.algorithm.name}: set it to 0"
        )
    for name, value, needed, why in (
        ("runtime.staleness", config.runtime.staleness, 0, "older weights' ratios are not 1"),
        ("trainer.updates", config.trainer.updates, 1, "behind an update ratios are not 1"),
        (
            "runtime.max_candidates",
            config.runtime.max_candidates,
            0,
            "only of a complete group it is known whether it is replaced",
        ),
        (
            "reward.name",
            ", ".join(names),
            names[0],
            "it is shown to be exact for a single reward only",
        ),
    ):
        if value != needed:
            raise ConfigError(
                f"{early} cannot go with config.{name} = {value}, as {why}: set that to {needed}, or "
                "config.runtime.early_groups to 0"
            )
    fragment, images = config.sampler.fragment, config.batch.images
    check_divides(
        "config.sampler.fragment",
        fragment,
        "config.batch.images",
        images,
        f"as with {early} a fragment belongs to one group",
    )
    if config.advantages.std == "group" and fragment == images:
        raise ConfigError(
            f"{early} changes nothing where config.sampler.fragment = {fragment} is a whole group: set "
            "that to less, or config.runtime.early_groups to 0"
        )
    with blame("config.advantages."):
        advantage_settings(config).check_early()
