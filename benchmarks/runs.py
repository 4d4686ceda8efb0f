"""Real runs over a few seeds, each in a separate workdir, so that a stopped benchmark can continue."""

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
# Fields that a user may change when a run continues, but that must not differ within a comparison.
MAY_DIFFER = tuple(field for field in MAY_CHANGE if field not in TURNED)


class Cost(NamedTuple):
    """Cost of a run so far, including compilation and evaluations, without calls that were killed."""

    seconds: float
    cpu_seconds: float  # of this process and its reward processes


def workdir(folder: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """Returns the workdir of a run."""
    return folder / f"{name}-{seed}"


def check_seeds(seeds: int) -> None:
    """Raises ConfigError if there are too few seeds for a standard error."""
    if seeds < 2:
        raise ConfigError(f"seeds must be at least 2 for a standard error, not {seeds}")


def train_runs(
    configs: Mapping[str, TrainConfig],
    seeds: Sequence[int],
    folder: pathlib.Path,
    only: Collection[str] = (),
) -> int | None:
    """Trains the unfinished runs, seed by seed, so that an early stop leaves some results for each name.

    Args:
      configs: Configs by name.
      seeds: Seeds from which each config is trained.
      folder: Folder for a workdir per run.
      only: Names to train now; empty means all.

    Returns:
      None if all are finished, or the exit code if a signal stopped a run.

    Raises:
      ConfigError: a workdir has a run of another config or more steps, or another process uses it. Nothing is trained.
    """
    runs = [(workdir(folder, name, seed), name, seed) for seed in seeds for name in configs]
    for path, name, seed in runs:
        config = dataclasses.replace(configs[name], seed=seed)
        if path.is_dir():
            claim_workdir(path, config.as_json(), MAY_DIFFER).close()
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
        if is_finished(path, configs[name]):
            print("finished before")
            continue
        last, before, start = cost(path), os.times(), time.perf_counter()
        code = train(dataclasses.replace(configs[name], seed=seed), path)
        seconds = last.seconds + time.perf_counter() - start
        # User and system time of this process and of its finished children.
        cpu_seconds = last.cpu_seconds + sum(os.times()[:4]) - sum(before[:4])
        (path / "cost.json").write_text(json.dumps(Cost(seconds, cpu_seconds)._asdict()) + "\n")
        if code is not None:
            return code
    return None


def is_finished(path: pathlib.Path, config: TrainConfig) -> bool:
    """Returns whether the run in a workdir has done all its steps."""
    return finished_step(path) == config.steps


def held_out(lines: Collection[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the held-out reward by number of steps, from a run's metrics."""
    return {line["step"]: line[REWARD] for line in lines if REWARD in line}


def cost(path: pathlib.Path) -> Cost:
    """Returns the cost of the run in a workdir so far."""
    file = path / "cost.json"
    return Cost(**json.loads(file.read_text())) if file.exists() else Cost(0.0, 0.0)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error, by the sample's deviation."""
    return fmean(values), stdev(values) / math.sqrt(len(values))
