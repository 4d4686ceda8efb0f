"""Asynchrony on and off from the same start: real runs over a few seeds, compared on the held-out prompts.

Every run has a workdir of its own, so that the comparison continues where it was stopped.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from statistics import fmean

from benchmarks.cells import (
    check_seeds,
    check_workdirs,
    held_out,
    mean_and_error,
    train_cells,
    workdir,
)
from digen_jax.config.load import load_config
from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.logging.images import plot_curves
from digen_jax.logging.metrics import read_metrics

KINDS = ("off", "on")


@dataclasses.dataclass(frozen=True)
class AsynchronyOutcome:
    """The result of a run.

    Attributes:
      rewards: on the held-out prompts, by the steps done.
      policy_lag: mean over all trained images, in versions.
    """

    rewards: Mapping[int, float]
    policy_lag: float

    @property
    def after(self) -> float:
        """The reward at the end."""
        return self.rewards[max(self.rewards)]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The outcomes of "off" and "on", seed by seed."""

    off: tuple[AsynchronyOutcome, ...]
    on: tuple[AsynchronyOutcome, ...]

    def ends(self, kind: str) -> list[float]:
        """Rewards at the end, one for each seed."""
        return [outcome.after for outcome in getattr(self, kind)]

    @property
    def difference(self) -> tuple[float, float]:
        """(mean of "on" minus mean of "off", its standard error).

        Seeds are treated as unpaired; as they share noise and prompts, the true error is smaller.
        """
        (off, off_error), (on, on_error) = (mean_and_error(self.ends(kind)) for kind in KINDS)
        return on - off, math.hypot(off_error, on_error)

    @property
    def equal(self) -> bool:
        """Whether the difference is within two of its standard errors."""
        difference, error = self.difference
        return abs(difference) <= 2 * error

    def describe(self) -> str:
        """A table and a sentence on its result."""
        rows = [(f"asynchrony {kind}", self.ends(kind)) for kind in KINDS]
        names = [f"seed {i}" for i in range(len(self.off))]
        steps = max(self.off[0].rewards)
        lines = [f"{f'held-out reward, {steps} steps':<28}" + "".join(f"{n:>8}" for n in names)]
        lines[0] += f"{'mean':>8}"
        for name, ends in rows:
            mean, error = mean_and_error(ends)
            numbers = "".join(f"{end:8.3f}" for end in [*ends, mean])
            lines.append(f"{name:<28}{numbers} ± {error:.3f}")
        difference, error = self.difference
        stale = fmean(outcome.policy_lag for outcome in self.on)
        says = "equal within two standard errors" if self.equal else "beyond two standard errors"
        return "\n".join(
            [
                *lines,
                f"on - off: {difference:+.3f} ± {error:.3f}, {says}. With asynchrony an image that was trained was "
                f"{stale:.2f} versions old on average.",
            ]
        )

    def draw(self, path: pathlib.Path) -> None:
        """Draws the curves' means over the seeds into a PNG file."""
        steps = sorted(self.off[0].rewards)
        means = [
            {"step": step}
            | {k: fmean(outcome.rewards[step] for outcome in getattr(self, k)) for k in KINDS}
            for step in steps
        ]
        curves = {f"asynchrony {kind}, mean of {len(self.off)} seeds": kind for kind in KINDS}
        plot_curves(means, curves, path, "reward on held-out prompts")


def compare(recipe: TrainConfig, seeds: int, folder: pathlib.Path) -> Comparison | int:
    """Trains with and without asynchrony from each seed.

    Args:
      recipe: `runtime.max_policy_lag` is the policy lag of "on".
      seeds: config.seed and those after it.
      folder: gets a workdir for every run, and the curves as a picture.

    Returns:
      The outcomes; or the exit code where a signal stopped a run.

    Raises:
      ConfigError: the recipe cannot work, or nothing would be asynchronous.
    """
    check(recipe, seeds)
    chosen = range(recipe.seed, recipe.seed + seeds)
    recipes = {kind: variant(recipe, kind) for kind in KINDS}
    check_workdirs(recipes, chosen, folder)
    code = train_cells(recipes, chosen, folder)
    if code is not None:
        return code
    comparison = Comparison(
        *(tuple(outcome(workdir(folder, kind, seed)) for seed in chosen) for kind in KINDS)
    )
    comparison.draw(folder / "asynchrony.png")
    return comparison


def check(recipe: TrainConfig, seeds: int) -> None:
    """Refuses a recipe that gives no comparison.

    Raises:
      ConfigError: says what to change.
    """
    check_seeds(seeds)
    if recipe.placement.mode == AUTO:
        raise ConfigError(
            "config.placement = 'auto' may choose no rollout worker at all: set one for this comparison"
        )
    if not recipe.runtime.max_policy_lag:
        raise ConfigError(
            "config.runtime.max_policy_lag = 0 is no asynchrony to compare with: set it to 1"
        )
    if not recipe.placement.rollout.data:
        raise ConfigError(
            "config.placement.rollout.data = 0 is colocated, where nothing can be asynchronous: set it to 1 or more"
        )


def variant(recipe: TrainConfig, kind: str) -> TrainConfig:
    """The recipe of the runs "on" or "off"."""
    if kind == "on":
        return recipe
    asked = recipe.as_json()
    asked["runtime"]["max_policy_lag"] = 0
    return load_config(asked)  # again, because other fields depend on the policy lag


def outcome(path: pathlib.Path) -> AsynchronyOutcome:
    """The result of a finished run, from its metrics."""
    lines = read_metrics(path / "metrics.jsonl")
    return AsynchronyOutcome(
        held_out(lines), fmean(line["policy_lag"] for line in lines if line["step"])
    )
