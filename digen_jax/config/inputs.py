"""Checks of the files, rewards and packages that a config needs on this machine."""

import difflib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

from digen_jax.config.checks import check_meshes
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_checks import Needs, check_images, check_needs
from digen_jax.data.prompt_files import numbered_records, read_prompt_file
from digen_jax.errors import ConfigError, blame, together
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import find_needs, resolve


def check_machine(config: TrainConfig, devices: int) -> None:
    """Refuses inputs that are missing on this machine, and meshes that its devices cannot form.

    Args:
      config: Config with mesh sizes, whose fields can be combined.
      devices: Number of devices.

    Raises:
      ConfigError: One message for each error that can be found at once.
    """
    with together() as one:
        with one():
            check_inputs(config)
        with one():
            _check_installed(config)
        with one():
            check_meshes(config, devices)


def check_inputs(config: TrainConfig) -> None:
    """Refuses a config without a model folder, readable prompt files and a reward.

    Reads the files and imports the reward.

    Raises:
      ConfigError: Names what is missing or invalid.
    """
    files = {
        "prompts.files" if config.prompts.files else "prompts.file": config.prompts.paths,
        "evaluation.prompts": tuple(filter(None, [config.evaluation.prompts])),
    }
    given = {"model.folder": config.model.folder, "rewards": config.rewards, **files}
    read = check_images if config.model.source else read_prompt_file
    with together() as one:
        for name, value in given.items():
            with one():
                if not value:
                    raise ConfigError(
                        f"config.{name} is not given: add --config.{name}=... to the command"
                    )
        with one(), blame("", (ConfigError,)):
            resolve(config.rewards)
        for name, paths in files.items():
            for file in paths:
                with one(), blame(f"config.{name}: "):
                    read(file)
                    check_named(file, config.rewards, name != "evaluation.prompts")
                    check_needs([file], needs_of(config.rewards))


def _check_installed(config: TrainConfig) -> None:
    """Refuses trackers that are not installed; imports nothing."""
    with together() as one:
        for name in config.trackers:
            with one():
                if importlib.util.find_spec(name) is None:
                    raise ConfigError(
                        f"config.{name}.project needs {name}, which is not installed: run pip install {name}, or "
                        "set the field to ''"
                    )


def check_named(path: str, rewards: Sequence[RewardSettings], training: bool) -> None:
    """Refuses a prompt file with records that name unknown rewards.

    Args:
      path: Path of the file.
      rewards: Rewards of the config.
      training: Whether to refuse prompts whose rewards all have weight 0.

    Raises:
      ValueError: Names the line, and what to change; see also `numbered_records`.
    """
    weighed = {one.title: any(one.weights) for one in rewards}
    for line, record in numbered_records(path):
        if "rewards" in record:
            try:
                _check_record(record["rewards"], weighed, training)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from error


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


def needs_of(rewards: Sequence[RewardSettings]) -> dict[str, Needs]:
    """Returns the needs of the built-in rewards, for the records that each applies to."""

    def of(name: str, needs: Needs) -> Needs:
        return lambda record: needs(record) if name in record.get("rewards", (name,)) else None

    found = {one.title: find_needs(one) for one in rewards}
    return {name: of(name, needs) for name, needs in found.items() if needs is not None}
