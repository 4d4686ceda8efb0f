"""Trains every algorithm from the same start on the same number of images: real runs over a few seeds."""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks.comparison import Table, check_seeds, compare
from digen_jax.config.load import load_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, check_choice, prefix_errors


def load_configs(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainConfig]:
    """Loads configs by name; raises ConfigError, with the name, for an invalid one."""
    loaded = {}
    for name, config in configs.items():
        with prefix_errors(f"{name}: ", (ConfigError,)):
            loaded[name] = load_config(config)
    return loaded


def compare_algorithms(
    configs: Mapping[str, TrainConfig],
    seeds: int,
    folder: pathlib.Path,
    only: Collection[str] = (),
) -> tuple[Table, int | None]:
    """Trains the algorithms, and writes their table and curves; see `comparison.compare`."""
    check(configs, seeds, only)
    families = {name: _family(config) for name, config in configs.items()}
    table, code = compare(configs, families, seeds, folder, only)
    table.write(folder, "algorithms")
    return table, code


def check(configs: Mapping[str, TrainConfig], seeds: int, only: Collection[str] = ()) -> None:
    """Raises ConfigError for configs that cannot be compared."""
    check_seeds(seeds)
    for name in only:
        check_choice("a name in --only", name, configs)
    (first, base), *others = ((name, _shared(config)) for name, config in configs.items())
    for name, fields in others:
        for field, value in fields.items():
            if value != base[field]:
                raise ConfigError(
                    f"{field} of {name} is not that of {first}, so that the two cannot be compared: make it the same"
                )


def _shared(config: TrainConfig) -> dict[str, Any]:
    """Returns the fields that must be the same for all algorithms for a fair comparison."""
    fields = {
        f"config.{name}": getattr(config, name) for name in ("seed", "steps", "model", "prompts")
    }
    return fields | {
        "config.batch.groups * config.batch.images": config.batch.groups * config.batch.images,
        "config.evaluation": config.evaluation,
        "config.placement.cpu_devices": config.placement.cpu_devices,
    }


def _family(config: TrainConfig) -> str:
    if config.algorithm.objective == "transitions":
        return "policy gradients"
    return "preference" if config.algorithm.ranks else "forward process"
