"""The real runtime with waits instead of device work: the best layout of each kind, and the bound.

Driver, threads, scheduler and reward pool are those of a run. The planner's search chooses the layout, and commands
take the time that the planner assumes.
"""

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import closing
from statistics import fmean, median

from benchmarks.variants import KINDS, Work, best_layout
from benchmarks.waits import WaitingExecutors, Waits, score
from digen_jax.errors import ConfigError, check_positive
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Driver
from digen_jax.scheduling.layouts import PoolLayout
from digen_jax.scheduling.planner import settings_of, workers_of
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import GUESSED, Costs, Settings
from digen_jax.scheduling.simulator import Disturbance, Report, WorkerLayout, simulate

SIMULATED = 8  # runs of the simulator with different random numbers, whose mean is the prediction


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """How a layout is measured: in `steps` steps after the `warm_up` first ones.

    `jitter` of each command and device is drawn from `seed`: see `Disturbance`.
    """

    warm_up: int = 3
    steps: int = 5
    jitter: float = 0.2
    seed: int = 0

    def check(self) -> None:
        """Refuses settings that cannot work.

        Raises:
          ConfigError: names the field and what to change.
        """
        check_positive("warm_up", self.warm_up)
        check_positive("steps", self.steps)
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter must lie in [0, 1), not be {self.jitter}")

    @property
    def measured(self) -> range:
        """The numbers of the steps that are measured."""
        return range(self.warm_up, self.warm_up + self.steps)

    @property
    def length(self) -> int:
        """Steps of a run: one more than is measured, so that the last measured step is not the end of a run."""
        return self.warm_up + self.steps + 1

    def step_times(self, step_ends: list[float]) -> tuple[float, ...]:
        """Seconds of the measured steps."""
        return tuple(step_ends[n] - step_ends[n - 1] for n in self.measured)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of a layout.

    Attributes:
      layout: The planner's.
      step_times: Seconds of the measured steps.
      bound: Seconds of a step if all devices always generated or trained: (G + T)/N.
      predicted: Median seconds of these steps by the simulator.
      policy_lag: Mean age of the trained samples in versions.
      late: Mean timer wake-up delay of a wait in seconds.
    """

    layout: PoolLayout
    step_times: tuple[float, ...]
    bound: float
    predicted: float
    policy_lag: float
    late: float

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step."""
        return median(self.step_times)

    @property
    def utilisation(self) -> float:
        """The bound divided by the step's seconds."""
        return self.bound / self.step_seconds

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.predicted / self.step_seconds - 1


def timed(
    driver: Driver, run: TimedRun, stepped: Callable[[], object] = lambda: None
) -> tuple[tuple[float, ...], float]:
    """Seconds of the measured steps of a run, and their mean policy lag; calls `stepped` after each step."""
    ends, ages = [], []
    for _ in range(run.length - 1):
        ages.append(driver.step()["policy_lag"])
        ends.append(driver.now())
        stepped()
    return run.step_times(ends), fmean(ages[run.warm_up :])


def measure(
    work: Work, layout: PoolLayout, run: TimedRun, stepped: Callable[[], object] = lambda: None
) -> Measured:
    """Drives the runtime through a run of waits; calls `stepped` after every step."""
    workers, costs = workers_of(work.problem, layout)
    settings = dataclasses.replace(settings_of(work.problem, layout), steps=run.length)
    executors = WaitingExecutors(Waits(costs, settings, run.jitter, run.seed), workers)
    with (
        closing(RewardPool(alone("waits", score), 0)) as rewards,
        closing(Driver(executors, Scheduler(settings, GUESSED), rewards)) as driver,
    ):
        step_times, policy_lag = timed(driver, run, stepped)
    reports = simulations(workers, costs, settings, run, work.problem.scorers)
    return Measured(
        layout,
        step_times,
        work.seconds,
        fmean(median(run.step_times(report.step_ends)) for report in reports),
        policy_lag,
        fmean(executors.late),
    )


def simulations(
    workers: tuple[WorkerLayout, ...],
    costs: Costs,
    settings: Settings,
    run: TimedRun,
    scorers: int = 0,
) -> list[Report]:
    """Runs of the simulator with the jitter, each with its own random numbers."""
    # They are not the run's own, which a prediction cannot know.
    seeds = range(SIMULATED if run.jitter else 1)
    drawn = [Disturbance(run.jitter, scorers=scorers, seed=seed) for seed in seeds]
    return [simulate(workers, costs, settings, run.length, one) for one in drawn]


def compare(
    work: Work,
    run: TimedRun,
    kinds: Iterable[str] = KINDS,
    stepped: Callable[[], object] = lambda: None,
) -> dict[str, Measured]:
    """The best layout of each kind.

    Raises:
      ConfigError: the request cannot be measured.
    """
    work.check()
    run.check()
    chosen = {kind: best_layout(work, kind) for kind in kinds}
    return {kind: measure(work, layout, run, stepped) for kind, layout in chosen.items()}
