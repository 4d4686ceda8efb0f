"""The real runtime with waits instead of device work: the best layout of each kind, and the bound (G + T)/N.

Driver, threads, scheduler and reward pool are those of a run. The planner's search chooses the layout, and commands
take the time that the planner assumes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from statistics import fmean, median
from typing import Any

from benchmarks.waits import WaitingExecutors, Waits, score
from digen_jax.errors import ConfigError, check_positive
from digen_jax.planning.report import aligned, describe_costs
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Driver
from digen_jax.scheduling.layouts import PoolLayout, Problem
from digen_jax.scheduling.planner import Simulations, layouts, search, settings_of, workers_of
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import GUESSED, Costs, Settings
from digen_jax.scheduling.simulator import Disturbance, Report, WorkerLayout, simulate

SIMULATED = 8  # simulator runs with different random numbers, whose mean is the prediction
DECODE = 0.05  # share of the seconds of generation
LATE = 1 / 600  # wake-up delay, as a share of the bound, above which the machine counts as busy
NEAR = 0.03  # maximum error of a good prediction
UNUSED = "score_latency", "deliver", "evaluate", "switch"  # unused costs
# Rows of the table, as in `PoolLayout.kind`.
COLOCATED = "colocated"
KINDS = (
    COLOCATED,
    "disaggregated",
    "disaggregated, lag 1",
    "pool",
    "pool, lag 1",
    "rollout + pool, lag 1",
)


@dataclasses.dataclass(frozen=True)
class Work:
    """A step and the costs of its commands.

    Attributes:
      devices: Number of equal devices.
      generate, train: Ratio of their device-seconds.
      seconds: Duration of a step if all devices were always busy: the bound (G + T)/N.
      encode, update, sync: Shares of that bound.
      score: Duration of scoring a step's images by the one scorer, as a share of the bound.
      groups, images: Groups of a step, images of a group.
      chunk: Images of a chunk on each device of a worker.
      passes: Parts of the training of such a chunk.
    """

    devices: int = 8
    generate: float = 1.0
    train: float = 1.0
    seconds: float = 4.0
    encode: float = 0.002
    update: float = 0.01
    sync: float = 0.02
    score: float = 0.1
    groups: int = 16
    images: int = 8
    chunk: int = 1
    passes: int = 8

    def __post_init__(self):
        """Raises ConfigError if the work cannot be measured."""
        if self.devices < 2:
            raise ConfigError(f"--devices={self.devices} must be at least 2 to be split")
        for name in ("generate", "train", "seconds"):
            check_positive(name, getattr(self, name))

    def problem(self, kind: str) -> Problem:
        """Returns the planner's problem for a kind; a worker with n devices takes 1/n of the seconds of one device."""
        images = self.groups * self.images
        image = self.seconds * self.devices / images
        sampling = image * self.generate / (self.generate + self.train)
        costs = Costs(
            generate=sampling * (1 - DECODE),
            decode=sampling * DECODE,
            train=image - sampling,
            encode=self.encode * self.seconds,
            update=self.update * self.seconds,
            sync=self.sync * self.seconds,
            score=self.score * self.seconds / images,
        )
        size = self.devices if kind == COLOCATED else 1  # devices of a worker, which split a chunk
        chunk, passes = self.chunk * size, self.passes * size
        settings = Settings(1, self.groups, self.images, chunk, passes=passes)
        return Problem(self.devices, settings, costs, scorers=1)


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """Steps to measure, after `warm_up` steps; `jitter` and `seed` as in `Disturbance`."""

    warm_up: int = 3
    steps: int = 5
    jitter: float = 0.2
    seed: int = 0

    def __post_init__(self):
        """Raises ConfigError for invalid settings."""
        check_positive("warm_up", self.warm_up)
        check_positive("steps", self.steps)

    @property
    def length(self) -> int:
        """Number of steps of a run: one more than is measured, because the end of a run is not measured."""
        return self.warm_up + self.steps + 1

    def step_times(self, step_ends: list[float]) -> tuple[float, ...]:
        """Returns the seconds of the measured steps."""
        measured = range(self.warm_up, self.warm_up + self.steps)
        return tuple(step_ends[n] - step_ends[n - 1] for n in measured)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Result of a layout.

    Attributes:
      layout: Workers of the layout.
      step_times: Seconds of the measured steps.
      bound: Seconds of a step if all devices always generated or trained: (G + T)/N.
      predicted: Median seconds of these steps in the simulator.
      policy_lag: Mean age of the trained samples in versions.
      late: Mean timer wake-up delay of a wait in seconds. 0 if it was not measured.
    """

    layout: str
    step_times: tuple[float, ...]
    bound: float
    predicted: float
    policy_lag: float
    late: float = 0.0

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

    def as_json(self) -> dict[str, Any]:
        """Returns all numbers."""
        more = {name: getattr(self, name) for name in ("step_seconds", "utilisation", "error")}
        return dataclasses.asdict(self) | more


def best_layout(work: Work, kind: str) -> PoolLayout:
    """Returns the fastest layout of a kind by the planner's search; workers have one device, except if colocated.

    Raises:
      ConfigError: no layout is of this kind.
    """
    problem = work.problem(kind)
    size = work.devices if kind == COLOCATED else 1
    found = [
        layout
        for layout in layouts(problem)
        if layout.kind == kind and layout.devices == size >= layout.rollout_devices
    ]
    if not found or work.groups * work.images % problem.settings.unit_images:
        raise ConfigError(
            f"{work.devices} devices and {work.groups} groups of {work.images} images have no layout {kind!r}: "
            "use more devices, or groups that they divide"
        )
    return search(Simulations(problem), found).layout


def time_steps(
    driver: Driver, run: TimedRun, on_step: Callable[[], object] = lambda: None
) -> tuple[tuple[float, ...], float]:
    """Returns the seconds of the measured steps and their mean policy lag; calls `on_step` after each step."""
    ends, lags = [], []
    for _ in range(run.length - 1):
        lags.append(driver.step()["policy_lag"])
        ends.append(driver.now())
        on_step()
    return run.step_times(ends), fmean(lags[run.warm_up :])


def measure(
    work: Work, layout: PoolLayout, run: TimedRun, on_step: Callable[[], object] = lambda: None
) -> Measured:
    """Drives the runtime through a run of waits; calls `on_step` after every step."""
    problem = work.problem(layout.kind)
    workers, costs = workers_of(problem, layout)
    settings = dataclasses.replace(settings_of(problem, layout), steps=run.length)
    executors: Any = WaitingExecutors(Waits(costs, settings, run.jitter, run.seed), workers)
    with (
        closing(RewardPool(alone("waits", score), 0)) as rewards,
        closing(Driver(executors, Scheduler(settings, GUESSED), rewards)) as driver,
    ):
        step_times, policy_lag = time_steps(driver, run, on_step)
    reports = simulations(workers, costs, settings, run, problem.scorers)
    predicted = fmean(median(run.step_times(report.step_ends)) for report in reports)
    late = fmean(itertools.chain.from_iterable(w.late for w in executors.workers.values()))
    name = f"{layout.describe()}, chunks of {settings.chunk_images}"
    return Measured(name, step_times, work.seconds, predicted, policy_lag, late)


def simulations(
    workers: tuple[WorkerLayout, ...],
    costs: Costs,
    settings: Settings,
    run: TimedRun,
    scorers: int = 0,
) -> list[Report]:
    """Returns simulator runs with the jitter, each with different random numbers."""
    # They differ from the run's, which a prediction cannot know.
    seeds = range(SIMULATED if run.jitter else 1)
    noise = [Disturbance(run.jitter, scorers=scorers, seed=seed) for seed in seeds]
    return [simulate(workers, costs, settings, run.length, one) for one in noise]


def compare(
    work: Work,
    run: TimedRun,
    kinds: Iterable[str] = KINDS,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, Measured]:
    """Measures the best layout of each kind.

    Raises:
      ConfigError: the request cannot be measured.
    """
    chosen = {kind: best_layout(work, kind) for kind in kinds}
    return {kind: measure(work, layout, run, on_step) for kind, layout in chosen.items()}


def introduction(work: Work, run: TimedRun) -> str:
    """Returns a text on what is measured and how."""
    return (
        f"Waits instead of device work, with a jitter of {run.jitter:.0%} for each command and device; driver, "
        "threads, scheduler and reward pool are real.\n"
        f"{work.devices} devices; a step is {work.groups} groups of {work.images} images. A worker of n devices takes "
        "1/n of the seconds, times the largest of n random factors.\n"
        f"Each row is the planner's best layout of its kind; s/step is the median of steps {run.warm_up + 1} to "
        f"{run.warm_up + run.steps}.\npredicted: the share of the bound by the simulator, at the same costs. age: of "
        "the trained samples, in versions."
    )


def table(work: Work, rows: Mapping[str, Measured]) -> str:
    """Returns the waits and the bound of a ratio, and a line per kind of layout."""
    waits = describe_costs(work.problem(COLOCATED), UNUSED).split(";")[0]
    return (
        f"generate:train {work.generate:g}:{work.train:g}, bound (G + T)/N {work.seconds:.3f} s\n"
        f"waits {waits}\n{describe(rows)}"
    )


def describe(rows: Mapping[str, Measured]) -> str:
    """Returns a table with a line per layout."""
    lines = [["", "workers", "s/step", "of bound", "predicted", "error", "age"]]
    for name, row in rows.items():
        shares = f"{row.utilisation:.1%}", f"{row.bound / row.predicted:.1%}", f"{row.error:+.1%}"
        seconds, lag = f"{row.step_seconds:.3f}", f"{row.policy_lag:.2f}"
        lines.append([name, row.layout, seconds, *shares, lag])
    return aligned(lines, left=2)


def accuracy(rows: Iterable[Measured]) -> str:
    """Returns the error of the predictions and the timer wake-up delay as text."""
    rows = list(rows)
    errors = sorted(abs(row.error) for row in rows)
    late = any(row.late > LATE * row.bound for row in rows)
    busy = ": the machine is too busy for these numbers to count" if late else ""
    within = sum(error <= NEAR for error in errors)
    return (
        f"The simulator is within {NEAR:.0%} of {within} of {len(errors)} measurements, "
        f"off by {errors[-1]:.1%} at most and {errors[len(errors) // 2]:.1%} in the median. "
        f"Timer wake-up delay: {1000 * fmean(row.late for row in rows):.2g} ms on average, "
        f"{1000 * max(row.late for row in rows):.2g} ms in the worst row{busy}."
    )
