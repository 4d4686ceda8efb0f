"""Random faults in a real run of several processes, at random moments, against the same run without any.

The run trains by what is nearly plain gradient descent, with a smooth reward, so that rounding stays rounding.
"""

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from digen_jax.benchmark import witness
from digen_jax.benchmark.equality import metrics_off, tuned, update_off
from digen_jax.benchmark.fault_injection import ENDLESS, WORKERS, Fault, FaultInjection
from digen_jax.benchmark.job import Job, Wrong
from digen_jax.errors import ConfigError, check_positive

TOLERANCE = 1e-3  # of metrics and of the whole update
# The run, unless the command line says otherwise.
SMALL = {
    "batch.groups": 2,
    "batch.images": 4,
    "sampler.fragment": 2,
    "sampler.steps": 4,
    "rewards": ("digen_jax.benchmark.kills:brightness",),
    "reward_pool.processes": 1,
    "trainer.micro_batch": 2,
    "trainer.learning_rate": 0.03,
    "trainer.decay": 0,
    "trainer.eps": 1.0,
    "trainer.clip_norm": 1e3,
    "runtime.tag_fragments": 4,
    "evaluation.images": 4,
    "evaluation.batch": 4,
    "evaluation.every": ENDLESS,
    "pictures.every": ENDLESS,
    "pictures.images": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
}
PLACED = {
    "placement.sizes": "given",
    "placement.rollout.data": 1,
    "placement.rollout.fsdp": 1,
    "placement.rollout.workers": WORKERS,
    "placement.trainer.data": 1,
    "placement.trainer.fsdp": 1,
}
# The run without faults.
ALONE = {"placement.rollout.data": 0, "placement.cpu_devices": 1}


def brightness(images: Any, prompts: list[str], metadata: list[dict]) -> Any:
    """A reward that changes little where images do."""
    return images.mean(tuple(range(1, images.ndim)), dtype=np.float64) / 255


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All faults, and what was found at the end."""

    faults: tuple[Fault, ...]
    seconds: float
    steps: int
    metrics: float  # see `equality.metrics_off`
    update: float  # see `equality.update_off`
    taken: int  # weights by meshes
    starts: int  # of processes
    memory: dict[str, int]  # largest bytes of the leader and of a rollout process

    def describe(self) -> str:
        """The table, and sentences on the rest."""
        kinds = sorted({fault.kind for fault in self.faults})
        head = f"{'fault':<44}{'times':>6}{'goes on after':>20}{'whole after':>20}"
        rows = [head, f"{'':<50}{'median, longest s':>20}{'median, longest s':>20}"]
        for kind in kinds:
            its = [fault for fault in self.faults if fault.kind == kind]
            cells = [_spread([getattr(f, name) for f in its]) for name in ("went_on", "whole")]
            rows.append(f"{kind:<44}{len(its):>6}{cells[0]:>20}{cells[1]:>20}")
        ended = [fault.ended for fault in self.faults if fault.ended is not None]
        sentences = [
            f"{len(self.faults)} faults in {self.steps} steps and {self.seconds:.0f} s; {self.starts} processes were "
            "started, and none was left.",
            f"Every step once and in order; metrics within {self.metrics:.1e}, the whole update within "
            f"{self.update:.1e} of a run without faults in one process.",
            f"Meshes took weights {self.taken} times, each time the bits of a published version.",
            *(f"{name}: at most {size / 2**20:.0f} MiB." for name, size in self.memory.items()),
        ]
        if ended:
            sentences.append(
                f"Without the leader all processes had ended after at most {max(ended):.1f} s."
            )
        return "\n".join([*rows, *sentences])

    def record(self) -> dict[str, Any]:
        """All numbers, for a JSON file."""
        return dataclasses.asdict(self)


def _spread(seconds: list[float | None]) -> str:
    found = [one for one in seconds if one is not None]
    return f"{statistics.median(found):.1f}, {max(found):.1f}" if found else "-"


def compare(
    config: str,
    overrides: Mapping[str, Any],
    workdir: pathlib.Path,
    kills: int,
    seed: int,
    watched: Callable[[range], Iterator[int]] = iter,
    told: Callable[[str], None] = print,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a job with faults, and the same in one process without.

    Args:
      config: a configs/*.py file.
      overrides: of its fields, by their names; they go before `SMALL`.
      workdir: a folder that is not there yet.
      kills: the number of faults.
      seed: of the draws of faults and moments.
      watched: shows progress over the faults.
      told: a line at every fault.
      environment: variables of the processes in addition.

    Raises:
      ConfigError: what was asked for cannot work.
      Wrong: a fault had a consequence that it must not have.
    """
    check(workdir, kills)
    fields = SMALL | {**overrides} | PLACED
    options = [f"--config={config}", *map(_option, fields, fields.values())]
    begin = time.monotonic()
    notes = workdir / "weights"
    notes.mkdir(parents=True)
    variables = {**(environment or {}), witness.FOLDER: str(notes.absolute())}
    command = ["-m", witness.__name__, *options, f"--workdir={workdir / 'faults'}"]
    with closing(Job(command, workdir / "said", WORKERS, variables)) as job:
        run = FaultInjection(job, workdir / "faults", seed, told)
        run.begin()
        for _ in watched(range(kills)):
            run.next()
        done = run.conclude()
    options += map(_option, ALONE, ALONE.values())
    alone = Alone(options, workdir / "unbroken", variables)
    start = alone.run(1)
    expected = alone.run(done)
    update = update_off(tuned(workdir / "faults"), expected, start)
    metrics = metrics_off(workdir / "faults", workdir / "unbroken")
    taken, wrong = witness.torn(notes)
    if wrong or not taken:
        raise Wrong(f"of {taken} weights that meshes took these were never published: {wrong}")
    if not max(metrics, update) < TOLERANCE:
        raise Wrong(
            f"the run is another one than without faults: metrics differ by {metrics:.1e}, updates by {update:.1e}"
        )
    seconds = time.monotonic() - begin
    of = tuple(run.faults)
    return Outcome(of, seconds, done, metrics, update, taken, len(job.all), run.memory)


def _option(field: str, value: Any) -> str:
    return f"--config.{field}={value}"


def check(workdir: pathlib.Path, kills: int) -> None:
    """Raises ConfigError where the processes cannot be watched, the folder is there, or nothing is to happen."""
    check_positive("--kills", kills)
    if sys.platform != "linux":
        raise ConfigError("faults need Linux, whose /proc tells which processes are left")
    if workdir.exists():
        raise ConfigError(f"--workdir={workdir} exists: give a new folder, or delete it")


class Alone:
    """The same run without faults, in one process that samples and trains in turn."""

    def __init__(self, options: list[str], workdir: pathlib.Path, environment: Mapping[str, str]):
        script = [sys.executable, "-m", witness.__name__, *options, f"--workdir={workdir}"]
        self._command, self._workdir = script, workdir
        self._environment = os.environ | environment

    def run(self, count: int) -> dict[str, np.ndarray]:
        """Runs up to so many steps; returns what is tuned.

        Raises:
          Wrong: it fails.
        """
        with (self._workdir.with_suffix(".txt")).open("a") as out:
            done = subprocess.run(
                [*self._command, f"--config.steps={count}"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            raise Wrong(f"the run without faults ends with {done.returncode}: see {out.name}")
        return tuned(self._workdir)
