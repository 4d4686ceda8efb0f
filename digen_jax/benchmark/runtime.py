"""The real runtime with waits in place of device work: every tactic at its best split, and the bound.

Driver, threads, scheduler and the pool of rewards are those of a run. Split and tactics are what the
planner's search finds best, and what a command costs on them is what the planner reckons with.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from statistics import fmean

from digen_jax.benchmark.waits import WaitingExecutors, Waits, score
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.executors.driver import Driver
from digen_jax.runtime.planner import candidate as of
from digen_jax.runtime.planner.candidate import Candidate
from digen_jax.runtime.planner.problem import Problem, Scaling
from digen_jax.runtime.planner.search import LEAST, Simulations, search
from digen_jax.runtime.planner.space import candidates
from digen_jax.runtime.scheduler.commands import Decode, Fragment, Generate, Train
from digen_jax.runtime.scheduler.costs import GUESSED, CostModel
from digen_jax.runtime.scheduler.scheduler import Scheduler
from digen_jax.runtime.scheduler.settings import Costs, Settings
from digen_jax.runtime.simulator.learned import learned
from digen_jax.runtime.simulator.simulate import Disturbance, simulate
from digen_jax.settings import ConfigError, check_positive

DECODE = 0.05  # of the seconds of generation
SIMULATED = 8  # runs of the simulator with other draws, whose mean is the prediction


@dataclasses.dataclass(frozen=True)
class Work:
    """A step, and what its commands cost.

    Attributes:
      devices: all alike.
      generate, train: the ratio of their device-seconds.
      seconds: of a step if all devices were busy always: the bound (G + T)/N.
      encode, update, publish, switch: as shares of that bound.
      score: of a step's images by the one scorer, as a share of the bound.
      groups, images, fragment: groups of a step, images of a group and of a fragment.
      transitions: trained steps of a trajectory, which TSP splits.
    """

    devices: int = 8
    generate: float = 1.0
    train: float = 1.0
    seconds: float = 0.6
    encode: float = 0.005
    update: float = 0.01
    publish: float = 0.02
    switch: float = 0.05
    score: float = 0.25
    groups: int = 16
    images: int = 8
    fragment: int = 4
    transitions: int = 9

    def check(self) -> None:
        """Refuses what cannot be measured.

        Raises:
          ConfigError: names the field and what to change.
        """
        if self.devices < 2:
            raise ConfigError(f"devices must be at least 2 to be split, not {self.devices}")
        for name in ("generate", "train", "seconds"):
            check_positive(name, getattr(self, name))
        for name in ("encode", "update", "publish", "switch", "score"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def problem(self) -> Problem:
        """For the planner; the trainer and each worker speed up linearly as far as they can split."""
        image = self.seconds * self.devices / (self.groups * self.images)
        making = image * self.generate / (self.generate + self.train)
        costs = Costs(
            generate=making * (1 - DECODE),
            decode=making * DECODE,
            train=image - making,
            encode=self.encode * self.seconds,
            update=self.update * self.seconds,
            publish=self.publish * self.seconds,
            switch=self.switch * self.seconds,
            score=self.score * self.seconds / (self.groups * self.images),
        )
        fragments = self.groups * self.images // self.fragment
        settings = Settings(1, self.groups, self.images, self.fragment, tag_fragments=fragments)
        by_image = Scaling(images=self.fragment)
        return Problem(
            self.devices, settings, costs, by_image, by_image, self.transitions, scorers=1
        )


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table: which candidates compete for it, in a problem that may be an easier one."""

    name: str
    allowed: Callable[[Candidate], bool]
    problem: Callable[[Problem], Problem] = lambda problem: problem


def unlimited(problem: Problem, switch: bool = True) -> Problem:
    """Any number of devices splits a fragment, as who does one thing at a time may merge fragments.

    Colocated, moreover, weights lie where they are needed; `switch` False: roles change for nothing.
    """
    costs = dataclasses.replace(problem.costs, publish=0.0)
    if not switch:
        costs = dataclasses.replace(costs, switch=0.0)
    return dataclasses.replace(problem, costs=costs, worker=Scaling(), trainer=Scaling())


def _apart(**tactics: bool | int) -> Callable[[Candidate], bool]:
    """Rollout workers of one device each, and some tactics on or off."""
    asked = {"worker_devices": 1, **tactics}
    return lambda c: bool(c.workers) and all(getattr(c, n) == on for n, on in asked.items())


PLAIN, COLOCATED = "plain", "colocated"
VARIANTS = (
    Variant(
        "colocated, free switch", lambda c: not c.workers, lambda p: unlimited(p, switch=False)
    ),
    Variant(COLOCATED, lambda c: not c.workers, unlimited),
    Variant(
        PLAIN,
        _apart(time=1, gap=False, tag=False, asynchrony=False),
        lambda p: dataclasses.replace(p, trainer=Scaling()),
    ),
    Variant("+ GAP", _apart(time=1, gap=True, tag=False, asynchrony=False)),
    Variant("+ TSP", _apart(gap=True, tag=False, asynchrony=False)),
    Variant("+ TAG", _apart(gap=True, tag=True, asynchrony=False)),
    Variant("+ asynchrony", _apart(gap=True, tag=True, asynchrony=True)),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """How a variant is measured: in `steps` steps after the `learn` first ones, of which costs are learned."""

    learn: int = 3
    steps: int = 5
    jitter: float = 0.2
    seed: int = 0

    def check(self) -> None:
        """Refuses what cannot be done.

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


@dataclasses.dataclass(frozen=True)
class Measured:
    """A variant as it ran.

    Attributes:
      candidate: its split and tactics.
      images: trained in a step.
      step_times: seconds, of the measured steps.
      busy: the share of device-seconds that were spent at work, whatever work.
      bound: seconds of a step, had all devices always been generating or training: (G + T)/N, of
        what was drawn.
      predicted: mean seconds of these steps by the simulator, from what the first ones had cost.
      tag_share, staleness: of the fragments made by the trainer; mean age in versions.
    """

    candidate: Candidate
    images: int
    step_times: tuple[float, ...]
    busy: float
    bound: float
    predicted: float
    tag_share: float
    staleness: float

    @property
    def step_seconds(self) -> float:
        """Mean."""
        return fmean(self.step_times)

    @property
    def images_per_device_second(self) -> float:
        """Images trained in a second by one device."""
        devices = self.candidate.trainer + self.candidate.workers * self.candidate.worker_devices
        return self.images / (self.step_seconds * devices)

    @property
    def utilisation(self) -> float:
        """The bound over the step's seconds."""
        return self.bound / self.step_seconds

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.step_seconds - 1


def best_split(variant: Variant, problem: Problem) -> Candidate:
    """The one of a variant's candidates that the planner's search finds to be the fastest.

    Raises:
      ConfigError: there is none.
    """
    problem = variant.problem(problem)
    found = [c for c in candidates(problem) if variant.allowed(c)]
    if not found:
        raise ConfigError(
            f"{problem.devices} devices cannot be split for {variant.name!r}: use more"
        )
    return search(Simulations(problem), found, LEAST, simplify=False).candidate


@contextmanager
def driving(problem: Problem, candidate: Candidate, run: Run) -> Iterator[Driver]:
    """A driver of waits, before the first step of a run."""
    # One step more than is looked at, so that the last of these is no end of a run.
    steps = run.learn + run.steps + 1
    settings = dataclasses.replace(of.settings(problem, candidate), steps=steps)
    waits = Waits(of.costs(problem, candidate), settings.fragment_images, run.jitter, run.seed)
    executors = WaitingExecutors(waits, of.layout(problem, candidate))
    with (
        closing(RewardPool(score, "waits", 0)) as rewards,
        closing(Driver(executors, Scheduler(settings, GUESSED), rewards)) as driver,
    ):
        yield driver


def measure(
    problem: Problem, candidate: Candidate, run: Run, stepped: Callable[[], object] = lambda: None
) -> Measured:
    """Drives the runtime through a run of waits; `stepped` is called after every step."""
    ends, told, saved = [0.0], [], {}
    with driving(problem, candidate, run) as driver:
        for step in range(run.learn + run.steps):
            told.append(driver.step())
            ends.append(driver.now())
            saved[step] = driver.begun.scheduler
            stepped()
    known = Scheduler.restore(saved[run.learn - 1]).state
    told = told[run.learn :]
    return Measured(
        candidate,
        known.settings.groups * known.settings.images,
        tuple(ends[n + 1] - ends[n] for n in run.measured),
        fmean(line["utilisation"] for line in told),
        bound(problem, run),
        predict(known.costs, driver.executors.devices, known.settings, run),
        fmean(line["tag_share"] for line in told),
        fmean(line["staleness"] for line in told),
    )


def predict(model: CostModel, devices: Mapping[str, int], settings: Settings, run: Run) -> float:
    """Mean seconds of the measured steps by the simulator, from the scheduler's averages and the jitter."""
    layout, costs = learned(model, devices)
    times = []
    for number in range(SIMULATED):
        # Other draws than the run's own, which nobody could know.
        disturbance = Disturbance(jitter=run.jitter, seed=number)
        report = simulate(layout, costs, settings, settings.steps, disturbance)
        times += [report.step_times[n] for n in run.measured]
    return fmean(times)


def bound(problem: Problem, run: Run) -> float:
    """Seconds of a measured step if all devices did nothing but generate and train: (G + T)/N."""
    settings = problem.settings
    waits = Waits(problem.costs, settings.fragment_images, run.jitter, run.seed)
    fragments = (Fragment(s, i) for s in run.measured for i in range(settings.fragments))
    work = sum(waits.seconds(command) for f in fragments for command in _commands(f))
    return work / (problem.devices * run.steps)


def _commands(fragment: Fragment) -> Iterable[Generate | Decode | Train]:
    return Generate(0, "", fragment, 0), Decode(0, "", fragment), Train(0, "", fragment, 0, False)


def compare(
    work: Work,
    run: Run,
    variants: Iterable[Variant] = VARIANTS,
    stepped: Callable[[], object] = lambda: None,
) -> dict[str, Measured]:
    """Every variant at its best split.

    Raises:
      ConfigError: something cannot be measured as it is asked for.
    """
    work.check()
    run.check()
    problem = work.problem
    problem.check()
    chosen = {variant: best_split(variant, problem) for variant in variants}
    return {
        variant.name: measure(variant.problem(problem), candidate, run, stepped)
        for variant, candidate in chosen.items()
    }
