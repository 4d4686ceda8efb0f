"""The config's list `rewards`: as a user writes it, with a name instead of a section, and completed."""

import ast
import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from digen_jax.errors import ConfigError
from digen_jax.rewards.settings import RewardSettings


def as_list(given: Any) -> tuple[Any, ...]:
    """A config's rewards as a tuple; one alone may stand without it."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def sections(given: Any) -> tuple[ConfigDict, ...]:
    """The sections of a config's rewards; fields that are not given are missing.

    A text may be a list as Python writes it.

    Raises:
      ConfigError: a reward is neither a name nor a section.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("(", "[", "{"):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            given = ast.literal_eval(given.strip())
    return tuple(_section(number, one) for number, one in enumerate(as_list(given)))


def _section(number: int, given: Any) -> ConfigDict:
    if isinstance(given, ConfigDict | Mapping):
        return ConfigDict(given)
    if not isinstance(given, str):
        raise ConfigError(
            f"config.rewards[{number}] must be a reward's name, or a section such as dict(name='shapes_geneval', "
            f"weight=0.5), not {given!r}"
        )
    if "," not in given:
        return ConfigDict(dict(name=given))
    names = tuple(part.strip(" '\"") for part in given.strip(" ()[]").split(",") if part.strip())
    if re.search(r"[][(){}]", "".join(names)):
        raise ConfigError(
            f"config.rewards = {given!r} is one text, in which sections cannot be read: write a list such as "
            "({'name': 'shapes_geneval', 'weight': 0.5}, 'my_rewards:redness')"
        )
    raise ConfigError(
        f"config.rewards = {given!r} is one text with several names: write {names!r}, in a config.json "
        f"{json.dumps(names)}, and on the command line --config.rewards=... for each"
    )


def default(given: ConfigDict | None = None) -> ConfigDict:
    """A section with every default; what a section chooses the names of is as in `given`."""
    fields = dataclasses.asdict(RewardSettings())
    for field in ("settings", "weight"):
        if given is not None and isinstance(given.get(field), ConfigDict):
            fields[field] = given[field].to_dict()
    return ConfigDict(fields)


def typed(section: ConfigDict) -> RewardSettings:
    """The settings of a complete section."""
    plain = section.to_dict()
    if isinstance(plain["weight"], Mapping):
        plain["weight"] = {entry: float(factor) for entry, factor in plain["weight"].items()}
    return RewardSettings(**plain)
