"""An emulated cluster: processes that wait instead of using devices, compared with the simulator at equal costs.

See `benchmark.waiting_workers` for the processes.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from benchmarks import load
from benchmarks.runtime import TimedRun, simulations, timed
from benchmarks.waiting_workers import Emulation, driving, processes
from benchmarks.waits import Waits
from digen_jax.errors import check_choice
from digen_jax.planning.tables import aligned
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout
from digen_jax.scheduling.state import SAMPLE, TRAIN

CHUNK, GROUP = 4, 8  # images


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, and the policy lag."""

    name: str
    speeds: tuple[float, ...]  # of the rollout workers
    chunks: int  # of a step
    training: float = 0.9  # of a step's chunks, over their generation by all rollout workers
    samples: bool = False  # whether the home worker samples, too
    max_policy_lag: int = 0  # see `Settings`

    def costs(self, seconds: float) -> Costs:
        """Costs with which the rollout workers generate for about so many seconds a step."""
        chunk = seconds * sum(self.speeds) / self.chunks  # at speed 1
        return Costs(
            generate=0.9 * chunk / CHUNK,
            decode=0.1 * chunk / CHUNK,
            train=self.training * seconds / self.chunks / CHUNK,
            deliver=0.02 * seconds / CHUNK,
            score=0.03 * seconds / CHUNK,
            encode=0.03 * seconds,
            update=0.03 * seconds,
            sync=0.06 * seconds,
        )

    def settings(self, steps: int) -> Settings:
        """The scheduler's, for so many steps."""
        groups = self.chunks * CHUNK // GROUP
        return Settings(steps, groups, GROUP, CHUNK, max_policy_lag=self.max_policy_lag)

    @property
    def workers(self) -> tuple[WorkerLayout, ...]:
        """Workers of one device each: the home worker, which has speed 1, and those that only sample."""
        home = WorkerLayout(roles=(TRAIN, SAMPLE) if self.samples else (TRAIN,))
        return home, *(WorkerLayout(roles=(SAMPLE,), speed=speed) for speed in self.speeds)


FOUR, UNEQUAL = (1.0,) * 4, (2.0, 1.0, 1.0, 0.5)
CASES = (
    Case("1 worker", (1.0,), 8),
    Case("4 workers", FOUR, 16),
    Case("4 workers, home samples", FOUR, 18, training=0.5, samples=True),
    Case("4 workers, lag 1", FOUR, 16, training=1.0, max_policy_lag=1),
    Case("4 workers of unequal speeds", UNEQUAL, 18),
    Case(
        "the same, home samples, lag 1", UNEQUAL, 20, training=0.5, samples=True, max_policy_lag=1
    ),
    Case("16 workers", (1.0,) * 16, 32),
)


@dataclasses.dataclass(frozen=True)
class Emulated:
    """The result of a case. `driver`, `worker` and `ray` are shares of one core."""

    case: str
    step_seconds: float  # mean of the measured steps
    simulated: float  # the same by the simulator, the mean of its runs
    bound: float  # seconds of a step in which all devices only generate and train, without a pause
    policy_lag: float  # mean age in versions
    driver: float
    worker: float  # mean of the rollout workers
    ray: float  # Ray's own processes
    others: float  # share of all cores that other processes and virtual machines used

    @property
    def deviation(self) -> float:
        """Deviation of the emulated cluster from the simulator."""
        return self.step_seconds / self.simulated - 1

    def cells(self) -> list[str]:
        """A row of the table."""
        seconds = self.step_seconds, self.simulated
        shares = self.driver, self.worker, self.ray, self.others
        return [
            self.case,
            *(f"{one:.2f}" for one in seconds),
            f"{self.deviation:+.1%}",
            *(f"{self.bound / one:.0%}" for one in seconds),
            f"{self.policy_lag:.2f}",
            *(f"{share:.1%}" for share in shares),
        ]


TIMES = "", "s/step", "simulated", "deviation", "of bound", "simulated"
HEAD = [*TIMES, "age", "driver", "worker", "Ray", "others"]


def describe(found: Sequence[Emulated]) -> str:
    """A table of the cases."""
    return aligned([HEAD, *(one.cells() for one in found)])


def chosen(numbers: Sequence[str]) -> list[Case]:
    """The cases of these numbers, from 1 on; all if there are none.

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
    """Runs a case in processes and in the simulator; calls `stepped` after every step.

    Raises:
      ConfigError: Ray is not installed.
      RuntimeError: a rollout worker was not ready in time or was lost.
    """
    settings, costs = case.settings(run.length), case.costs(seconds)
    emulation = Emulation(case.workers, Waits(costs, settings, run.jitter, run.seed))
    cores = os.sched_getaffinity(0)
    with driving(emulation) as (driver, workers):
        started = processes(workers)
        before, used = load.read(cores), _used(started.values())
        step_times, policy_lag = timed(driver, run, stepped)
        after, used = load.read(cores), _used(started.values()) - used
        if processes(workers) != started or len(started) < len(case.speeds):
            raise RuntimeError("a rollout worker was not ready in time or was lost: see above")
    taken = load.between(before, after, float(used.sum()), len(cores))
    shares = (used / (after.clock - before.clock)).tolist()
    reports = simulations(case.workers, costs, settings, run)
    return Emulated(
        case.name,
        fmean(step_times),
        fmean(time for report in reports for time in run.step_times(report.step_ends)),
        reports[0].bound,
        policy_lag,
        shares[0],
        shares[1] / len(started),
        shares[2],
        taken.others + taken.stolen,
    )


def _used(workers: Sequence[int]) -> np.ndarray:
    """CPU-seconds so far of the driver, of all rollout workers, and of Ray's own processes."""
    ray = load.descendants(os.getpid()) - set(workers)
    groups = workers, ray
    return np.array([time.process_time(), *(sum(map(load.used, group)) for group in groups)])
