"""The typed settings of pretraining, checked once, from its config configs/shapes_pretrain.py."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, get_type_hints

from ml_collections import ConfigDict

from digen_jax.config.fields import flat
from digen_jax.errors import LARGEST_SEED, ConfigError, check_finite, check_range
from digen_jax.process.job import MOST_CPU_DEVICES
from examples.shapes.fit import FitSettings


@dataclasses.dataclass(frozen=True)
class Text:
    """Both text encoders, which read captions of at most `max_length` tokens."""

    max_length: int
    encoder: Mapping[str, Any]  # fields of its config.json


@dataclasses.dataclass(frozen=True)
class Autoencoder:
    """The first stage."""

    network: Mapping[str, Any]  # fields of its config.json
    batch: int
    kl_weight: float  # of the KL of the latents to N(0, 1)
    fit: FitSettings


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The second stage."""

    network: Mapping[str, Any]  # fields of its config.json
    batch: int
    caption_dropout: float  # share of captions that are replaced by an empty one
    fit: FitSettings


@dataclasses.dataclass(frozen=True)
class PretrainSettings:
    """Everything that determines the result, and the devices."""

    seed: int
    images: int
    image_size: int
    dtype: str
    cpu_devices: int  # where there is no accelerator
    shift: float  # of the scheduler that the folder ships
    text: Text
    autoencoder: Autoencoder
    transformer: Transformer

    def as_json(self) -> dict[str, Any]:
        """The config as JSON values, as the stages' folders store it."""
        return json.loads(json.dumps(dataclasses.asdict(self), sort_keys=True))


def read_settings(config: ConfigDict) -> PretrainSettings:
    """The settings of a config.

    Raises:
      ConfigError: a number that is not finite or out of its range, or a field that is missing or unknown.
    """
    for name, value in flat(config).items():
        check_finite(name, value)
    found = _section(PretrainSettings, config.to_dict(), "config")
    check_range("config.seed", found.seed, 0, LARGEST_SEED)
    check_range("config.cpu_devices", found.cpu_devices, 0, MOST_CPU_DEVICES, "least")
    return found


def _section(kind: type, given: Mapping[str, Any], path: str) -> Any:
    hints = get_type_hints(kind)
    for name in given.keys() - hints.keys():
        raise ConfigError(
            f"{path}.{name} is not a field; the fields of {path} are {', '.join(hints)}"
        )
    for name in hints.keys() - given.keys():
        raise ConfigError(f"{path}.{name} is missing: configs/shapes_pretrain.py has it")
    return kind(
        **{
            name: _section(hint, given[name], f"{path}.{name}")
            if dataclasses.is_dataclass(hint)
            else given[name]
            for name, hint in hints.items()
        }
    )
