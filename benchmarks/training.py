"""Real runs over a few seeds from the same start: every algorithm, or one with and without asynchrony."""

import dataclasses
import math
import pathlib
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any, cast

from benchmarks.comparison import Table, compare, workdir
from digen_jax.config.load import load_config
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, check_choice, prefix_errors
from digen_jax.logging.metrics import read_metrics


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
    """Trains the algorithms on the same number of images, and writes their table and curves.

    See `comparison.compare`. Raises ConfigError for configs that cannot be compared.
    """
    check_algorithms(configs, only)
    families = {name: _family(config) for name, config in configs.items()}
    table, code = compare(configs, families, seeds, folder, only)
    table.write(folder, "algorithms")
    return table, code


def check_algorithms(configs: Mapping[str, TrainConfig], only: Collection[str] = ()) -> None:
    """Raises ConfigError for configs that cannot be compared."""
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


@dataclasses.dataclass(frozen=True)
class AsynchronyComparison:
    """Table of the rows "off" and "on", and the mean policy lag of images that were trained with "on", in versions."""

    table: Table
    policy_lag: float

    @property
    def difference(self) -> tuple[float, float]:
        """Mean of "on" minus mean of "off", and its standard error.

        Seeds are treated as unpaired; because they share noise and prompts, the true error is smaller.
        """
        (off, off_error), (on, on_error) = (cast(Any, row.gain) for row in self.table.rows)
        return on - off, math.hypot(off_error, on_error)

    def describe(self) -> str:
        """Returns the table, each seed's reward, and whether the difference is within two standard errors."""
        rewards = [
            f"{row.name}, each seed: {', '.join(f'{o.points[-1].reward:.3f}' for o in row.outcomes.values())}"
            for row in self.table.rows
        ]
        difference, error = self.difference
        result = "equal within" if abs(difference) <= 2 * error else "beyond"
        return "\n".join(
            [
                self.table.describe(),
                *rewards,
                f"on - off: {difference:+.3f} ± {error:.3f}, {result} two standard errors. With asynchrony trained "
                f"images were {self.policy_lag:.2f} versions old on average.",
            ]
        )


def compare_asynchrony(
    config: TrainConfig, seeds: int, folder: pathlib.Path
) -> AsynchronyComparison | int:
    """Trains with and without asynchrony from each seed, and writes the table and the curves.

    Args:
      config: Config of "on", with its `runtime.max_policy_lag`.
      seeds: Number of seeds, starting with config.seed.
      folder: Folder for a workdir per run.

    Returns:
      The comparison or, if a signal stopped a run, the exit code.

    Raises:
      ConfigError: the config is invalid, or nothing would be asynchronous.
    """
    if config.placement.mode == AUTO:
        raise ConfigError(
            "config.placement = 'auto' may choose no rollout worker at all: set one for this comparison"
        )
    if not config.runtime.max_policy_lag:
        raise ConfigError(
            "config.runtime.max_policy_lag = 0 is no asynchrony to compare with: set it to 1"
        )
    if not config.placement.rollout.data:
        raise ConfigError(
            "config.placement.rollout.data = 0 is colocated, where nothing can be asynchronous: set it to 1 or more"
        )
    values = config.as_json()
    values["runtime"]["max_policy_lag"] = 0
    # Loaded again because other fields depend on the policy lag.
    configs = {"off": load_config(values), "on": config}
    table, code = compare(configs, {name: name for name in configs}, seeds, folder)
    if code is not None:
        return code
    table.write(folder, "asynchrony")
    paths = [workdir(folder, "on", config.seed + number) for number in range(seeds)]
    each = (read_metrics(path / "metrics.jsonl") for path in paths)
    lags = (fmean(line["policy_lag"] for line in lines if line["step"]) for lines in each)
    return AsynchronyComparison(table, fmean(lags))
