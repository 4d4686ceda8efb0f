"""Compares training with and without asynchrony from the same start: real runs over a few seeds."""

import dataclasses
import math
import pathlib
from statistics import fmean
from typing import Any, cast

from benchmarks.comparison import Table, check_seeds, compare, workdir
from digen_jax.config.load import load_config
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.logging.metrics import read_metrics


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
    check(config, seeds)
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


def check(config: TrainConfig, seeds: int) -> None:
    """Raises ConfigError if a config gives no comparison."""
    check_seeds(seeds)
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
