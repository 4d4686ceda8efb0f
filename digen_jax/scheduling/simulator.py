"""Runs the real scheduler on a virtual clock, event by event, with given durations."""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from digen_jax.scheduling.commands import (
    SAMPLE,
    TRAIN,
    TRAINER,
    Command,
    Completed,
    Deliver,
    Event,
    Interval,
    Joined,
    Recorder,
    Score,
    SyncWeights,
    Train,
    Update,
    trainer_names,
)
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings, cost_of

WARM_UP = 4  # steps before the steady state
ROLES = {"encode": SAMPLE, "generate": SAMPLE, "decode": SAMPLE, "train": TRAIN}  # by kind
OF_DEVICES = {*ROLES, "evaluate", "update"}  # kinds whose duration depends on the devices


@dataclasses.dataclass(frozen=True)
class WorkerLayout:
    """A worker's devices and roles; `speed` divides the seconds of its work."""

    devices: int = 1
    roles: tuple[str, ...] = (SAMPLE, TRAIN)
    speed: float = 1.0


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """Random variation that a simulation adds to the costs.

    Each device's work is scaled by a factor sampled uniformly from 1 - jitter to 1 + jitter; a program on several
    devices takes the time of the slowest one. `scorers` chunks are scored concurrently; 0 means unlimited.
    """

    jitter: float = 0.0
    scorers: int = 0
    seed: int = 0


@dataclasses.dataclass
class Report:
    """A simulated run; times are in seconds since its start."""

    devices: dict[str, int]  # number of devices of each worker
    bound: float  # seconds of a step in which all devices always sample or train: (G + T) / N
    intervals: list[Interval] = dataclasses.field(default_factory=list)
    step_ends: list[float] = dataclasses.field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Mean step seconds in the steady state: without the first steps and the last one."""
        ends = [0.0, *self.step_ends]
        if len(self.step_ends) > WARM_UP + 1:
            ends = self.step_ends[WARM_UP - 1 : -1]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def names_of(workers: tuple[WorkerLayout, ...]) -> list[str]:
    """Returns the workers' names; the first is the home worker, which updates, and "rollout" workers only sample."""
    trainers, rollouts = iter(trainer_names(len(workers))), itertools.count()
    only_sample = (worker.roles == (SAMPLE,) for worker in workers)
    return [f"rollout {next(rollouts)}" if one else next(trainers) for one in only_sample]


def seconds_of(
    command: Command,
    worker: WorkerLayout | None,
    costs: Costs,
    settings: Settings,
    jitter: float,
    draw: Callable[[], float],
) -> float:
    """Returns the duration of a command that is answered; `costs` are for a worker of one device.

    A `worker` of None means that it occupies no device, such as a score. For `jitter` see `Disturbance`; `draw` returns
    a uniformly random number from [0, 1), which determines the factor of the slowest device.
    """
    share = command.count / settings.passes if isinstance(command, Train) else 1.0
    kind = cost_of(command)
    seconds = costs.seconds(kind, settings.chunk_images, share)
    if kind not in OF_DEVICES:
        return seconds
    seconds /= worker.speed * (worker.devices if kind != "update" else 1)
    return seconds * (1 + jitter * (2 * draw() ** (1 / worker.devices) - 1)) if jitter else seconds


class Simulation:
    """A scheduler and the answers to its commands on a virtual clock; see `simulate`."""

    def __init__(
        self,
        workers: tuple[WorkerLayout, ...],
        costs: Costs,
        settings: Settings,
        disturbance: Disturbance,
    ):
        self.costs, self.settings, self.disturbance = costs, settings, disturbance
        self.scheduler = Scheduler(settings, costs)
        self.random = random.Random(disturbance.seed)
        home, *others = zip(names_of(workers), workers, strict=True)
        self.workers = dict([*others, home])  # the home worker joins last
        self.roles: dict[str, str] = {}  # by worker, of its last command
        self.events: list[tuple[float, int, Event]] = []  # heap by time, then by insertion order
        self.pushed = itertools.count()
        self.scorers = [0.0] * disturbance.scorers  # heap of the times at which each is free
        self.recorder = Recorder()
        images = settings.groups * settings.images
        bound = images * (costs.generate + costs.decode + costs.train)
        bound /= sum(worker.devices * worker.speed for worker in workers)
        self.report = Report({name: one.devices for name, one in self.workers.items()}, bound)

    def run(self) -> Report:
        """Runs until the scheduler is finished."""
        for name, worker in self.workers.items():
            self.events.append((0.0, next(self.pushed), Joined(0.0, name, worker.roles)))
        while not self.scheduler.finished:
            _, _, event = heapq.heappop(self.events)
            self._handle(event)
        for name in self.workers:
            self.recorder.end_wait(name, event.at)
        self.report.intervals = self.recorder.intervals
        return self.report

    def _handle(self, event: Any) -> None:
        for command in self.scheduler.handle(event):
            if command.answered:
                self._start(command, event.at)
        match event:
            case Completed(command=Update(update=update)) if update == self.settings.updates - 1:
                self.report.step_ends.append(event.at)
        # Only workers that the event concerns can start to wait.
        found = event.command.receiver if isinstance(event, Completed) else event.worker
        for name in {found, TRAINER} & self.scheduler.workers.keys():
            if cause := self.scheduler.waits_for(name):
                self.recorder.wait(name, cause, event.at)

    def _start(self, command: Command, now: float) -> None:
        """Starts a command now, or once a scorer is free; records its interval and schedules its completion."""
        worker = self.workers.get(getattr(command, "worker", ""))
        jitter, draw = self.disturbance.jitter, self.random.random
        seconds = seconds_of(command, worker, self.costs, self.settings, jitter, draw)
        if command.kind in ROLES:
            before, role = self.roles.get(command.receiver), ROLES[command.kind]
            seconds += self.costs.switch if before not in (None, role) else 0.0
            self.roles[command.receiver] = role
        start, values = now, tuple[float, ...]()
        if isinstance(command, Score):
            values = (0.0, *(1.0,) * (self.settings.chunk_images - 1))
            if self.scorers:
                start = max(now, heapq.heappop(self.scorers))
                heapq.heappush(self.scorers, start + seconds)
        end = start + seconds
        completed = Completed(end, command, end - now, values)
        heapq.heappush(self.events, (end, next(self.pushed), completed))
        name, kind = command.receiver or "reward", command.kind
        chunk = getattr(command, "chunk", None)
        if isinstance(command, SyncWeights | Deliver):
            if self.scheduler.workers[name].busy != command.serial:  # in the background
                name = f"{kind} {name}"
        elif chunk is not None and chunk.evaluation and name != "reward":
            kind = "evaluate"
        self.recorder.work(name, kind, start, end, chunk)


def simulate(
    workers: tuple[WorkerLayout, ...],
    costs: Costs,
    settings: Settings,
    steps: int,
    disturbance: Disturbance = Disturbance(),
) -> Report:
    """Runs the scheduler for `steps` steps; `settings.steps` is ignored.

    The home worker is the first of `workers`, and `costs` are for a worker of one device.
    """
    settings = dataclasses.replace(settings, steps=steps)
    return Simulation(workers, costs, settings, disturbance).run()
