"""Random faults at random moments of a run with rollout workers on Ray, compared with a run of one process without.

The run trains by what is nearly plain gradient descent, with a smooth reward, so that rounding errors stay small.
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

from digen_jax.benchmark import kills_train
from digen_jax.benchmark.equality import metrics_off, tuned, update_off
from digen_jax.benchmark.fault_injection import ENDLESS, WORKERS, Fault, FaultInjection
from digen_jax.benchmark.job import Job, Wrong
from digen_jax.errors import ConfigError, check_positive

TOLERANCE = 1e-3  # of metrics and of the full update
# The run, unless the command line says otherwise.
SMALL = {
    "batch.groups": 2,
    "batch.images": 4,
    "sampler.fragment": 2,
    "sampler.steps": 4,
    "rewards": (f"{kills_train.__name__}:brightness",),
    "reward_pool.processes": 1,
    "trainer.micro_batch": 2,
    "trainer.learning_rate": 0.03,
    "trainer.decay": 0,
    "trainer.eps": 1.0,
    "trainer.clip_norm": 1e3,
    "runtime.tag_fragments": 4,
    "runtime.staleness": 0,
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
ONE_PROCESS = {"placement.rollout.data": 0, "placement.cpu_devices": 1}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All faults, and the comparison at the end.

    Attributes:
      metrics: see `equality.metrics_off`; None if the run is asynchronous, so that no other run has its metrics.
      update: see `equality.update_off`; None likewise.
      received: how often workers received weights.
      starts: of the command.
      memory: the largest bytes of each kind of process.
    """

    faults: tuple[Fault, ...]
    seconds: float
    steps: int
    metrics: float | None
    update: float | None
    received: int
    starts: int
    memory: dict[str, int]

    def describe(self) -> str:
        """A table with a row for each kind of fault, and the other numbers."""
        head = f"{'fault':<28}{'times':>6}{'continues after':>20}{'workers ready after':>22}{'all ended after':>20}"
        rows = [head, f"{'':<34}{'median, longest s':>20}{'median, longest s':>22}{'s':>20}"]
        for kind in sorted({fault.kind for fault in self.faults}):
            found = [fault for fault in self.faults if fault.kind == kind]
            cells = [
                _spread([getattr(fault, field) for fault in found])
                for field in ("continued", "recovered", "ended")
            ]
            rows.append(f"{kind:<28}{len(found):>6}{cells[0]:>20}{cells[1]:>22}{cells[2]:>20}")
        compared = "Metrics and parameters are not compared, because the run is asynchronous."
        if self.metrics is not None:
            compared = (
                f"Compared with a run of one process without faults, metrics differ by at most {self.metrics:.1e} and "
                f"the full update by {self.update:.1e}."
            )
        memory = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in self.memory.items())
        return "\n".join(
            [
                *rows,
                f"{len(self.faults)} faults in {self.steps} steps and {self.seconds:.0f} s; the command was started "
                f"{self.starts} times, and no process was left.",
                f"The metrics have every step once and in order. {compared}",
                f"Workers received weights {self.received} times, each time the bits of a published version.",
                f"Largest processes: {memory}.",
            ]
        )

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
    report: Callable[[str], None] = print,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a job with faults, and the same in one process without.

    Args:
      config: a configs/*.py file.
      overrides: of its fields, by their names; they take precedence over `SMALL`.
      workdir: a folder that does not exist yet.
      kills: the number of faults.
      seed: of the random choices of faults and moments.
      watched: shows progress over the faults.
      report: called with a line after every fault.
      environment: variables of the processes in addition.

    Raises:
      ConfigError: an argument is invalid.
      Wrong: a fault had a consequence that it must not have.
    """
    check(workdir, kills)
    fields = SMALL | {**overrides} | PLACED
    options = [f"--config={config}", *_options(fields)]
    begin = time.monotonic()
    hashes = workdir / "weights"
    hashes.mkdir(parents=True)
    variables = {**(environment or {}), kills_train.FOLDER: str(hashes.absolute())}
    faulty = workdir / "faults"
    command = ["-m", kills_train.__name__, *options, f"--workdir={faulty}", "--ray=local"]
    with closing(Job(command, faulty, workdir / "output", variables)) as job:
        run = FaultInjection(job, faulty, seed, report)
        run.begin()
        for _ in watched(range(kills)):
            run.next()
        steps = run.conclude()
    received, wrong = kills_train.compare_hashes(hashes)
    if wrong or not received:
        raise Wrong(
            f"of {received} received versions of weights these were never published: {wrong}"
        )
    metrics = update = None
    if not fields["runtime.staleness"]:
        one = OneProcess([*options, *_options(ONE_PROCESS)], workdir / "one_process", variables)
        start, expected = one.run(1), one.run(steps)
        update = update_off(tuned(faulty), expected, start)
        metrics = metrics_off(faulty, workdir / "one_process")
        if not max(metrics, update) < TOLERANCE:
            raise Wrong(
                f"the run differs from one without faults: metrics by {metrics:.1e}, the full update by {update:.1e}"
            )
    seconds = time.monotonic() - begin
    return Outcome(
        tuple(run.faults), seconds, steps, metrics, update, received, job.starts, run.memory
    )


def _options(fields: Mapping[str, Any]) -> list[str]:
    return [f"--config.{field}={value}" for field, value in fields.items()]


def check(workdir: pathlib.Path, kills: int) -> None:
    """Raises ConfigError if an argument of `compare` is invalid, or this is not Linux."""
    check_positive("--kills", kills)
    if sys.platform != "linux":
        raise ConfigError("the benchmark of faults needs Linux, for its /proc")
    if workdir.exists():
        raise ConfigError(f"--workdir={workdir} exists: give a new folder, or delete it")


class OneProcess:
    """The same run without faults, in one process that samples and trains in turn."""

    def __init__(self, options: list[str], workdir: pathlib.Path, environment: Mapping[str, str]):
        script = [sys.executable, "-m", kills_train.__name__]
        self._command, self._workdir = [*script, *options, f"--workdir={workdir}"], workdir
        self._environment = os.environ | environment

    def run(self, count: int) -> dict[str, np.ndarray]:
        """Continues up to step `count`; returns the tuned parameters.

        Raises:
          Wrong: it fails.
        """
        with self._workdir.with_suffix(".txt").open("a") as out:
            done = subprocess.run(
                [*self._command, f"--config.steps={count}"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            raise Wrong(f"the run without faults ended with {done.returncode}: see {out.name}")
        return tuned(self._workdir)
