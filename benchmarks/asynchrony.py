"""Compares training with and without asynchrony from the same start: real runs over a few seeds."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from statistics import fmean

from benchmarks.runs import check_seeds, held_out, mean_and_error, train_runs, workdir
from digen_jax.config.load import load_config
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.logging.images import plot_curves
from digen_jax.logging.metrics import read_metrics

KINDS = ("off", "on")


@dataclasses.dataclass(frozen=True)
class AsynchronyOutcome:
    """Result of a run.

    Attributes:
      rewards: Held-out reward by number of steps.
      policy_lag: Mean over all trained images, in versions.
    """

    rewards: Mapping[int, float]
    policy_lag: float


@dataclasses.dataclass(frozen=True)
class AsynchronyComparison:
    """Outcomes of "off" and "on", by seed."""

    off: tuple[AsynchronyOutcome, ...]
    on: tuple[AsynchronyOutcome, ...]

    def final(self, kind: str) -> list[float]:
        """Returns the final rewards, one per seed."""
        return [outcome.rewards[max(outcome.rewards)] for outcome in getattr(self, kind)]

    @property
    def difference(self) -> tuple[float, float]:
        """Mean of "on" minus mean of "off", and its standard error.

        Seeds are treated as unpaired; because they share noise and prompts, the true error is smaller.
        """
        (off, off_error), (on, on_error) = (mean_and_error(self.final(kind)) for kind in KINDS)
        return on - off, math.hypot(off_error, on_error)

    def describe(self) -> str:
        """Returns a table, and whether the difference is within two standard errors."""
        names = "".join(f"{name:>8}" for name in (f"seed {i}" for i in range(len(self.off))))
        lines = [f"{f'held-out reward, {max(self.off[0].rewards)} steps':<28}{names}{'mean':>8}"]
        for kind in KINDS:
            mean, error = mean_and_error(self.final(kind))
            numbers = "".join(f"{reward:8.3f}" for reward in [*self.final(kind), mean])
            lines.append(f"{f'asynchrony {kind}':<28}{numbers} ± {error:.3f}")
        difference, error = self.difference
        result = "equal within" if abs(difference) <= 2 * error else "beyond"
        policy_lag = fmean(outcome.policy_lag for outcome in self.on)
        lines.append(
            f"on - off: {difference:+.3f} ± {error:.3f}, {result} two standard errors. With asynchrony trained images "
            f"were {policy_lag:.2f} versions old on average."
        )
        return "\n".join(lines)

    def plot(self, path: pathlib.Path) -> None:
        """Plots the mean curves over the seeds into a PNG file."""
        means = [
            {"step": step}
            | {kind: fmean(one.rewards[step] for one in getattr(self, kind)) for kind in KINDS}
            for step in sorted(self.off[0].rewards)
        ]
        curves = {f"asynchrony {kind}, mean of {len(self.off)} seeds": kind for kind in KINDS}
        plot_curves(means, curves, path, "reward on held-out prompts")


def compare(config: TrainConfig, seeds: int, folder: pathlib.Path) -> AsynchronyComparison | int:
    """Trains with and without asynchrony from each seed.

    Args:
      config: Config of "on", with its `runtime.max_policy_lag`.
      seeds: Number of seeds, starting with config.seed.
      folder: Folder for a workdir per run, and a plot of the curves.

    Returns:
      The outcomes or, if a signal stopped a run, the exit code.

    Raises:
      ConfigError: the config is invalid, or nothing would be asynchronous.
    """
    check(config, seeds)
    chosen = range(config.seed, config.seed + seeds)
    values = config.as_json()
    values["runtime"]["max_policy_lag"] = 0
    # Loaded again because other fields depend on the policy lag.
    code = train_runs({"off": load_config(values), "on": config}, chosen, folder)
    if code is not None:
        return code
    off, on = (tuple(_outcome(workdir(folder, kind, seed)) for seed in chosen) for kind in KINDS)
    comparison = AsynchronyComparison(off, on)
    comparison.plot(folder / "asynchrony.png")
    return comparison


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


def _outcome(path: pathlib.Path) -> AsynchronyOutcome:
    lines = read_metrics(path / "metrics.jsonl")
    policy_lag = fmean(line["policy_lag"] for line in lines if line["step"])
    return AsynchronyOutcome(held_out(lines), policy_lag)
