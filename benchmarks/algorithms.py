"""Trains every algorithm from the same start on the same number of images: real runs over a few seeds.

An algorithm *learns* if its mean gain on the held-out prompts, over all seeds, is at least 0.05 and more than two
standard errors.
"""

import csv
import dataclasses
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.runs import (
    check_seeds,
    cost,
    held_out,
    is_finished,
    mean_and_error,
    train_runs,
    workdir,
)
from digen_jax.config.load import check_inputs, load_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, blame, check_choice, user_input
from digen_jax.logging.images import label_axes
from digen_jax.logging.metrics import read_metrics

COLUMNS = ("algorithm", "family", "seed", "images", "seconds", "reward")
COSTS = ("cell_seconds", "cell_cpu_seconds")
GAIN, ERRORS = 0.05, 2  # see `Row.learns`
HEAD = (
    "| algorithm | gain | reward at the end | images | seconds a run | CPU-seconds a run | learns |"
)


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
        return mean_and_error(gains) if len(gains) > 1 else (gains[0], None) if gains else None

    @property
    def learns(self) -> bool | None:
        """Whether the gain is at least 0.05 and more than two standard errors. None means that seeds are missing."""
        if self.missing:
            return None
        mean, error = self.gain
        return mean >= GAIN and mean > ERRORS * error

    def as_json(self) -> dict[str, Any]:
        """Returns all numbers."""
        runs = {seed: outcome.as_json() for seed, outcome in self.outcomes.items()}
        return dict(gain=self.gain, learns=self.learns, seeds=runs, missing=self.missing)

    def line(self) -> str:
        """Returns the row in Markdown, with means over the seeds."""
        (mean, error), outcomes = self.gain, self.outcomes.values()
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
    """Rows of all algorithms, finished or not."""

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

    def write(self, folder: pathlib.Path) -> None:
        """Writes algorithms.md, .csv (unrounded, one line per evaluation) and .png; nothing if no run is finished."""
        if not any(row.outcomes for row in self.rows):
            return
        (folder / "algorithms.md").write_text(self.describe() + "\n")
        with (folder / "algorithms.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow((*COLUMNS, *COSTS))
            for row in self.rows:
                for seed, one in row.outcomes.items():
                    for point in one.points:
                        run = (row.name, row.family, seed, *point)
                        lines.writerow((*run, one.seconds, one.cpu_seconds))
        plot([row for row in self.rows if row.outcomes], folder / "algorithms.png")


def read_table(path: pathlib.Path) -> Table:
    """Reads the table of the finished runs from an algorithms.csv.

    Raises:
      ConfigError: the file cannot be read, or is not such a table.
    """
    with user_input(), path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines or set(lines[0]) != {*COLUMNS, *COSTS}:
        raise ConfigError(
            f"{path} is no table of runs: its first line must be {','.join((*COLUMNS, *COSTS))}"
        )
    outcomes = {}
    with blame(f"{path}: "):
        for line in lines:
            runs = outcomes.setdefault((line["algorithm"], line["family"]), {})
            costs = [float(line[name]) for name in COSTS]
            before = runs.get(int(line["seed"]), Outcome((), *costs)).points
            point = Point(int(line["images"]), float(line["seconds"]), float(line["reward"]))
            runs[int(line["seed"])] = Outcome((*before, point), *costs)
    return Table(tuple(Row(*names, runs, ()) for names, runs in outcomes.items()))


def load_configs(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainConfig]:
    """Loads configs by name; raises ConfigError, with the name, for an invalid one."""
    loaded = {}
    for name, config in configs.items():
        with blame(f"{name}: ", (ConfigError,)):
            loaded[name] = load_config(config)
    return loaded


def compare(
    configs: Mapping[str, TrainConfig], seeds: int, folder: pathlib.Path, only: Collection[str] = ()
) -> tuple[Table, int | None]:
    """Trains the unfinished runs, seed by seed.

    Args:
      configs: Configs by algorithm name.
      seeds: Number of seeds, starting with the first config's seed.
      folder: Folder for a workdir per run, the table and the curves.
      only: Names of the algorithms to train; empty means all. The table has all finished runs.

    Returns:
      The table and, if a signal stopped a run, the exit code, else None.

    Raises:
      ConfigError: a config is invalid, or differs in a field that must be the same for all.
    """
    check(configs, seeds, only)
    for name, config in configs.items():
        with blame(f"{name}: ", (ConfigError,)):
            check_inputs(config)
    first = next(iter(configs.values())).seed
    chosen = range(first, first + seeds)
    code = train_runs(configs, chosen, folder, only)
    table = Table(tuple(_row(name, config, chosen, folder) for name, config in configs.items()))
    table.write(folder)
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


def _row(name: str, config: TrainConfig, seeds: Sequence[int], folder: pathlib.Path) -> Row:
    """Reads the results of one algorithm's runs."""
    outcomes = {}
    for seed in seeds:
        path = workdir(folder, name, seed)
        if is_finished(path, config):
            outcomes[seed] = Outcome(_points(path, config), *cost(path))
    family = "preference" if config.algorithm.ranks else "forward process"
    if config.algorithm.objective == "transitions":
        family = "policy gradients"
    return Row(name, family, outcomes, tuple(seed for seed in seeds if seed not in outcomes))


def _points(path: pathlib.Path, config: TrainConfig) -> tuple[Point, ...]:
    lines = read_metrics(path / "metrics.jsonl")
    images = config.batch.groups * config.batch.images
    seconds = [images / line["images_per_second"] if line["step"] else 0.0 for line in lines]
    until = dict(zip((line["step"] for line in lines), itertools.accumulate(seconds), strict=True))
    # A run that was first configured with fewer steps was also evaluated at its end.
    return tuple(
        Point(step * images, until[step], reward)
        for step, reward in held_out(lines).items()
        if step % config.evaluation.every == 0 or step == config.steps
    )


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Plots the reward of each family over images and seconds, and the gain of each algorithm, into a PNG file.

    Curves are means over the runs of a family with bars of one standard deviation; gains have standard errors.
    """
    families = {row.family: [one for one in rows if one.family == row.family] for row in rows}
    figure = Figure(figsize=(15, max(4.5, 1.2 + 0.24 * len(rows))), dpi=120, layout="constrained")
    *curves, dots = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    curves[1].sharey(curves[0])
    names = []
    for number, (family, members) in enumerate(families.items()):
        style = dict(color=f"C{number}", marker="os^D"[number % 4])
        runs = [one.points for row in members for one in row.outcomes.values()]
        columns = [Point(*zip(*column, strict=True)) for column in zip(*runs, strict=True)]
        mean, deviation = summary(columns)
        for axes, field in zip(curves, ("images", "seconds"), strict=True):
            x = [fmean(getattr(column, field)) for column in columns]
            axes.errorbar(
                x, mean, deviation, label=f"{family} ({len(runs)} runs)", capsize=4, **style
            )
        best_first = sorted(members, key=lambda row: -row.gain[0])
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
    rewards = [column.reward for column in columns]
    return (
        [fmean(values) for values in rewards],
        [stdev(values) if len(values) > 1 else 0.0 for values in rewards],
    )
