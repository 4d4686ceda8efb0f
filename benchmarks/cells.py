"""Real runs over a few seeds, each a cell with a workdir of its own, so that they continue where they were stopped."""

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from digen_jax.config.train_config import MAY_CHANGE, TURNED, TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.logging.workdir import claim_workdir, finished_step
from digen_jax.train import train

REWARD = "evaluation/reward"
# Fields that a user may change within a run, but not within a cell.
SAME_CELL = tuple(field for field in MAY_CHANGE if field not in TURNED)


class Cost(NamedTuple):
    """The cost of a cell so far, compilation and evaluations included.

    A call that was killed, and not stopped by a signal that it could handle, is not counted.
    """

    seconds: float
    cpu_seconds: float  # of this process and of its reward processes


def workdir(folder: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """The workdir of a cell."""
    return folder / f"{name}-{seed}"


def check_seeds(seeds: int) -> None:
    """Raises ConfigError for too few seeds for a standard error."""
    if seeds < 2:
        raise ConfigError(f"seeds must be at least 2 for a standard error, not {seeds}")


def check_workdirs(
    recipes: Mapping[str, TrainConfig], seeds: Sequence[int], folder: pathlib.Path
) -> None:
    """Refuses cells that were begun with another config, before any is trained.

    Args:
      recipes: by the names of the cells.
      seeds: of the cells of each.
      folder: holds their workdirs.

    Raises:
      ConfigError: names the workdir, and the fields that differ; or another process has it.
    """
    for name, recipe in recipes.items():
        for seed in seeds:
            path = workdir(folder, name, seed)
            if path.is_dir():
                cell = with_seed(recipe, seed).as_json()
                claim_workdir(path, cell, SAME_CELL).close()
            if (finished_step(path) or 0) > recipe.steps:
                raise ConfigError(
                    f"config.steps = {recipe.steps}, but the run in {path} has done {finished_step(path)} "
                    f"steps: give as many, or choose another workdir"
                )


def train_cells(
    recipes: Mapping[str, TrainConfig], seeds: Sequence[int], folder: pathlib.Path
) -> int | None:
    """Trains the unfinished cells, seed by seed, so that an early stop leaves some results for each name.

    Args:
      recipes: by the names of the cells.
      seeds: each recipe is trained from each of them.
      folder: gets a workdir for every cell.

    Returns:
      None if all are finished; the exit code where a signal stopped one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for name, recipe in recipes.items():
            path = workdir(folder, name, seed)
            print(f"\n{name}, seed {seed}: {path}", flush=True)
            if is_finished(path, recipe):
                print("finished before")
                continue
            code = _train_timed(with_seed(recipe, seed), path)
            if code is not None:
                return code
    return None


def with_seed(recipe: TrainConfig, seed: int) -> TrainConfig:
    """A recipe with another seed."""
    return dataclasses.replace(recipe, seed=seed)


def is_finished(path: pathlib.Path, recipe: TrainConfig) -> bool:
    """Whether the cell in a workdir has done all its steps."""
    return finished_step(path) == recipe.steps


def held_out(lines: Collection[Mapping[str, Any]]) -> dict[int, float]:
    """Reward on the held-out prompts by the steps done, from a run's metrics."""
    return {line["step"]: line[REWARD] for line in lines if REWARD in line}


def cost(path: pathlib.Path) -> Cost:
    """The cost of the cell in a workdir so far."""
    file = path / "cost.json"
    return Cost(**json.loads(file.read_text())) if file.exists() else Cost(0.0, 0.0)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, by the sample's deviation."""
    return fmean(values), stdev(values) / math.sqrt(len(values))


def _train_timed(recipe: TrainConfig, path: pathlib.Path) -> int | None:
    """As `train`; adds to the workdir's cost."""
    before, began = os.times(), time.perf_counter()
    code = train(recipe, path)
    after, seconds = os.times(), time.perf_counter() - began
    # User and system time, of the process itself and of its children that have ended.
    spent = sum(after[:4]) - sum(before[:4])
    last = cost(path)
    total = Cost(last.seconds + seconds, last.cpu_seconds + spent)
    (path / "cost.json").write_text(json.dumps(total._asdict()) + "\n")
    return code
