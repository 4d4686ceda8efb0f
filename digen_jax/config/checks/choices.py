"""The allowed values of a config's fields: each field's own type says them. A part of `checks`."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.config.algorithm_section import kind
from digen_jax.config.fields import flat
from digen_jax.config.recipe import Recipe
from digen_jax.config.sections import AdvantagesSection
from digen_jax.errors import check_choice, together
from digen_jax.flow.steps import KINDS, Ode
from digen_jax.rewards.settings import RewardSettings

WITHOUT_NOISE = tuple(kind for kind, step in KINDS.items() if issubclass(step, Ode))
NOISY = tuple(kind for kind in KINDS if kind not in WITHOUT_NOISE)


def choices(algorithm: type[Algorithm]) -> dict[str, tuple[str | int, ...]]:
    """The allowed values of each field that has a choice, by dotted name; `algorithm` is the one of the config."""
    sections = {field.name: type(field.default) for field in dataclasses.fields(Recipe)}
    sections |= {"advantages": AdvantagesSection, "algorithm": algorithm}
    found = dict(_choices(sections))
    found |= dict(_choices(get_type_hints(RewardSettings), "rewards[i]."))
    found["sampler.kind"] = NOISY if algorithm.objective == "transitions" else tuple(KINDS)
    if "algorithm.old_log_probs" in found:
        found["algorithm.old_log_probs"] = ("auto", *found["algorithm.old_log_probs"])
    return found


def _choices(fields: dict[str, type], path: str = "") -> Iterator[tuple[str, tuple]]:
    for name, hint in fields.items():
        if get_origin(hint) is Literal:
            yield path + name, get_args(hint)
        elif dataclasses.is_dataclass(hint):
            yield from _choices(get_type_hints(hint), f"{path}{name}.")


def check_choices(config: ConfigDict) -> None:
    """Refuses values that a field does not know.

    Raises:
      ConfigError: names every such field, and the closest value that it knows.
    """
    fields = flat(config)
    with together() as one:
        for name, allowed in choices(kind(config)).items():
            for i in range(len(config.rewards) if "[i]" in name else 1):
                with one():
                    field = f"config.{name.replace('[i]', f'[{i}]')}"
                    check_choice(field, fields[field], allowed)
