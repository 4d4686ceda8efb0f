"""Runs the scheduler on a virtual clock: the real scheduler, event by event; only the durations are made up."""

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from digen_jax.scheduling import timeline
from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Command,
    Decode,
    Deliver,
    Generate,
    Publish,
    Score,
    Train,
    Update,
)
from digen_jax.scheduling.costs import cost_of
from digen_jax.scheduling.events import Completed, Event, Joined, Lost
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.state import SAMPLE, TRAIN
from digen_jax.scheduling.timeline import Interval, Recorder

WARM_UP = 4  # steps before the steady state
ROLES = {"encode": SAMPLE, "generate": SAMPLE, "decode": SAMPLE, "train": TRAIN}  # of commands
OF_DEVICES = (
    "generate",
    "decode",
    "train",
    "encode",
    "evaluate",
    "update",
)  # kinds that jitter changes


@dataclasses.dataclass(frozen=True)
class WorkerLayout:
    """A worker's devices and roles; `speed` divides the seconds of its work."""

    devices: int = 1
    roles: tuple[str, ...] = (SAMPLE, TRAIN)
    speed: float = 1.0


@dataclasses.dataclass(frozen=True)
class Change:
    """A worker is lost (`worker` None) or joins, at some second of the run."""

    at: float
    name: str
    worker: WorkerLayout | None = None


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """What a simulation adds to the costs.

    The work of a device takes a factor drawn uniformly from 1 - jitter to 1 + jitter; a program of several devices
    takes the time of its slowest one. A share `flat_groups` of the candidate groups, drawn at random, has no variance.
    `scorers` chunks are scored at the same time; 0: any number.
    """

    jitter: float = 0.0
    flat_groups: float = 0.0
    scorers: int = 0
    changes: tuple[Change, ...] = ()
    seed: int = 0


@dataclasses.dataclass
class Report:
    """A simulated run; times are seconds from its beginning.

    Attributes:
      devices: of each worker that ever joined.
      bound: seconds of a step in which all devices always sample or train: (G + T) / N.
      images: trained in a step.
      ahead: the share of the next step that was sampled at each step's end.
      trained_by_age: passes by the age of their samples, in versions.
    """

    devices: dict[str, int]
    bound: float
    images: int
    intervals: list[Interval] = dataclasses.field(default_factory=list)
    step_ends: list[float] = dataclasses.field(default_factory=list)
    ahead: list[float] = dataclasses.field(default_factory=list)
    trained_by_age: Counter[int] = dataclasses.field(default_factory=Counter)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step of the steady state: without the first steps and the last one."""
        ends = (
            self.step_ends[WARM_UP - 1 : -1]
            if len(self.step_ends) > WARM_UP + 1
            else [0.0, *self.step_ends]
        )
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def utilisation(self) -> float:
        """The bound over the step's seconds."""
        return self.bound / self.step_seconds

    @property
    def images_per_second(self) -> float:
        """Images trained per second."""
        return self.images / self.step_seconds

    def bubbles(self) -> dict[str, float]:
        """Device-seconds of waiting over the whole run, by cause."""
        return timeline.bubbles(self.intervals, self.devices)


def names_of(workers: tuple[WorkerLayout, ...]) -> list[str]:
    """The names of workers: the first one is the home worker, which updates; "rollout" ones only sample."""
    rollouts, others = itertools.count(), itertools.count(1)
    samples = (one.roles == (SAMPLE,) for one in workers[1:])
    return [
        TRAINER,
        *(f"rollout {next(rollouts)}" if s else f"worker {next(others)}" for s in samples),
    ]


def bound(workers: tuple[WorkerLayout, ...], costs: Costs, settings: Settings) -> float:
    """Seconds of a step if all devices always sampled or trained: the least of any division of the work."""
    images = settings.groups * settings.images
    work = images * (costs.generate + costs.decode + costs.train)
    return work / sum(worker.devices * worker.speed for worker in workers)


def seconds_of(
    command: Command,
    worker: WorkerLayout | None,
    costs: Costs,
    settings: Settings,
    jitter: float,
    draw: Callable[[], float],
) -> float:
    """Duration of a command.

    Args:
      command: a command that is answered.
      worker: the worker that executes it. None: it occupies no device, such as a score.
      costs: durations on a worker of one device.
      settings: the scheduler's.
      jitter: see `Disturbance`.
      draw: a uniformly random number from [0, 1), from which follows the factor of the slowest device.
    """
    share = command.count / settings.passes if isinstance(command, Train) else 1.0
    kind = cost_of(command)
    seconds = costs.seconds(kind, settings.chunk_images, share)
    if kind not in OF_DEVICES:
        return seconds
    seconds /= worker.speed * (worker.devices if kind != "update" else 1)
    return seconds * (1 + jitter * (2 * draw() ** (1 / worker.devices) - 1)) if jitter else seconds


def simulate(
    workers: tuple[WorkerLayout, ...],
    costs: Costs,
    settings: Settings,
    steps: int,
    disturbance: Disturbance | None = None,
    expected: Costs | None = None,
    timeline: bool = True,
) -> Report:
    """Simulates a run of `steps` steps.

    Args:
      workers: at the beginning; the first one is the home worker.
      costs: durations of commands, on a worker of one device.
      settings: the scheduler's; `steps` replaces their number of steps.
      steps: how many to run.
      disturbance: jitter, lost workers and so on; None: none of these.
      expected: costs that the scheduler assumes before it measures; None: the true ones.
      timeline: whether to record intervals; False is faster.
    """
    settings = dataclasses.replace(settings, steps=steps)
    scheduler = Scheduler(settings, expected or costs)
    disturbance = disturbance or Disturbance()
    return _Simulation(workers, costs, settings, disturbance, scheduler, timeline).run()


class _Simulation:
    """The virtual clock, and the records of a simulation."""

    def __init__(
        self,
        workers: tuple[WorkerLayout, ...],
        costs: Costs,
        settings: Settings,
        disturbance: Disturbance,
        scheduler: Scheduler,
        timeline: bool,
    ):
        self.costs, self.settings = costs, settings
        self.disturbance, self.scheduler = disturbance, scheduler
        self.timeline = timeline
        self.random = random.Random(disturbance.seed)
        self.workers: dict[str, WorkerLayout] = {}
        self.roles: dict[str, str] = {}  # of each worker's last work
        # What each worker generates, from when to when.
        self.sampling: dict[str, tuple[Chunk, float, float]] = {}
        self.events: list[tuple[float, int, Event]] = []  # heap by time, then by order of pushing
        self.pushed = 0
        self.scorers = [0.0] * disturbance.scorers  # heap of the times at which each is free
        self.recorder = Recorder()
        images = settings.groups * settings.images
        least = bound(workers, costs, settings)
        self.report = Report({}, least, images, self.recorder.intervals)
        named = list(zip(names_of(workers), workers, strict=True))
        for name, worker in (*named[1:], named[0]):
            self._join(0.0, name, worker)

    def run(self) -> Report:
        """Runs until the scheduler is finished."""
        for change in self.disturbance.changes:
            if change.worker is not None:
                self._join(change.at, change.name, change.worker)
            else:
                self._push(Lost(change.at, change.name))
        while not self.scheduler.finished:
            _, _, event = heapq.heappop(self.events)
            self._handle(event)
        for worker in self.report.devices:
            self.recorder.end_wait(worker, event.at)
        return self.report

    def _join(self, at: float, name: str, worker: WorkerLayout) -> None:
        self.workers[name] = worker
        self.report.devices[name] = worker.devices
        self._push(Joined(at, name, worker.roles))

    def _push(self, event: Event) -> None:
        heapq.heappush(self.events, (event.at, self.pushed, event))
        self.pushed += 1

    def _handle(self, event: Event) -> None:
        commands = self.scheduler.handle(event)
        for command in commands:
            if command.answered:
                self._start(command, event.at)
        match event:
            case Completed(command=Update(update=update)) if update == self.settings.updates - 1:
                self.report.step_ends.append(event.at)
                self.report.ahead.append(self._ahead(event.at))
        if self.timeline:
            self._record_waits(event)

    def _ahead(self, now: float) -> float:
        """The share of the step that begins now which is sampled already."""
        step = self.scheduler.state.steps.get(self.scheduler.state.step)
        if step is None:
            return 0.0
        begun = (span for chunk, *span in self.sampling.values() if chunk.step == step.number)
        parts = sum(min(1.0, (now - start) / (end - start)) for start, end in begun if end > start)
        return (len(step.chunks) - step.queued - step.sampling + parts) / len(step.chunks)

    def _record_waits(self, event: Event) -> None:
        """Records whether the workers that an event concerns wait after it."""
        if isinstance(event, Lost):
            self.recorder.end_wait(event.worker, event.at)
            return
        command = getattr(event, "command", event)
        name = command.to if isinstance(command, Deliver) else getattr(command, "worker", None)
        for one in {name, TRAINER}:
            if one is not None and self.scheduler.is_there(one):
                self.recorder.look_at(self.scheduler, one, event.at)

    def _start(self, command: Command, now: float) -> None:
        """Begins a command now, or as soon as a scorer is free; schedules its completion."""
        worker = self.workers.get(getattr(command, "worker", ""))
        jitter, draw = self.disturbance.jitter, self.random.random
        seconds = seconds_of(command, worker, self.costs, self.settings, jitter, draw)
        if worker is not None and command.kind in ROLES:
            before, role = self.roles.get(command.worker), ROLES[command.kind]
            seconds += self.costs.switch if before not in (None, role) else 0.0
            self.roles[command.worker] = role
        start = now
        values: tuple[float, ...] = ()
        if isinstance(command, Score):
            if self.scorers:
                start = max(now, heapq.heappop(self.scorers))
                heapq.heappush(self.scorers, start + seconds)
            values = self._values(command)
        end = start + seconds
        if isinstance(command, Generate):
            self.sampling[command.worker] = command.chunk, start, end
        elif isinstance(command, Decode):
            self.sampling.pop(command.worker, None)
        self._push(Completed(end, command, end - now, values))
        if isinstance(command, Train):
            self.report.trained_by_age[command.chunk.step - command.version] += command.count
        if self.timeline:
            self._note(command, start, end)

    def _values(self, command: Score) -> tuple[float, ...]:
        """Values, all equal in a group without variance; which groups these are is independent of the order."""
        images, chunk = self.settings.chunk_images, command.chunk
        if not self.disturbance.flat_groups:
            return (0.0, *(1.0,) * (images - 1))
        group = chunk.index // self.settings.unit_chunks
        draw = random.Random(f"{self.disturbance.seed} {chunk.step} {group}").random()
        flat = draw < self.disturbance.flat_groups
        first = 0.0 if flat else float(chunk.index)
        return (first, *(float(not flat),) * (images - 1))

    def _note(self, command: Command, start: float, end: float) -> None:
        """Records the interval of a command; transfers in the background occupy no worker."""
        name = getattr(command, "worker", "reward")
        chunk, kind = getattr(command, "chunk", None), command.kind
        if isinstance(command, Publish | Deliver):
            receiver = command.to if isinstance(command, Deliver) else name
            worker = self.scheduler.state.workers.get(receiver)
            if worker is not None and worker.busy == command.serial:
                return self.recorder.work(receiver, kind, start, end, chunk)
            return self.recorder.work(f"{kind} {receiver}", kind, start, end, chunk)
        if chunk is not None and chunk.evaluation and name != "reward":
            kind = "evaluate"
        return self.recorder.work(name, kind, start, end, chunk)
