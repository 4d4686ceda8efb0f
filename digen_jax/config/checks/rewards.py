"""Checks of a config's rewards, and of the rewards that prompts name: a part of `checks`."""

import difflib
import json
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from digen_jax.errors import ConfigError, check_choice, together
from digen_jax.prompts.files import numbered_records
from digen_jax.prompts.needs import Needs
from digen_jax.rewards.built_in import find_needs
from digen_jax.rewards.settings import RewardSettings


def check_weights(config: ConfigDict) -> None:
    """Refuses weights of which none trains anything, and dicts of weights that hold no numbers."""
    weights = []
    with together() as one:
        for number, section in enumerate(config.rewards):
            given = section.weight
            several = given.to_dict() if isinstance(given, ConfigDict) else {"": given}
            weights += several.values()
            if not several or not all(type(w) in (int, float) for w in several.values()):
                with one():
                    raise ConfigError(
                        f"config.rewards[{number}].weight = {several!r} must be a number, or a dict from scores' "
                        "names to numbers"
                    )
    if weights and not any(weights):
        raise ConfigError(
            "config.rewards leaves nothing to train on: give a reward a weight other than 0"
        )


def check_watched(name: str, rewards: Sequence[RewardSettings]) -> None:
    """Refuses to watch, for an early stop, a score that no evaluation of these rewards shows; "" watches none."""
    shown = [score for one in rewards for score in one.entries.values()]
    # What a reward returns in addition to its weighed scores is known when it is called.
    if not name or name.startswith(tuple(f"{one.title}/" for one in rewards)):
        return
    check_choice("config.stopping.reward", name, shown)
    if len(shown) == 1:
        raise ConfigError(
            f"config.stopping.reward = {name!r} is the only reward, which is trained: add one to config.rewards with "
            "weight 0 and name that"
        )


def check_named(path: str, rewards: Sequence[RewardSettings], training: bool) -> None:
    """Refuses a prompt file whose records name rewards that there are not.

    Args:
      path: of the file.
      rewards: those of the config.
      training: refuse a prompt, too, of whose rewards none has a weight.

    Raises:
      ValueError: names the line, and what to change; or as `numbered_records`.
    """
    weighed = {one.title: any(one.weights) for one in rewards}
    for line, record in numbered_records(path):
        if "rewards" in record:
            try:
                _check_record(record["rewards"], weighed, training)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from error


def needs_of(rewards: Sequence[RewardSettings]) -> dict[str, Needs]:
    """What the built-in ones among some rewards need of the records to which they apply."""

    def of(name: str, needs: Needs) -> Needs:
        return lambda record: needs(record) if name in record.get("rewards", (name,)) else None

    found = {one.title: find_needs(one) for one in rewards}
    return {name: of(name, needs) for name, needs in found.items() if needs is not None}


def _check_record(named: Any, weighed: dict[str, bool], training: bool) -> None:
    if not (isinstance(named, list) and named and all(isinstance(one, str) for one in named)):
        raise ValueError(
            f'"rewards" must be a list of the names of rewards, not {json.dumps(named)}; leave it out where all '
            "rewards apply"
        )
    for one in named:
        if one not in weighed:
            close = difflib.get_close_matches(one, weighed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f'"rewards" names {one!r}, but config.rewards has {", ".join(map(repr, weighed)) or "none"}; '
                f"{hint or 'add it there, or take it out here'}"
            )
    if training and not any(weighed[one] for one in named):
        raise ValueError(
            f'"rewards" names only {", ".join(map(repr, named))} with a weight of 0: the prompt trains nothing'
        )
