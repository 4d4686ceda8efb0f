"""Random faults at random times in a run with workers on Ray, compared with a run of one process without faults.

The run trains by nearly plain gradient descent with a smooth reward, so that rounding errors stay small.
"""

import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Shaped

from benchmarks import kills_train
from benchmarks.fault_injection import (
    ENDLESS,
    ROLLOUT_WORKERS,
    TRAINING_WORKERS,
    Fault,
    FaultInjection,
    Job,
    Unexpected,
    metric_lines,
)
from digen_jax.checkpoints.checkpointer import newest_complete
from digen_jax.errors import ConfigError, check_positive
from digen_jax.logging.metrics import without_timing
from digen_jax.process.terminal import track

TOLERANCE = 1e-3  # of metrics and of the full update
ONE_PROCESS = 3600.0  # timeout in seconds for the run without faults
CHANCE = ("assisted",)  # metrics that depend on which worker was idle
# Overrides of the run; the command line takes precedence.
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
class FaultOutcome:
    """Faults of a run, and the comparison at its end.

    Attributes:
      metrics: See `metrics_difference`. None means an asynchronous run, whose metrics no other run has.
      update: See `update_difference`. None means an asynchronous run.
      received: Number of times that workers received weights.
      starts: Number of starts of the command.
    """

    faults: tuple[Fault, ...]
    seconds: float
    steps: int
    metrics: float | None
    update: float | None
    received: int
    starts: int

    def describe(self) -> str:
        """Returns a table with a row per kind of fault, and the other numbers."""
        columns = "continued", "recovered", "ended"
        rows = [
            f"{'seconds: median, longest':<28}{'times':>6}" + "".join(f"{c:>15}" for c in columns)
        ]
        for kind in sorted({fault.kind for fault in self.faults}):
            found = [fault for fault in self.faults if fault.kind == kind]
            cells = ""
            for column in columns:
                times = [s for one in found if (s := getattr(one, column)) is not None]
                cell = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "-"
                cells += f"{cell:>15}"
            rows.append(f"{kind:<28}{len(found):>6}{cells}")
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
            f"Workers received weights {self.received} times, each time the bits of a version that was sent."
        )


def compare(
    config: str, overrides: Mapping[str, Any], workdir: pathlib.Path, kills: int, seed: int
) -> FaultOutcome:
    """Runs a job with faults, and the same job in one process without; prints a line after every fault.

    Args:
      config: Path of a configs/*.py file.
      overrides: Config values by field name; they take precedence over `SMALL`.
      workdir: Folder that does not exist yet.
      kills: Number of faults.
      seed: Seed of the random choices of faults and times.

    Raises:
      ConfigError: an argument is invalid, or this is not Linux.
      Unexpected: a fault had an unexpected consequence.
    """
    check_positive("--kills", kills)
    if sys.platform != "linux":
        raise ConfigError("the benchmark of faults needs Linux, for its /proc")
    if workdir.exists():
        raise ConfigError(f"--workdir={workdir} exists: give a new folder, or delete it")
    start = time.monotonic()
    hashes, faulty, alone = workdir / "weights", workdir / "faults", workdir / "one_process"
    hashes.mkdir(parents=True)
    fields = [*SMALL.split(), *(f"{name}={value}" for name, value in overrides.items())]
    command = [kills_train.__file__, f"--config={config}", *_options(fields + PLACED.split())]
    variables = {kills_train.FOLDER: str(hashes.absolute())}
    with closing(Job([*command, "--ray=local"], faulty, variables)) as job:
        run = FaultInjection(job, seed)
        run.start()
        for _ in track(range(kills), "kills", "fault"):
            run.next()
        steps = run.finish()
    received, wrong = kills_train.compare_hashes(hashes)
    if wrong or not received:
        raise Unexpected(f"of {received} received weights these were never sent: {wrong}")
    metrics = update = None
    if not int(overrides.get("runtime.max_policy_lag", 0)):
        with closing(Job([*command, *_options(WITHOUT_WORKERS.split())], alone, variables)) as one:
            found = []
            for count in (1, steps):
                one.start(f"--config.steps={count}")
                one.wait_for_end(0, ONE_PROCESS)
                found.append(trained_parameters(alone))
        update = update_difference(trained_parameters(faulty), expected=found[1], start=found[0])
        metrics = metrics_difference(faulty, alone)
        if not max(metrics, update) < TOLERANCE:
            raise Unexpected(
                f"the run differs from one without faults: metrics by {metrics:.1e}, the full update by {update:.1e}"
            )
    seconds = time.monotonic() - start
    return FaultOutcome(tuple(run.faults), seconds, steps, metrics, update, received, job.starts)


def _options(fields: list[str]) -> list[str]:
    return [f"--config.{field}" for field in fields]


def metrics_difference(workdir: pathlib.Path, other: pathlib.Path) -> float:
    """Returns the largest metric difference of two runs, relative to the metric's maximum; inf for other lines."""
    found, expected = (
        [without_timing(line) for line in metric_lines(one)] for one in (workdir, other)
    )
    if [line.keys() for line in found] != [line.keys() for line in expected]:
        return math.inf
    largest: dict[str, float] = {}
    for line in expected:
        for name, value in line.items():
            largest[name] = max(largest.get(name, 0.0), abs(value))
    differences = [
        abs(line[name] - value) / max(largest[name], 1e-3)
        for line, of in zip(found, expected, strict=True)
        for name, value in of.items()
        if name not in CHANCE
    ]
    return max(differences, default=math.inf)


def trained_parameters(workdir: pathlib.Path) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Returns the trained parameters of a run's newest checkpoint, by name."""
    folder = workdir / "checkpoints"
    step, _ = newest_complete(folder)
    arrays = folder.absolute() / str(step) / "arrays"
    with ocp.PyTreeCheckpointer() as reader:
        # Read as numpy arrays: their devices may not exist here.
        saved = {"tuned": reader.metadata(arrays).item_metadata.tree["tuned"]}
        here = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        wanted = ocp.args.PyTreeRestore(item=saved, restore_args=here, partial_restore=True)
        tree = reader.restore(arrays, args=wanted)["tuned"]
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def update_difference(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], start: dict[str, np.ndarray]
) -> float:
    """Returns the norm of the difference of two updates, relative to that of the expected one."""

    def norm(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return math.sqrt(sum(float(np.sum(np.square(one[k] - other[k]))) for k in expected))

    return norm(found, expected) / norm(expected, start)
