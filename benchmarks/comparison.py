"""Real runs over a few seeds from the same start, each in a separate workdir, and the table of their results.

A stopped comparison continues, and a finished one writes its files again. An entry *learns* if its mean gain on the
held-out prompts, over all seeds, is at least 0.05 and more than two standard errors.
"""

import csv
import dataclasses
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple, cast

from matplotlib.figure import Figure

from digen_jax.config.load import check_inputs
from digen_jax.config.train_config import MAY_CHANGE, TURNED, TrainConfig
from digen_jax.errors import ConfigError, prefix_errors
from digen_jax.logging.images import label_axes
from digen_jax.logging.metrics import read_metrics
from digen_jax.logging.workdir import claim_workdir, finished_step
from digen_jax.train import train

REWARD = "evaluation/reward"
# Fields that a user may change when a run continues, but that must not differ within a comparison.
MAY_DIFFER = tuple(field for field in MAY_CHANGE if field not in TURNED)
COLUMNS = (
    "algorithm", "family", "seed", "images", "seconds", "reward", "cell_seconds", "cell_cpu_seconds"
)  # fmt: skip
GAIN, ERRORS = 0.05, 2  # see `Row.learns`
HEAD = (
    "| algorithm | gain | reward at the end | images | seconds a run | CPU-seconds a run | learns |"
)


class Cost(NamedTuple):
    """Cost of a run so far, including compilation and evaluations, without calls that were killed."""

    seconds: float
    cpu_seconds: float  # of this process and its reward processes


class Point(NamedTuple):
    """An evaluation on the held-out prompts."""

    images: int  # images trained so far
    seconds: float  # seconds of training so far, without evaluations
    reward: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a finished run; `seconds` and `cpu_seconds` include compilation and evaluations."""

    points: tuple[Point, ...]
    seconds: float
    cpu_seconds: float

    @property
    def gain(self) -> float:
        """Final reward minus that of the base model."""
        return self.points[-1].reward - self.points[0].reward

    def as_json(self) -> dict[str, Any]:
        """Returns all numbers."""
        return dataclasses.asdict(self) | {"points": [point._asdict() for point in self.points]}


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one algorithm: the outcomes of its finished runs by seed, and the missing seeds."""

    name: str
    family: str
    outcomes: Mapping[int, Outcome]
    missing: tuple[int, ...]

    @property
    def gain(self) -> tuple[float, float | None] | None:
        """Mean gain over the seeds and its standard error, which is None for one seed. None means no seed."""
        gains = [outcome.gain for outcome in self.outcomes.values()]
        if len(gains) < 2:
            return (gains[0], None) if gains else None
        return fmean(gains), stdev(gains) / math.sqrt(len(gains))

    @property
    def learns(self) -> bool | None:
        """Whether the gain is at least 0.05 and more than two standard errors. None means that seeds are missing."""
        mean, error = self.gain or (0.0, None)
        if self.missing or error is None:
            return None
        return mean >= GAIN and mean > ERRORS * error

    def as_json(self) -> dict[str, Any]:
        """Returns all numbers."""
        runs = {seed: outcome.as_json() for seed, outcome in self.outcomes.items()}
        return dict(gain=self.gain, learns=self.learns, seeds=runs, missing=self.missing)

    def line(self) -> str:
        """Returns the row in Markdown, with means over the seeds."""
        (mean, error), outcomes = self.gain or (0.0, None), self.outcomes.values()
        cells = [
            self.name,
            f"{mean:+.3f}" + ("" if error is None else f" ± {error:.3f}"),
            f"{fmean(one.points[-1].reward for one in outcomes):.3f}",
            f"{fmean(one.points[-1].images for one in outcomes):.0f}",
            f"{fmean(one.seconds for one in outcomes):.0f}",
            f"{fmean(one.cpu_seconds for one in outcomes):.0f}",
            {True: "yes", False: "no", None: "seeds missing"}[self.learns],
        ]
        return f"| {' | '.join(cells)} |"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of all entries, finished or not."""

    rows: tuple[Row, ...]

    def describe(self) -> str:
        """Returns a Markdown table of the finished runs, and a list of the unfinished ones."""
        lines = [HEAD, "| --- |" + " ---: |" * 5 + " --- |"]
        lines += [row.line() for row in self.rows if row.outcomes]
        base = {round(o.points[0].reward, 3) for row in self.rows for o in row.outcomes.values()}
        if base:
            lines += ["", f"Held-out reward of the base: {', '.join(map(str, sorted(base)))}."]
        missing = [
            f"{row.name} {', '.join(map(str, row.missing))}" for row in self.rows if row.missing
        ]
        if missing:
            lines += ["", f"Not finished (algorithm, seeds): {'; '.join(missing)}."]
        return "\n".join(lines)

    def write(self, folder: pathlib.Path, name: str) -> None:
        """Writes NAME.md, .csv (unrounded, one line per evaluation) and .png; nothing if no run is finished."""
        if not any(row.outcomes for row in self.rows):
            return
        (folder / f"{name}.md").write_text(self.describe() + "\n")
        with (folder / f"{name}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(COLUMNS)
            for row in self.rows:
                for seed, one in row.outcomes.items():
                    for point in one.points:
                        run = (row.name, row.family, seed, *point)
                        lines.writerow((*run, one.seconds, one.cpu_seconds))
        plot([row for row in self.rows if row.outcomes], folder / f"{name}.png")


def compare(
    configs: Mapping[str, TrainConfig],
    families: Mapping[str, str],
    seeds: int,
    folder: pathlib.Path,
    only: Collection[str] = (),
) -> tuple[Table, int | None]:
    """Trains the unfinished runs, seed by seed, so that an early stop leaves some results for each name.

    Args:
      configs: Configs by name.
      families: Family of each name, for the plot.
      seeds: Number of seeds, starting with the first config's seed.
      folder: Folder for a workdir per run.
      only: Names to train; empty means all. The table has all finished runs.

    Returns:
      The table and, if a signal stopped a run, the exit code, else None.

    Raises:
      ConfigError: a config is invalid, or a workdir has a run of another config or more steps, or another process uses
        it. Nothing is trained.
    """
    if seeds < 2:
        raise ConfigError(f"seeds must be at least 2 for a standard error, not {seeds}")
    for name, config in configs.items():
        with prefix_errors(f"{name}: ", (ConfigError,)):
            check_inputs(config)
    first = next(iter(configs.values())).seed
    chosen = range(first, first + seeds)
    code = _train_runs(configs, chosen, folder, only)
    rows = [_row(name, families[name], one, chosen, folder) for name, one in configs.items()]
    return Table(tuple(rows)), code


def workdir(folder: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """Returns the workdir of a run."""
    return folder / f"{name}-{seed}"


def _train_runs(
    configs: Mapping[str, TrainConfig],
    seeds: Sequence[int],
    folder: pathlib.Path,
    only: Collection[str],
) -> int | None:
    """Trains the unfinished runs; returns the exit code if a signal stopped one."""
    runs = [(workdir(folder, name, seed), name, seed) for seed in seeds for name in configs]
    for path, name, seed in runs:
        config = dataclasses.replace(configs[name], seed=seed)
        if path.is_dir():
            with claim_workdir(path, config.as_json(), MAY_DIFFER):
                pass  # checks the config
        if (finished_step(path) or 0) > config.steps:
            raise ConfigError(
                f"config.steps = {config.steps}, but the run in {path} has done {finished_step(path)} "
                f"steps: give as many, or choose another workdir"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for path, name, seed in runs:
        if only and name not in only:
            continue
        print(f"\n{name}, seed {seed}: {path}", flush=True)
        if finished_step(path) == configs[name].steps:
            print("finished before")
            continue
        last, before, start = read_cost(path), os.times(), time.perf_counter()
        code = train(dataclasses.replace(configs[name], seed=seed), path)
        seconds = last.seconds + time.perf_counter() - start
        # User and system time of this process and of its finished children.
        cpu_seconds = last.cpu_seconds + sum(os.times()[:4]) - sum(before[:4])
        (path / "cost.json").write_text(json.dumps(Cost(seconds, cpu_seconds)._asdict()) + "\n")
        if code is not None:
            return code
    return None


def read_cost(path: pathlib.Path) -> Cost:
    """Returns the cost of the run in a workdir so far."""
    file = path / "cost.json"
    return Cost(**json.loads(file.read_text())) if file.exists() else Cost(0.0, 0.0)


def _row(
    name: str, family: str, config: TrainConfig, seeds: Sequence[int], folder: pathlib.Path
) -> Row:
    """Reads the results of one entry's runs."""
    outcomes = {}
    for seed in seeds:
        path = workdir(folder, name, seed)
        if finished_step(path) == config.steps:
            outcomes[seed] = Outcome(_points(path, config), *read_cost(path))
    return Row(name, family, outcomes, tuple(seed for seed in seeds if seed not in outcomes))


def _points(path: pathlib.Path, config: TrainConfig) -> tuple[Point, ...]:
    lines = read_metrics(path / "metrics.jsonl")
    images = config.batch.groups * config.batch.images
    seconds = [images / line["images_per_second"] if line["step"] else 0.0 for line in lines]
    until = dict(zip((line["step"] for line in lines), itertools.accumulate(seconds), strict=True))
    # A run that was first configured with fewer steps was also evaluated at its end.
    return tuple(
        Point(line["step"] * images, until[line["step"]], line[REWARD])
        for line in lines
        if REWARD in line
        and (line["step"] % config.evaluation.every == 0 or line["step"] == config.steps)
    )


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Plots the reward of each family over images and seconds, and the gain of each algorithm, into a PNG file.

    Curves are means over the runs of a family with bars of one standard deviation; gains have standard errors.
    """
    families = {row.family: [one for one in rows if one.family == row.family] for row in rows}
    figure = Figure(figsize=(15, max(4.5, 1.2 + 0.24 * len(rows))), dpi=120, layout="constrained")
    *curves, dots = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    curves[1].sharey(curves[0])
    names: list[str] = []
    for number, (family, members) in enumerate(families.items()):
        style = dict(color=f"C{number}", marker="os^D"[number % 4])
        runs = [one.points for row in members for one in row.outcomes.values()]
        columns = [
            Point(*cast(Any, zip(*column, strict=True))) for column in zip(*runs, strict=True)
        ]
        mean, deviation = summary(columns)
        for axes, field in zip(curves, ("images", "seconds"), strict=True):
            x = [fmean(getattr(column, field)) for column in columns]
            axes.errorbar(
                x, mean, deviation, label=f"{family} ({len(runs)} runs)", capsize=4, **style
            )
        best_first = sorted(members, key=lambda row: -(row.gain or (0.0,))[0])
        gains, errors = zip(*(row.gain for row in best_first), strict=True)
        places = range(len(names), len(names) + len(members))
        errors = [one or 0.0 for one in errors]
        dots.errorbar(gains, places, xerr=errors, linestyle="none", capsize=3, **style)
        names += [row.name for row in best_first]
    for axes, label in zip(curves, ("images seen", "seconds of training"), strict=True):
        label_axes(axes, label, "reward on held-out prompts")
    curves[0].legend(frameon=False, loc="upper left")
    curves[0].set_title("mean and standard deviation of a family's runs", fontsize=10, loc="left")
    dots.axvline(0, color="0.7", linewidth=1)
    dots.set_yticks(range(len(names)), names)
    dots.invert_yaxis()
    label_axes(dots, "gain on held-out prompts", "")
    dots.set_title("mean over seeds and its standard error", fontsize=10, loc="left")
    figure.savefig(path)


def summary(columns: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Returns mean and standard deviation of the rewards at each point; each `Point` has one value per run."""
    rewards: list[Any] = [column.reward for column in columns]
    return (
        [fmean(values) for values in rewards],
        [stdev(values) if len(values) > 1 else 0.0 for values in rewards],
    )
