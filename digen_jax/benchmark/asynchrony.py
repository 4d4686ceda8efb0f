"""Asynchrony on and off from the same start: real runs over a few seeds, compared on the held-out prompts.

Every run has a workdir of its own, so the whole goes on where it was stopped.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from ml_collections import ConfigDict

from digen_jax import pictures, recipe, recipe_checks
from digen_jax.metrics import read_metrics
from digen_jax.run import train
from digen_jax.settings import ConfigError

REWARD = "evaluation/reward"
KINDS = ("off", "on")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
      rewards: on the held-out prompts, by the steps done.
      staleness: mean over all trained images, in versions.
    """

    rewards: Mapping[int, float]
    staleness: float

    @property
    def after(self) -> float:
        """The reward at the end."""
        return self.rewards[max(self.rewards)]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The outcomes of "off" and "on", seed by seed."""

    off: tuple[Outcome, ...]
    on: tuple[Outcome, ...]

    def ends(self, kind: str) -> list[float]:
        """Rewards at the end, of all seeds."""
        return [outcome.after for outcome in getattr(self, kind)]

    @property
    def difference(self) -> tuple[float, float]:
        """(mean of "on" less mean of "off", its standard error).

        Seeds are not paired: that they share noise and prompts makes the true error smaller.
        """
        (off, off_error), (on, on_error) = (mean_and_error(self.ends(kind)) for kind in KINDS)
        return on - off, math.hypot(off_error, on_error)

    @property
    def equal(self) -> bool:
        """Whether the difference is within two of its standard errors."""
        difference, error = self.difference
        return abs(difference) <= 2 * error

    def describe(self) -> str:
        """A table, and what it says."""
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
        stale = fmean(outcome.staleness for outcome in self.on)
        says = "equal within two standard errors" if self.equal else "beyond two standard errors"
        return "\n".join(
            [
                *lines,
                f"on - off: {difference:+.3f} ± {error:.3f}, {says}. With asynchrony an image that was trained was "
                f"{stale:.2f} versions old on average.",
            ]
        )

    def draw(self, path: pathlib.Path) -> None:
        """The means over the seeds, as they went, into a PNG file."""
        steps = sorted(self.off[0].rewards)
        means = [
            {"step": step}
            | {k: fmean(outcome.rewards[step] for outcome in getattr(self, k)) for k in KINDS}
            for step in steps
        ]
        curves = {f"asynchrony {kind}, mean of {len(self.off)} seeds": kind for kind in KINDS}
        pictures.plot_curves(means, curves, path, "reward on held-out prompts")


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, by the sample's deviation."""
    return fmean(values), stdev(values) / math.sqrt(len(values))


def compare(config: ConfigDict, seeds: int, folder: pathlib.Path) -> Comparison | int:
    """Trains with and without asynchrony from each seed.

    Args:
      config: complete; `runtime.staleness` says how far "on" goes.
      seeds: config.seed and those after it.
      folder: gets a workdir for every run, and the curves as a picture.

    Returns:
      The outcomes; or the exit code where a signal stopped a run.

    Raises:
      ConfigError: something of the config cannot work, or nothing would be asynchronous.
    """
    check(config, seeds)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for seed in range(config.seed, config.seed + seeds):
        for kind in KINDS:
            workdir = folder / f"{kind}-{seed}"
            print(f"\nasynchrony {kind}, seed {seed}: {workdir}", flush=True)
            code = train(variant(config, kind, seed), workdir)
            if code is not None:
                return code
            found[kind].append(outcome(workdir))
    comparison = Comparison(tuple(found["off"]), tuple(found["on"]))
    comparison.draw(folder / "asynchrony.png")
    return comparison


def check(config: ConfigDict, seeds: int) -> None:
    """Refuses what would not be a comparison.

    Raises:
      ConfigError: says what to change.
    """
    if seeds < 2:
        raise ConfigError(f"seeds must be at least 2 for a standard error, not {seeds}")
    if recipe.is_automatic(config):
        raise ConfigError(
            "config.placement = 'auto' may choose no rollout mesh at all: set one for this comparison"
        )
    if not config.runtime.staleness:
        raise ConfigError(
            "config.runtime.staleness = 0 is no asynchrony to compare with: set it to 1"
        )
    if not config.placement.rollout.data:
        raise ConfigError(
            "config.placement.rollout.data = 0 is colocated, where nothing can be asynchronous: set it to 1 or more"
        )
    recipe_checks.check(config)


def variant(config: ConfigDict, kind: str, seed: int) -> ConfigDict:
    """The config of a run."""
    changed = config.copy_and_resolve_references()
    changed.seed = seed
    if kind == "off":
        changed.runtime.staleness = 0
    return changed


def outcome(workdir: pathlib.Path) -> Outcome:
    """What the metrics of a finished run say."""
    lines = read_metrics(workdir / "metrics.jsonl")
    rewards = {line["step"]: line[REWARD] for line in lines if REWARD in line}
    return Outcome(rewards, fmean(line["staleness"] for line in lines if line["step"]))
