"""Every algorithm from the same start on the same number of images: real runs over a few seeds.

An algorithm *learns* where its mean gain on the held-out prompts, over all seeds, is at least 0.05 and more
than two of its standard errors.
"""

import csv
import dataclasses
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.cells import (
    check_seeds,
    check_workdirs,
    cost,
    held_out,
    is_finished,
    mean_and_error,
    train_cells,
    workdir,
)
from benchmarks.family_plot import draw
from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.config.inputs import check_inputs
from digen_jax.config.load import load_config
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, blame, check_choice, user_input
from digen_jax.logging.metrics import read_metrics

CELLS = ("algorithm", "family", "seed", "images", "seconds", "reward")
COSTS = ("cell_seconds", "cell_cpu_seconds")
GAIN, ERRORS = 0.05, 2  # see `Row.learns`
HEAD = "| algorithm | gain | reward at the end | images | seconds a cell | CPU-seconds a cell | learns |"


class Point(NamedTuple):
    """An evaluation on the held-out prompts."""

    images: int  # images trained so far
    seconds: float  # seconds of training so far, without evaluations
    reward: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a finished cell; `seconds` and `cpu_seconds` are those of the whole run."""

    points: tuple[Point, ...]
    seconds: float
    cpu_seconds: float

    @property
    def gain(self) -> float:
        """Reward at the end minus that of the base model."""
        return self.reward - self.points[0].reward

    @property
    def reward(self) -> float:
        """Reward at the end."""
        return self.points[-1].reward

    @property
    def images(self) -> int:
        """All images seen in training."""
        return self.points[-1].images

    def record(self) -> dict[str, Any]:
        """All numbers, for a JSON file."""
        points = [point._asdict() for point in self.points]
        return dict(points=points, seconds=self.seconds, cpu_seconds=self.cpu_seconds)


@dataclasses.dataclass(frozen=True)
class Row:
    """An algorithm: the outcomes of its finished cells by seed, and the seeds that are missing."""

    name: str
    family: str
    outcomes: Mapping[int, Outcome]
    missing: tuple[int, ...]

    @property
    def gain(self) -> tuple[float, float | None] | None:
        """(mean, its standard error) over the seeds; without error for one seed, None for none."""
        gains = [outcome.gain for outcome in self.outcomes.values()]
        return mean_and_error(gains) if len(gains) > 1 else (gains[0], None) if gains else None

    @property
    def learns(self) -> bool | None:
        """Whether the gain is at least 0.05 and more than two standard errors; None while seeds are missing."""
        if self.missing:
            return None
        mean, error = self.gain
        return mean >= GAIN and mean > ERRORS * error

    def mean(self, name: str) -> float:
        """The mean of an attribute of `Outcome` over the seeds."""
        return fmean(getattr(outcome, name) for outcome in self.outcomes.values())

    def record(self) -> dict[str, Any]:
        """All numbers, for a JSON file."""
        cells = {seed: outcome.record() for seed, outcome in self.outcomes.items()}
        return dict(gain=self.gain, learns=self.learns, seeds=cells, missing=self.missing)


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of all algorithms, finished or not."""

    rows: tuple[Row, ...]

    def describe(self) -> str:
        """A Markdown table of the finished cells, and a list of the others."""
        lines = [HEAD, "| --- |" + " ---: |" * 5 + " --- |"]
        lines += [_line(row) for row in self.rows if row.outcomes]
        base = {round(o.points[0].reward, 3) for row in self.rows for o in row.outcomes.values()}
        if base:
            lines += ["", f"Held-out reward of the base: {', '.join(map(str, sorted(base)))}."]
        missing = [
            f"{row.name} {', '.join(map(str, row.missing))}" for row in self.rows if row.missing
        ]
        if missing:
            lines += ["", f"Not finished (algorithm, seeds): {'; '.join(missing)}."]
        return "\n".join(lines)

    def draw(self, path: pathlib.Path) -> None:
        """Draws the families' held-out reward against images and against seconds, and every gain, into a PNG file."""
        runs, gains = {}, {}
        for row in self.rows:
            if row.outcomes:
                points = [[p._asdict() for p in one.points] for one in row.outcomes.values()]
                runs.setdefault(row.family, []).extend(points)
                gains.setdefault(row.family, {})[row.name] = row.gain
        draw(runs, gains, path)

    def write_cells(self, path: pathlib.Path) -> None:
        """Writes the finished cells as CSV, one line per evaluation, unrounded: `read_cells` returns equal values."""
        with path.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow((*CELLS, *COSTS))
            for row in self.rows:
                for seed, one in row.outcomes.items():
                    for point in one.points:
                        cells = (row.name, row.family, seed, *point)
                        lines.writerow((*cells, one.seconds, one.cpu_seconds))

    def write(self, folder: pathlib.Path) -> None:
        """Writes algorithms.md, .csv and .png; nothing if no cell is finished."""
        if any(row.outcomes for row in self.rows):
            (folder / "algorithms.md").write_text(self.describe() + "\n")
            self.write_cells(folder / "algorithms.csv")
            self.draw(folder / "algorithms.png")


def read_cells(path: pathlib.Path) -> Table:
    """The table of the finished cells that `Table.write_cells` wrote.

    Raises:
      ConfigError: the file cannot be read, or is no such table.
    """
    with user_input(), path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines or set(lines[0]) != {*CELLS, *COSTS}:
        raise ConfigError(
            f"{path} is no table of cells: its first line must be {','.join((*CELLS, *COSTS))}"
        )
    outcomes = {}
    with blame(f"{path}: "):
        for line in lines:
            cells = outcomes.setdefault((line["algorithm"], line["family"]), {})
            costs = [float(line[name]) for name in COSTS]
            before = cells.get(int(line["seed"]), Outcome((), *costs)).points
            point = Point(int(line["images"]), float(line["seconds"]), float(line["reward"]))
            cells[int(line["seed"])] = Outcome((*before, point), *costs)
    return Table(tuple(Row(*names, cells, ()) for names, cells in outcomes.items()))


def _line(row: Row) -> str:
    mean, error = row.gain
    cells = [
        row.name,
        f"{mean:+.3f}" + ("" if error is None else f" ± {error:.3f}"),
        f"{row.mean('reward'):.3f}",
        f"{row.mean('images'):.0f}",
        f"{row.mean('seconds'):.0f}",
        f"{row.mean('cpu_seconds'):.0f}",
        {True: "yes", False: "no", None: "seeds missing"}[row.learns],
    ]
    return f"| {' | '.join(cells)} |"


def open_all(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainConfig]:
    """The recipes of some configs.

    Raises:
      ConfigError: a config cannot work; the sentence begins with its name.
    """
    recipes = {}
    for name, config in configs.items():
        with blame(f"{name}: ", (ConfigError,)):
            recipes[name] = load_config(config)
    return recipes


def compare(
    recipes: Mapping[str, TrainConfig],
    seeds: int,
    folder: pathlib.Path,
    only: Collection[str] = (),
) -> tuple[Table, int | None]:
    """Trains the cells that are not finished, seed by seed.

    Args:
      recipes: by the algorithms' names.
      seeds: the first one's config.seed and those after it.
      folder: gets a workdir for every cell, the table and the curves.
      only: the names of the algorithms to train; empty: all. The table has all finished cells.

    Returns:
      The table; and the exit code where a signal stopped a run, else None.

    Raises:
      ConfigError: a recipe cannot work, or differs where all must be the same.
    """
    check(recipes, seeds, only)
    for name, recipe in recipes.items():
        with blame(f"{name}: ", (ConfigError,)):
            check_inputs(recipe)
    first = next(iter(recipes.values())).seed
    chosen = range(first, first + seeds)
    check_workdirs(recipes, chosen, folder)
    wanted = {name: recipe for name, recipe in recipes.items() if name in only or not only}
    code = train_cells(wanted, chosen, folder)
    table = Table(tuple(read_row(name, one, chosen, folder) for name, one in recipes.items()))
    table.write(folder)
    return table, code


def check(recipes: Mapping[str, TrainConfig], seeds: int, only: Collection[str] = ()) -> None:
    """Refuses recipes that cannot be compared.

    Raises:
      ConfigError: says what to change.
    """
    check_seeds(seeds)
    for name in only:
        check_choice("a name in --only", name, recipes)
    (first, base), *others = ((name, shared(recipe)) for name, recipe in recipes.items())
    for name, fields in others:
        for field, value in fields.items():
            if value != base[field]:
                raise ConfigError(
                    f"{field} of {name} is not that of {first}, so that the two cannot be compared: make it the same"
                )


def shared(recipe: TrainConfig) -> dict[str, Any]:
    """Fields that must be the same for all algorithms for a fair comparison."""
    fields = {
        f"config.{name}": getattr(recipe, name) for name in ("seed", "steps", "model", "prompts")
    }
    return fields | {
        "config.batch.groups * config.batch.images": step_images(recipe),
        "config.evaluation": recipe.evaluation,
        "config.placement.cpu_devices": recipe.placement.cpu_devices,
    }


def step_images(recipe: TrainConfig) -> int:
    """Images of a step."""
    return recipe.batch.groups * recipe.batch.images


def read_row(name: str, recipe: TrainConfig, seeds: Sequence[int], folder: pathlib.Path) -> Row:
    """The results of an algorithm's cells in a folder."""
    paths = {seed: workdir(folder, name, seed) for seed in seeds}
    finished = {seed: path for seed, path in paths.items() if is_finished(path, recipe)}
    outcomes = {seed: read_outcome(path, recipe) for seed, path in finished.items()}
    missing = tuple(seed for seed in seeds if seed not in finished)
    return Row(name, _family(recipe.algorithm), outcomes, missing)


def _family(algorithm: Algorithm) -> str:
    """The group of methods under which an algorithm is shown."""
    if algorithm.objective == "transitions":
        return "policy gradients"
    return "preference" if algorithm.ranks else "forward process"


def read_outcome(path: pathlib.Path, recipe: TrainConfig) -> Outcome:
    """The result of a finished cell, from its metrics."""
    lines = read_metrics(path / "metrics.jsonl")
    images = step_images(recipe)
    seconds = [images / line["images_per_second"] if line["step"] else 0.0 for line in lines]
    until = dict(zip((line["step"] for line in lines), itertools.accumulate(seconds), strict=True))
    # A run that first ended earlier was also evaluated there.
    points = tuple(
        Point(step * images, until[step], reward)
        for step, reward in held_out(lines).items()
        if step % recipe.evaluation.every == 0 or step == recipe.steps
    )
    return Outcome(points, *cost(path))
