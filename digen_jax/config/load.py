"""Loads a config: fills in defaults, checks every field, and returns a `TrainConfig`.

`fit_config` also checks the files, rewards and packages that the config needs on this machine.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from digen_jax.algorithms.algorithm import Algorithm, choose_guidance
from digen_jax.algorithms.losses import choose_old_log_probs
from digen_jax.config.checks import check_fields, check_meshes, check_rules
from digen_jax.config.fields import KINDS, check_known, flat
from digen_jax.config.train_config import ALGORITHMS, TrainConfig, algorithm_class, plain
from digen_jax.data.prompt_checks import Needs, check_images, check_needs
from digen_jax.data.prompt_files import numbered_records, read_prompt_file
from digen_jax.errors import (
    ConfigError,
    check_choice,
    check_divides,
    collect_errors,
    prefix_errors,
)
from digen_jax.files import in_home, shipped
from digen_jax.rewards import Rewards, RewardSettings
from digen_jax.rewards.built_in import find_needs, resolve


def read_config(config: ConfigDict | Mapping[str, Any]) -> TrainConfig:
    """Reads a config, such as that of an earlier run, without checking combinations of fields.

    Missing fields take their defaults.

    Raises:
      ConfigError: A field is unknown or has an invalid value.
    """
    full = complete(ConfigDict(config))
    check_fields(full)
    full.model.folder = shipped(full.model.folder)
    full.prompts.file = shipped(full.prompts.file)
    full.prompts.files = tuple(map(shipped, full.prompts.files))
    full.evaluation.prompts = shipped(full.evaluation.prompts)
    return _typed(full)


def load_config(config: ConfigDict | Mapping[str, Any]) -> TrainConfig:
    """Reads a config and runs all checks that need neither a file nor a device.

    Missing fields take their defaults. Does not start JAX, so that `placement.cpu_devices` can set the number of
    virtual devices.

    Raises:
      ConfigError: One message for each error that can be found at once.
    """
    loaded = read_config(config)
    check_rules(loaded)
    return loaded


def fit_config(config: TrainConfig, devices: int) -> TrainConfig:
    """Fits a loaded config to this machine: reduces "fitted" meshes to its devices, and runs the remaining checks.

    Reads the prompt files and imports the rewards; reads no model and does nothing slow.

    Raises:
      ConfigError: One message for each error that can be found at once.
    """
    fitted = config.fitted(devices)
    check_machine(fitted, devices)
    return fitted


def default_config(algorithm: str = "policy_gradient", rewards: Sequence = (None,)) -> ConfigDict:
    """Returns every field with its default.

    Args:
      algorithm: Name of the algorithm whose fields the section `algorithm` has.
      rewards: Sections of the list `rewards`, or None. Names that a section defines itself are fields, too.
    """
    fields = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
    kind = algorithm_class(algorithm)
    fields["algorithm"] = {"name": algorithm, **vars(kind()), **kind.config_defaults}
    del fields["algorithm_section"]
    listed = tuple(ConfigDict(_default_reward(one)) for one in rewards)
    return ConfigDict(plain(fields) | {"rewards": listed})


def complete(config: ConfigDict) -> ConfigDict:
    """Returns a config with defaults for every missing field.

    Raises:
      ConfigError: A field is unknown or belongs to another algorithm, or a value has the wrong type.
    """
    if isinstance(config.get("placement"), str):
        config = replaced(config, placement=ConfigDict(dict(mode=config.placement)))
    if "rewards" in config:
        config = replaced(config, rewards=_reward_sections(config.rewards))
    name = _algorithm_name(config)
    defaults = default_config(name, config.get("rewards", (None,)))
    _check_algorithm_fields(config, name)
    known = flat(defaults)
    for field in flat(config):
        check_known(field, known)
    return _filled(config, defaults, "config")


def replaced(config: ConfigDict, **sections: Any) -> ConfigDict:
    """Returns a config with other sections, which may have other types."""
    changed = ConfigDict({k: v for k, v in config.items() if k not in sections})
    for name, section in sections.items():
        changed[name] = section
    return changed


def _filled(config: ConfigDict, defaults: ConfigDict, path: str) -> ConfigDict:
    """Returns `config` merged over `defaults`, with values of the defaults' types."""
    merged = ConfigDict(defaults)
    with merged.unlocked():
        for name, value in config.items():
            filled = _value(value, defaults[name], f"{path}.{name}")
            del merged[name]
            merged[name] = filled
    return merged


def _value(value: Any, default: Any, path: str) -> Any:
    """Returns a field's value in the type of its default; `~` at the start of a string is the home folder."""
    if isinstance(default, ConfigDict):
        if not isinstance(value, ConfigDict):
            fields = ", ".join(f"{name}=..." for name in list(default)[:2])
            raise ConfigError(f"{path} must be a section, such as dict({fields}), not {value!r}")
        return _filled(value, default, path) if len(default) else _in_home(value)
    if path == "config.rewards":
        parts = enumerate(zip(value, default, strict=True))
        return tuple(_filled(*pair, f"{path}[{number}]") for number, pair in parts)
    expected, accepted = KINDS[type(default)]
    if isinstance(default, tuple) and isinstance(value, str):
        value = (value,)  # as on the command line
    if not isinstance(value, accepted) or (isinstance(value, bool) and type(default) is not bool):
        raise ConfigError(f"{path} must be {expected}, not {value!r}")
    return float(value) if isinstance(default, float) else _in_home(value)


def _in_home(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_in_home, value))
    if isinstance(value, ConfigDict):
        return ConfigDict({name: _in_home(one) for name, one in value.items()})
    return in_home(value) if isinstance(value, str) else value


def _typed(config: ConfigDict) -> TrainConfig:
    """Returns a complete config, whose single fields are valid, with typed sections."""
    fields = dataclasses.fields(TrainConfig)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    sections = {name: _section(default, config[name]) for name, default in defaults.items()}
    sections["rewards"] = rewards = tuple(map(_reward, config.rewards))
    raw = config.algorithm.to_dict()
    algorithm = _algorithm(raw, sections)
    weights = tuple(weight for one in rewards for weight in one.weights)
    clips = tuple(clip for one in rewards for clip in one.clips)
    if algorithm.given_images:  # rewards score only evaluations
        weights, clips = (1.0,), ()
    sections["advantages"] = dataclasses.replace(
        sections["advantages"], reward_weights=weights, reward_clips=clips if any(clips) else ()
    )
    return TrainConfig(**sections, algorithm=algorithm, algorithm_section=raw)


def _section(default: Any, given: Any) -> Any:
    """Returns settings of the default's type with a config's values."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        fields = {name: _section(getattr(default, name), value) for name, value in given.items()}
        return dataclasses.replace(default, **fields)
    return _fixed(given) if isinstance(default, tuple) else given


def _fixed(value: Any) -> Any:
    """Returns tuples instead of JSON lists."""
    return tuple(map(_fixed, value)) if isinstance(value, list | tuple) else value


def _algorithm_name(config: ConfigDict) -> str:
    given = config.get("algorithm")
    name = given.get("name") if isinstance(given, ConfigDict) else None
    if name is not None:
        check_choice("config.algorithm.name", name, ALGORITHMS)
    return name or "policy_gradient"


def _check_algorithm_fields(config: ConfigDict, name: str) -> None:
    """Refuses fields of another algorithm than `name`."""
    given, own = config.get("algorithm"), default_config(name).algorithm
    for field in given if isinstance(given, ConfigDict) else ():
        if field in own:
            continue
        others = [other for other in ALGORITHMS if field in default_config(other).algorithm]
        if others:
            raise ConfigError(
                f"config.algorithm.{field} is a field of {' and '.join(others)}, but config.algorithm.name "
                f"is {name!r}: leave it out of the config file, or start from a recipe for {name}"
            )


def _algorithm(given: Mapping[str, Any], sections: Mapping[str, Any]) -> Algorithm:
    """Returns the settings of a complete section; other sections replace "auto" and a guidance of 0."""
    precision, sampler = sections["precision"], sections["sampler"]
    algorithm = algorithm_class(given["name"])
    fields = {field: value for field, value in given.items() if field != "name"}
    for field, default in vars(algorithm()).items():
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            fields[field] = dataclasses.replace(default, **fields[field])
    if fields.get("old_log_probs") == "auto":
        fields["old_log_probs"] = choose_old_log_probs(
            "auto",
            # Importance weights relative to the sampler's policy also correct for its rounding.
            float32=precision.exact_ratios or fields.get("importance_cap", 0) > 0,
            stale=sections["runtime"].max_policy_lag > 0,
            updates=sections["trainer"].updates,
            stored=algorithm.objective == "transitions",
        )
    if "images_per_sample" in vars(algorithm()):
        fields["images_per_sample"] = sections["batch"].images
    if "guidance" in fields:
        fields["guidance"], fields["reference_guidance"] = choose_guidance(
            fields["guidance"], fields["reference_guidance"], sampler.guidance
        )
    return algorithm(**fields)


def _reward_sections(given: Any) -> tuple[ConfigDict, ...]:
    """Returns the sections of a config's rewards, in which fields may be missing.

    Accepts a reward without a list, a name instead of a section, and a list as Python text.

    Raises:
      ConfigError: A reward is neither a name nor a section.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("(", "[", "{"):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            given = ast.literal_eval(given.strip())
    listed = given if isinstance(given, tuple | list) else (given,)
    return tuple(_reward_section(number, one) for number, one in enumerate(listed))


def _reward_section(number: int, given: Any) -> ConfigDict:
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
            f"config.rewards = {given!r} is a single string: write a list such as ({{'name': "
            f"'shapes_geneval', 'weight': 0.5}}, 'my_rewards:redness')"
        )
    raise ConfigError(
        f"config.rewards = {given!r} is a single string with several names: write {names!r}, in a config.json "
        f"{json.dumps(names)}, and on the command line --config.rewards=... for each"
    )


def _default_reward(given: ConfigDict | None) -> dict[str, Any]:
    """Returns a section with every default; dicts with names that a section defines itself are copied from `given`."""
    fields = dataclasses.asdict(RewardSettings())
    for field in ("settings", "weight"):
        if given is not None and isinstance(given.get(field), ConfigDict):
            fields[field] = given[field].to_dict()
    return fields


def _reward(section: ConfigDict) -> RewardSettings:
    fields = section.to_dict()
    if isinstance(fields["weight"], Mapping):
        fields["weight"] = {entry: float(factor) for entry, factor in fields["weight"].items()}
    return RewardSettings(**fields)


# ------------------------------------------------------------- files, rewards and packages of this machine


def check_machine(config: TrainConfig, devices: int) -> None:
    """Refuses inputs that are missing on this machine, and meshes that its devices cannot form.

    Raises:
      ConfigError: One message for each error that can be found at once.
    """
    with collect_errors() as one:
        with one():
            check_inputs(config)
        with one():
            _check_installed(config)
        with one():
            check_meshes(config, devices)


def check_inputs(config: TrainConfig) -> None:
    """Refuses a config without a model folder, readable prompt files and a reward, which image files do not need.

    Reads the files and imports the reward.

    Raises:
      ConfigError: Names what is missing or invalid.
    """
    files = {
        "prompts.files" if config.prompts.files else "prompts.file": config.prompts.paths,
        "evaluation.prompts": tuple(filter(None, [config.evaluation.prompts])),
    }
    given = {"model.folder": config.model.folder, "rewards": config.rewards, **files}
    images = config.algorithm.given_images
    if images and not config.rewards:  # no evaluation
        files.pop("evaluation.prompts")
        del given["rewards"], given["evaluation.prompts"]
    read: Any = read_prompt_file
    if config.model.source:
        read = functools.partial(check_images, count=config.model.source_images)
    with collect_errors() as one:
        for name, value in given.items():
            with one():
                if not value:
                    add = f"add --config.{name}=... to the command"
                    raise ConfigError(f"config.{name} is not given: {add}")
        with one(), prefix_errors("", (ConfigError,)):
            _check_group_rewards(config, resolve(config.rewards))
        for name, paths in files.items():
            for file in paths:
                with one(), prefix_errors(f"config.{name}: "):
                    read(file)
                    training = name != "evaluation.prompts"
                    if training and images:
                        check_images(file, fields=images)
                        continue
                    check_named(file, config.rewards, training)
                    check_needs([file], needs_of(config.rewards))


def _check_group_rewards(config: TrainConfig, rewards: Rewards) -> None:
    """Refuses chunks without complete groups if a reward needs these."""
    for number, reward in enumerate(rewards.members):
        if reward.groupwise:
            why = f"as config.rewards[{number}] sees all images of a group"
            chunk = "config.sampler.chunk", config.sampler.chunk
            check_divides("config.batch.images", config.batch.images, *chunk, why)


def _check_installed(config: TrainConfig) -> None:
    """Refuses trackers that are not installed; imports nothing."""
    with collect_errors() as one:
        for name in config.trackers:
            with one():
                if importlib.util.find_spec(name) is None:
                    change = f"run pip install {name}, or set the field to ''"
                    raise ConfigError(f"config.{name}.project needs the package {name}: {change}")


def check_named(path: str, rewards: Sequence[RewardSettings], training: bool) -> None:
    """Refuses a prompt file with records that name unknown rewards.

    If `training`, also refuses prompts whose rewards all have weight 0.

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
        must = f'"rewards" must be a list of the names of rewards, not {json.dumps(named)}'
        raise ValueError(f"{must}; leave it out if all rewards apply")
    for one in named:
        if one not in weighed:
            close = difflib.get_close_matches(one, weighed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "add it there, or take it out here"
            known = ", ".join(map(repr, weighed)) or "none"
            raise ValueError(f'"rewards" names {one!r}, but config.rewards has {known}; {hint}')
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
