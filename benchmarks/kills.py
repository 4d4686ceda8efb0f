"""Random faults at random moments of a run with workers on Ray, compared with a run of one process without.

The run trains by what is nearly plain gradient descent, with a smooth reward, so that rounding errors stay small.
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from benchmarks import kills_train
from benchmarks.equality import metrics_off, tuned, update_off
from benchmarks.fault_injection import (
    ENDLESS,
    ROLLOUT_WORKERS,
    TRAINING_WORKERS,
    Fault,
    FaultInjection,
)
from benchmarks.job import Job, Wrong
from digen_jax.errors import ConfigError, check_positive
from digen_jax.process.terminal import track

TOLERANCE = 1e-3  # of metrics and of the full update
ONE_PROCESS = 3600.0  # seconds for the run without faults
# The run, unless the command line says otherwise.
SMALL = f"""
batch.groups=2 batch.images=4 sampler.chunk=2 sampler.steps=4
rewards=('{kills_train.__name__}:brightness',) reward_pool.processes=1
trainer.micro_batch=2 trainer.learning_rate=0.03 trainer.decay=0 trainer.eps=1.0 trainer.clip_norm=1e3
placement.trainer.samples=True runtime.max_policy_lag=0 checkpoint.every=1 checkpoint.keep=2
evaluation.images=4 evaluation.batch=4 evaluation.every={ENDLESS} images.count=2 images.every={ENDLESS}
"""
PLACED = f"""
placement.mode=given placement.rollout.data=1 placement.rollout.fsdp=1 placement.rollout.workers={ROLLOUT_WORKERS}
placement.trainer.data=1 placement.trainer.fsdp=1 placement.trainer.workers={TRAINING_WORKERS}
"""
WITHOUT_WORKERS = "placement.rollout.data=0 placement.trainer.workers=1 placement.cpu_devices=1"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All faults, and the comparison at the end.

    Attributes:
      metrics: see `equality.metrics_off`; None if the run is asynchronous, so that no other run has its metrics.
      update: see `equality.update_off`; None likewise.
      received: how often workers received weights.
      starts: of the command.
    """

    faults: tuple[Fault, ...]
    seconds: float
    steps: int
    metrics: float | None
    update: float | None
    received: int
    starts: int

    def describe(self) -> str:
        """A table with a row for each kind of fault, and the other numbers."""
        columns = "continued", "recovered", "ended"
        rows = [
            f"{'seconds: median, longest':<28}{'times':>6}" + "".join(f"{c:>15}" for c in columns)
        ]
        for kind in sorted({fault.kind for fault in self.faults}):
            found = [fault for fault in self.faults if fault.kind == kind]
            cells = (_spread([getattr(one, column) for one in found]) for column in columns)
            rows.append(f"{kind:<28}{len(found):>6}" + "".join(f"{cell:>15}" for cell in cells))
        compared = "An asynchronous run is not compared with another one."
        if self.metrics is not None:
            compared = (
                f"Metrics differ by at most {self.metrics:.1e} from a run of one process without faults, the full "
                f"update by {self.update:.1e}."
            )
        return "\n".join(rows) + (
            f"\n{len(self.faults)} faults in {self.steps} steps and {self.seconds:.0f} s; the command was started "
            f"{self.starts} times, and no process was left.\n"
            f"The metrics have every step once and in order. {compared}\n"
            f"Workers received weights {self.received} times, each time the bits of a published version."
        )


def _spread(seconds: list[float | None]) -> str:
    found = [one for one in seconds if one is not None]
    return f"{statistics.median(found):.1f}, {max(found):.1f}" if found else "-"


def compare(
    config: str, overrides: Mapping[str, Any], workdir: pathlib.Path, kills: int, seed: int
) -> Outcome:
    """Runs a job with faults, and the same in one process without; prints a line after every fault.

    Args:
      config: a configs/*.py file.
      overrides: of its fields, by their names; they take precedence over `SMALL`.
      workdir: a folder that does not exist yet.
      kills: the number of faults.
      seed: of the random choices of faults and moments.

    Raises:
      ConfigError: an argument is invalid, or this is not Linux.
      Wrong: a fault had a consequence that it must not have.
    """
    check_positive("--kills", kills)
    if sys.platform != "linux":
        raise ConfigError("the benchmark of faults needs Linux, for its /proc")
    if workdir.exists():
        raise ConfigError(f"--workdir={workdir} exists: give a new folder, or delete it")
    begin = time.monotonic()
    hashes, faulty, alone = workdir / "weights", workdir / "faults", workdir / "one_process"
    hashes.mkdir(parents=True)
    fields = [*SMALL.split(), *(f"{name}={value}" for name, value in overrides.items())]
    command = [kills_train.__file__, f"--config={config}", *_options(fields)]
    command += _options(PLACED.split())
    variables = {kills_train.FOLDER: str(hashes.absolute())}
    with closing(Job([*command, "--ray=local"], faulty, variables)) as job:
        run = FaultInjection(job, seed)
        run.begin()
        for _ in track(range(kills), "kills", "fault"):
            run.next()
        steps = run.conclude()
    received, wrong = kills_train.compare_hashes(hashes)
    if wrong or not received:
        raise Wrong(f"of {received} received weights these were never published: {wrong}")
    metrics = update = None
    if not int(overrides.get("runtime.max_policy_lag", 0)):
        with closing(Job([*command, *_options(WITHOUT_WORKERS.split())], alone, variables)) as one:
            found = []
            for count in (1, steps):
                one.start(f"--config.steps={count}")
                one.ends(0, ONE_PROCESS)
                found.append(tuned(alone))
        update = update_off(tuned(faulty), expected=found[1], start=found[0])
        metrics = metrics_off(faulty, alone)
        if not max(metrics, update) < TOLERANCE:
            raise Wrong(
                f"the run differs from one without faults: metrics by {metrics:.1e}, the full update by {update:.1e}"
            )
    seconds = time.monotonic() - begin
    return Outcome(tuple(run.faults), seconds, steps, metrics, update, received, job.starts)


def _options(fields: list[str]) -> list[str]:
    return [f"--config.{field}" for field in fields]
