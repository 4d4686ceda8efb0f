"""What a report needs of a run's workdir, which is only read; the run may still go on."""

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from digen_jax.data.prompt_files import prompts_label
from digen_jax.errors import ConfigError
from digen_jax.files import parse_json, without_torn_line
from digen_jax.logging.evaluation import saved_images
from digen_jax.logging.metrics import CLOCK, read_metrics

EVALUATION = "evaluation/"
# After "evaluation/", what is no task's reward.
NO_TASK = ("reward", "reward_of/", "images/")
# What a report shows of a record of a start: see `records.environment`.
START = {"command": list, "time": str, "done": int, "devices": dict, "changes": list}
START |= {"python": str, "packages": dict, "commit": str | None}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its workdir shows it."""

    workdir: pathlib.Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # a record for each step that has one
    starts: list[dict[str, Any]]  # a record for each start, the first one first
    finished: bool

    @property
    def step(self) -> int:
        """The last step with metrics; an evaluation of an older one may be recorded after it."""
        return max(line["step"] for line in self.metrics)

    @property
    def seconds(self) -> float:
        """Seconds from the first line of metrics to the last, with the pauses between starts."""
        return self.metrics[-1][CLOCK] - self.metrics[0][CLOCK]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records that have an evaluation."""
        return [line for line in self.metrics if f"{EVALUATION}reward" in line]

    @property
    def tasks(self) -> list[str]:
        """The tasks of the evaluation's prompts, in their order."""
        names = [name for line in self.evaluations for name in line if name.startswith(EVALUATION)]
        tags = dict.fromkeys(name.removeprefix(EVALUATION) for name in names)
        return [tag for tag in tags if tag != NO_TASK[0] and not tag.startswith(NO_TASK[1:])]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each score that has one, by the name in its metrics."""
        found = {}
        for one in self.config.get("rewards", ()):
            # Runs of older versions have no labels.
            title, weight = one.get("label") or one["name"], one["weight"]
            several = weight if isinstance(weight, dict) else {"": weight}
            found |= {f"{title}/{entry}".rstrip("/"): factor for entry, factor in several.items()}
        return found

    @property
    def trained(self) -> set[str]:
        """The names of the rewards whose weight is not 0."""
        return {name for name, weight in self.weights.items() if weight}

    @property
    def command(self) -> str:
        """What starts this run from its beginning, in a shell; "" where no start is recorded."""
        return "python " + shlex.join(self.starts[0]["command"]) if self.starts else ""

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """(the steps that have a metric, its values)."""
        points = [(line["step"], line[metric]) for line in self.metrics if metric in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.asarray(steps, int), np.asarray(values, float)

    def evaluated(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
        """The images of the first evaluation and of the newest one; None before there are two."""
        found = [saved_images(self.workdir / "pictures" / f"{w}.npz") for w in ("before", "after")]
        return None if None in found else tuple(found)

    def prompts(self, images: dict[str, np.ndarray]) -> list[str]:
        """The prompts of an evaluation's images; of a run of an older version, their numbers."""
        numbers = [f"prompt {number}" for number in range(1, len(images["images"]) + 1)]
        return [str(one) for one in images.get("prompts", numbers)]


def read_run(workdir: pathlib.Path) -> Run:
    """Reads a run.

    Raises:
      ConfigError: there is no run, it has recorded nothing yet, or one of its files cannot be read.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"there is no run in {workdir}, as it has no config.json: give --workdir the workdir of launch/train.py"
        )
    try:
        config = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): bring back a copy of it") from error
    log = workdir / "metrics.jsonl"
    metrics = read_metrics(log) if log.is_file() else []
    if not metrics:
        raise ConfigError(
            f"the run in {workdir} has recorded nothing yet: wait until its first evaluation or step is done"
        )
    last = max(line["step"] for line in metrics)
    finished = _finished_step(workdir / "finished.json") == last
    run = Run(workdir, config, metrics, _starts(workdir / "starts.jsonl"), finished)
    _check_config(run)
    return run


def _finished_step(path: pathlib.Path) -> int | None:
    """The step after which a run was finished, of which there may be more now; None where it was not."""
    try:
        return parse_json(path.read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _starts(path: pathlib.Path) -> list[dict[str, Any]]:
    """The recorded starts, without a line that a kill cut off."""
    try:
        lines = without_torn_line(path.read_bytes()).splitlines()
        return [_start(number, line) for number, line in enumerate(lines, start=1)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): bring back a copy of it, or delete it"
        ) from error


def _start(number: int, line: bytes) -> dict[str, Any]:
    """The record of a start in a line; ValueError if a user's change left no such record."""
    start = parse_json(line)
    if not isinstance(start, dict):
        raise ValueError(f"line {number} is no object")
    for name, kind in START.items():
        if not isinstance(start.get(name), kind):
            raise ValueError(f"line {number} has no {name} such as `note_start` writes")
    if not all(isinstance(one, str) for one in start["command"] + start["changes"]):
        raise ValueError(f"line {number} has a command or changes that are not texts")
    return start


def _check_config(run: Run) -> None:
    """Raises ConfigError if fields that a report shows are missing from a run's config."""
    try:
        given = run.config["model"]["folder"], run.config["algorithm"]["name"], run.config["steps"]
        if [type(one) for one in given] != [str, str, int]:
            raise TypeError(given)
        sum(run.weights.values())
        evaluated_prompts([run])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{run.workdir / 'config.json'} is no run's config ({error!r}): bring back a copy of it"
        ) from error


def evaluated_prompts(runs: Sequence[Run]) -> str:
    """The label of the evaluations' prompts: see `prompts_label`; a neutral one where runs differ."""

    def label(config: dict[str, Any]) -> str:
        prompts = config.get("prompts", {})
        training = prompts.get("files") or [prompts.get("file", "")]
        return prompts_label(training, config.get("evaluation", {}).get("prompts", ""))

    labels = {label(run.config) for run in runs}
    return labels.pop() if len(labels) == 1 else "evaluation prompts"


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The fields in which the configs of several runs differ, with each run's value."""
    each = [dict(_leaves(run.config)) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    shown = {name: [json.dumps(one.get(name)) for one in each] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def _leaves(config: Any, name: str = "config") -> list[tuple[str, Any]]:
    if not isinstance(config, dict):
        return [(name, config)]
    return [leaf for key, value in config.items() for leaf in _leaves(value, f"{name}.{key}")]
