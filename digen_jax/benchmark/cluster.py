"""An emulated cluster: real processes that wait in place of device work, against the simulator with the same costs.

See `benchmark.linked` for the processes.
"""

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from digen_jax.benchmark import load
from digen_jax.benchmark.linked import PROMPTS, SAMPLES, WEIGHTS, driving
from digen_jax.benchmark.runtime import TimedRun, simulations, timed
from digen_jax.errors import check_choice, check_positive
from digen_jax.remote.fanout import MOST
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.settings import Costs, Settings

FRAGMENT, GROUP = 4, 8  # images
BUSY = 0.25  # the share of the cores that others may take until the machine counts as busy


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and its tactics.

    Attributes:
      name: of its row.
      speeds: of the rollout meshes.
      fragments: of a step.
      training: of a step's fragments, over their generation by all rollout meshes.
      tag: the trainer may generate.
      staleness: see `Settings`.
    """

    name: str
    speeds: tuple[float, ...]
    fragments: int
    training: float = 0.9
    tag: bool = False
    staleness: int = 0

    def costs(self, seconds: float) -> Costs:
        """Costs with which the rollout meshes generate for about so many seconds a step."""
        fragment = seconds * sum(self.speeds) / self.fragments  # at speed 1
        return Costs(
            generate=0.9 * fragment / FRAGMENT,
            decode=0.1 * fragment / FRAGMENT,
            train=self.training * seconds / self.fragments / FRAGMENT,
            deliver=0.02 * seconds / FRAGMENT,
            score=0.03 * seconds / FRAGMENT,
            encode=0.03 * seconds,
            update=0.03 * seconds,
            publish=0.06 * seconds,
            switch=0.01 * seconds,
        )

    def settings(self, steps: int) -> Settings:
        """The scheduler's, for so many steps."""
        return Settings(
            steps,
            self.fragments * FRAGMENT // GROUP,
            GROUP,
            FRAGMENT,
            staleness=self.staleness,
            tag_fragments=self.fragments if self.tag else 0,
        )

    @property
    def layout(self) -> Layout:
        """Rollout meshes of one device each, and a trainer of as many, which samples at speed 1."""
        return Layout(Mesh(len(self.speeds)), tuple(Mesh(1, speed) for speed in self.speeds))


ONE, FOUR, SIXTEEN = (1.0,), (1.0,) * 4, (1.0,) * 16
UNEQUAL = (2.0, 1.0, 1.0, 0.5)
CASES = (
    Case("1 mesh", ONE, 8),
    Case("4 meshes", FOUR, 16),
    Case("4 meshes, TAG", FOUR, 18, training=0.5, tag=True),
    Case("4 meshes, staleness 1", FOUR, 16, training=1.0, staleness=1),
    Case("4 meshes of unequal speeds", UNEQUAL, 18),
    Case("the same, TAG, staleness 1", UNEQUAL, 20, training=0.5, tag=True, staleness=1),
    Case("16 meshes", SIXTEEN, 32),
)


@dataclasses.dataclass(frozen=True)
class Emulated:
    """What became of a case.

    Attributes:
      case: its name.
      step_times: seconds of the measured steps.
      simulated: seconds of the same steps by the simulator, the mean of its runs.
      bound: seconds of a step in which all devices only generate and train, without a pause.
      tag_share, staleness: share of the fragments that the trainer generated; mean age in versions.
      leader, mesh: the share of a processor that the leader used, and a rollout mesh.
      load: what others took of the cores.
    """

    case: str
    step_times: tuple[float, ...]
    simulated: tuple[float, ...]
    bound: float
    tag_share: float
    staleness: float
    leader: float
    mesh: float
    load: load.Load

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return fmean(self.step_times)

    @property
    def simulated_seconds(self) -> float:
        """The same by the simulator."""
        return fmean(self.simulated)

    @property
    def deviation(self) -> float:
        """Of the emulated cluster from the simulator."""
        return self.step_seconds / self.simulated_seconds - 1

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the deviation to count."""
        return self.load.others + self.load.stolen > BUSY

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        return (
            self.case,
            f"{self.step_seconds:.2f}",
            f"{self.simulated_seconds:.2f}",
            f"{self.deviation:+.1%}",
            f"{self.bound / self.step_seconds:.0%}",
            f"{self.bound / self.simulated_seconds:.0%}",
            f"{self.tag_share:.0%}",
            f"{self.staleness:.2f}",
            f"{self.leader:.1%}",
            f"{self.mesh:.1%}",
            f"{self.load.others + self.load.stolen:.0%}" + (" (busy)" if self.busy else ""),
        )

    def record(self) -> dict[str, Any]:
        """The numbers as JSON values."""
        return dataclasses.asdict(self) | {
            "step_seconds": self.step_seconds,
            "simulated_seconds": self.simulated_seconds,
            "deviation": self.deviation,
            "busy": self.busy,
        }


HEAD = (
    *("", "s/step", "simulated", "deviation", "of bound", "simulated", "TAG", "age"),
    *("leader", "mesh", "others"),
)


def introduction(seconds: float, run: TimedRun) -> str:
    """A text on what is measured, and how."""
    steps = run.measured
    return (
        f"Waits in place of device work, drawn {run.jitter:.0%} around their means; processes, driver, scheduler, "
        f"control, link and rewards are real.\nThe rollout meshes of a layout, each a process, generate for "
        f"{seconds:g} s a step. Weights of {WEIGHTS // 1024} KiB, samples of {SAMPLES // 1024} and prompts of "
        f"{PROMPTS // 1024} travel.\nSteps {steps[0] + 1} to {steps[-1] + 1} are measured. Simulated: with the same "
        "costs. Leader, mesh: of a processor; others: what other processes took of all cores."
    )


def describe(found: Sequence[Emulated]) -> str:
    """A table of the cases, and the largest deviation."""
    lines = [HEAD, *(one.cells() for one in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    largest = max(found, key=lambda one: abs(one.deviation))
    return "\n".join(
        [
            *rows,
            f"The largest deviation is {largest.deviation:+.1%}, with {largest.case}.",
        ]
    )


def check(seconds: float, run: TimedRun) -> None:
    """Refuses what cannot be measured.

    Raises:
      ConfigError: names the field and what to change.
    """
    check_positive("--step_seconds", seconds)
    run.check()


def chosen(numbers: Sequence[str]) -> list[Case]:
    """The cases of these numbers, from 1 on; all where there are none.

    Raises:
      ConfigError: there is no such case.
    """
    known = {str(number): case for number, case in enumerate(CASES, start=1)}
    for number in numbers:
        check_choice("--layouts", number, tuple(known))
    return [known[number] for number in numbers or known]


def measure(
    case: Case, seconds: float, run: TimedRun, stepped: Callable[[], object] = lambda: None
) -> Emulated:
    """Runs a case in real processes and in the simulator; calls `stepped` after every step.

    Raises:
      ConfigError: the processes do not start in time.
      RuntimeError: a rollout mesh was lost.
    """
    settings, costs = case.settings(run.learn + run.steps + 1), case.costs(seconds)
    waits = run.waits(costs, settings)
    cores = os.sched_getaffinity(0)
    with driving(case.layout, waits, settings) as (driver, meshes):
        before, used = load.read(cores), _used(meshes)
        found = timed(driver, run, stepped)
        after, used = load.read(cores), (_used(meshes) - used).tolist()
        there = len(driver.executor.devices) - 1
    if there < len(case.speeds):
        raise RuntimeError(f"{len(case.speeds) - there} rollout meshes were lost: see above")
    shares = [seconds / (after.clock - before.clock) for seconds in used]
    reports = simulations(case.layout, costs, settings, run, MOST)
    return Emulated(
        case.name,
        found.step_times,
        tuple(fmean(report.step_times[n] for report in reports) for n in run.measured),
        reports[0].bound,
        found.mean("tag_share"),
        found.mean("staleness"),
        shares[0],
        fmean(shares[1:]),
        load.between(before, after, sum(used), len(cores)),
    )


def _used(meshes: Sequence[subprocess.Popen]) -> np.ndarray:
    """CPU-seconds of the leader and of every rollout mesh so far."""
    return np.array([time.process_time(), *(load.used(mesh.pid) for mesh in meshes)])
