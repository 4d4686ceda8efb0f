"""The real runtime with waits in place of device work: every tactic at its best split, and the bound.

Driver, threads, scheduler and reward pool are those of a run. The planner's search chooses split and tactics,
and commands take the time that the planner assumes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from statistics import fmean
from typing import NamedTuple

from digen_jax.benchmark.variants import VARIANTS, Variant, Work, best_split
from digen_jax.benchmark.waits import WaitingExecutors, Waits, score
from digen_jax.errors import ConfigError, check_positive
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Driver
from digen_jax.scheduling.commands import Decode, Fragment, Generate, Train
from digen_jax.scheduling.costs import GUESSED, CostModel
from digen_jax.scheduling.planner import proposal as of
from digen_jax.scheduling.planner.learned import learned
from digen_jax.scheduling.planner.problem import Problem
from digen_jax.scheduling.planner.proposal import Proposal
from digen_jax.scheduling.planner.report import Report
from digen_jax.scheduling.planner.simulate import Disturbance, Layout, simulate
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.state import SchedulerState

SIMULATED = 8  # runs of the simulator with other random draws, whose mean is the prediction


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """How a variant is measured: in `steps` steps after the `learn` first ones, which give the costs.

    `jitter` is drawn from `seed` for every `unit` of images, which divides any fragment.
    """

    learn: int = 3
    steps: int = 5
    jitter: float = 0.2
    seed: int = 0
    unit: int = Work.fragment

    def check(self) -> None:
        """Refuses settings that cannot work.

        Raises:
          ConfigError: names the field and what to change.
        """
        check_positive("learn", self.learn)
        check_positive("steps", self.steps)
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter must lie in [0, 1), not be {self.jitter}")

    @property
    def measured(self) -> range:
        """The numbers of the steps that are measured."""
        return range(self.learn, self.learn + self.steps)

    def waits(self, costs: Costs, settings: Settings) -> Waits:
        """The durations of the commands of such steps."""
        return Waits(costs, settings.fragment_images, self.unit, self.jitter, self.seed)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of a variant.

    Attributes:
      proposal: its split and tactics.
      images: trained in a step.
      step_times: seconds of the measured steps.
      busy: the share of device-seconds that were spent at any work.
      bound: seconds of a step if all devices had always generated or trained: (G + T)/N, with the
        drawn durations.
      predicted: mean seconds of these steps by the simulator, from the costs of the first steps.
      tag_share, staleness: share of the fragments that the trainer generated; mean age in versions.
      late: timer wake-up delay, mean seconds a wait.
    """

    proposal: Proposal
    images: int
    step_times: tuple[float, ...]
    busy: float
    bound: float
    predicted: float
    tag_share: float
    staleness: float
    late: float

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return fmean(self.step_times)

    @property
    def images_per_device_second(self) -> float:
        """Images trained per second and device."""
        devices = self.proposal.trainer + self.proposal.workers * self.proposal.worker_devices
        return self.images / (self.step_seconds * devices)

    @property
    def utilisation(self) -> float:
        """The bound divided by the step's seconds."""
        return self.bound / self.step_seconds

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.predicted / self.step_seconds - 1


@contextmanager
def driving(problem: Problem, proposal: Proposal, run: TimedRun) -> Iterator[Driver]:
    """A driver of waits, before the first step of a run."""
    # One step more than is measured, so that the last measured step is not the end of a run.
    steps = run.learn + run.steps + 1
    settings = dataclasses.replace(of.settings(problem, proposal), steps=steps)
    waits = run.waits(of.costs(problem, proposal), settings)
    executors = WaitingExecutors(waits, of.layout(problem, proposal))
    with (
        closing(RewardPool(alone("waits", score), 0)) as rewards,
        closing(Driver(executors, Scheduler(settings, GUESSED), rewards)) as driver,
    ):
        yield driver


class Timed(NamedTuple):
    """Seconds of the measured steps of a run, their metrics, and the scheduler after the first steps."""

    step_times: tuple[float, ...]
    told: list[dict[str, float]]
    learned: SchedulerState

    def mean(self, name: str) -> float:
        """Of a metric over the measured steps."""
        return fmean(line[name] for line in self.told)


def timed(driver: Driver, run: TimedRun, stepped: Callable[[], object] = lambda: None) -> Timed:
    """Drives through a run's steps; calls `stepped` after each."""
    ends, told, saved = [0.0], [], {}
    for step in range(run.learn + run.steps):
        told.append(driver.step())
        ends.append(driver.now())
        saved[step] = driver.begun.scheduler
        stepped()
    times = tuple(ends[n + 1] - ends[n] for n in run.measured)
    return Timed(times, told[run.learn :], Scheduler.restore(saved[run.learn - 1]).state)


def measure(
    problem: Problem,
    proposal: Proposal,
    run: TimedRun,
    stepped: Callable[[], object] = lambda: None,
) -> Measured:
    """Drives the runtime through a run of waits; calls `stepped` after every step."""
    with driving(problem, proposal, run) as driver:
        found = timed(driver, run, stepped)
    known = found.learned
    return Measured(
        proposal,
        known.settings.groups * known.settings.images,
        found.step_times,
        found.mean("utilisation"),
        bound(problem, run),
        predict(known.costs, driver.executor.devices, known.settings, run),
        found.mean("tag_share"),
        found.mean("staleness"),
        fmean(driver.executor.late),
    )


def predict(
    model: CostModel, devices: Mapping[str, int], settings: Settings, run: TimedRun
) -> float:
    """Mean seconds of the measured steps by the simulator, with the scheduler's average costs and the jitter."""
    reports = simulations(*learned(model, devices), settings, run)
    return fmean(report.step_times[n] for report in reports for n in run.measured)


def simulations(layout: Layout, costs: Costs, settings: Settings, run: TimedRun) -> list[Report]:
    """Runs of the simulator with the jitter, each with its own random numbers."""
    # Of a fragment: that of the mean of its draws.
    jitter = run.jitter / math.sqrt(settings.fragment_images / run.unit)
    # Other draws than the run's own, which a prediction cannot know.
    numbers = range(SIMULATED if jitter else 1)
    drawn = [Disturbance(jitter=jitter, seed=number) for number in numbers]
    return [simulate(layout, costs, settings, settings.steps, one) for one in drawn]


def bound(problem: Problem, run: TimedRun) -> float:
    """Seconds of a measured step if all devices only generated and trained: (G + T)/N."""
    settings = problem.settings
    waits = run.waits(problem.costs, settings)
    fragments = (Fragment(s, i) for s in run.measured for i in range(settings.fragments))
    work = sum(waits.seconds(command) for f in fragments for command in _commands(f))
    return work / (problem.devices * run.steps)


def _commands(fragment: Fragment) -> Iterable[Generate | Decode | Train]:
    return Generate(0, "", fragment, 0), Decode(0, "", fragment), Train(0, "", fragment, 0, False)


def compare(
    work: Work,
    run: TimedRun,
    variants: Iterable[Variant] = VARIANTS,
    stepped: Callable[[], object] = lambda: None,
) -> dict[str, Measured]:
    """Every variant at its best split.

    Raises:
      ConfigError: the request cannot be measured.
    """
    work.check()
    run.check()
    problem = work.problem
    problem.check()
    chosen = {variant: best_split(variant, problem) for variant in variants}
    return {
        variant.name: measure(variant.problem(problem), proposal, run, stepped)
        for variant, proposal in chosen.items()
    }
