"""Runs the scheduler on a virtual clock.

It is the real scheduler, event by event; only the durations of commands are made up, from `Costs`.
"""

import dataclasses
import heapq
import random
from collections.abc import Sequence

from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Deliver,
    Fragment,
    Generate,
    Publish,
    Score,
    Train,
    Update,
)
from digen_jax.scheduling.costs import cost_of
from digen_jax.scheduling.events import Completed, Event, Joined, Lost
from digen_jax.scheduling.planner.report import Report
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.timeline import Recorder


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A set of devices that works as one. `speed` divides the seconds of generating and decoding."""

    devices: int = 1
    speed: float = 1.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """A trainer and its rollout workers, named "rollout 0" and so on; without workers: colocated."""

    trainer: Mesh
    rollout: tuple[Mesh, ...] = ()

    @property
    def devices(self) -> int:
        """The number of all devices."""
        return self.trainer.devices + sum(mesh.devices for mesh in self.rollout)


@dataclasses.dataclass(frozen=True)
class Change:
    """A rollout worker is lost (`mesh` None) or joins, at some second of the run."""

    at: float
    worker: str
    mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """What a simulation adds to the costs.

    Every duration is multiplied by a factor drawn uniformly from 1 - jitter to 1 + jitter. A share
    `flat_groups` of the candidate groups, drawn at random, has no variance. `scorers` fragments are
    scored at the same time; 0: any number.
    """

    jitter: float = 0.0
    flat_groups: float = 0.0
    scorers: int = 0
    changes: tuple[Change, ...] = ()
    seed: int = 0


def simulate(
    layout: Layout,
    costs: Costs,
    settings: Settings,
    steps: int,
    disturbance: Disturbance | None = None,
    expected: Costs | None = None,
) -> Report:
    """Simulates a run of `steps` steps.

    Args:
      layout: the workers at the beginning.
      costs: durations of commands.
      settings: the scheduler's; `steps` replaces their number of steps.
      steps: how many to run.
      disturbance: jitter, lost workers and so on; None: none of these.
      expected: costs that the scheduler assumes before it measures; None: the true ones.

    Raises:
      ConfigError: settings that cannot work.
    """
    settings = dataclasses.replace(settings, steps=steps)
    scheduler = Scheduler(settings, expected or costs)
    return _Simulation(layout, costs, settings, disturbance or Disturbance(), scheduler).run()


class _Simulation:
    """The virtual clock, and the records of a simulation."""

    def __init__(
        self,
        layout: Layout,
        costs: Costs,
        settings: Settings,
        disturbance: Disturbance,
        scheduler: Scheduler,
    ):
        self.layout, self.costs, self.settings = layout, costs, settings
        self.disturbance, self.scheduler = disturbance, scheduler
        self.random = random.Random(disturbance.seed)
        self.meshes: dict[str, Mesh] = {}
        self.events: list[tuple[float, int, Event]] = []  # heap by time, then by order of pushing
        self.pushed = 0
        self.scorers = [0.0] * disturbance.scorers  # heap of the times at which each is free
        self.recorder = Recorder()
        self.versions: dict[Fragment, int] = {}
        images = settings.groups * settings.images
        work = images * work_of_image(layout, costs)
        self.report = Report({}, layout.devices, work, images, self.recorder.intervals)

    def run(self) -> Report:
        """Runs until the scheduler is finished."""
        for number, mesh in enumerate(self.layout.rollout):
            self._join(0.0, f"rollout {number}", mesh)
        self._join(0.0, TRAINER, self.layout.trainer)
        for change in self.disturbance.changes:
            if change.mesh is not None:
                self._join(change.at, change.worker, change.mesh)
            else:
                self._push(Lost(change.at, change.worker))
        while not self.scheduler.finished:
            _, _, event = heapq.heappop(self.events)
            self._handle(event)
        for worker in self.report.devices:
            self.recorder.end_wait(worker, event.at)
        return self.report

    def _join(self, at: float, worker: str, mesh: Mesh) -> None:
        self.meshes[worker] = mesh
        self.report.devices[worker] = mesh.devices
        self._push(Joined(at, worker, mesh.speed))

    def _push(self, event: Event) -> None:
        heapq.heappush(self.events, (event.at, self.pushed, event))
        self.pushed += 1

    def _handle(self, event: Event) -> None:
        commands = self.scheduler.handle(event)
        for command in commands:
            if command.answered:
                self._start(command, event.at)
        if isinstance(event, Lost):
            self.recorder.end_wait(event.worker, event.at)
        elif isinstance(event, Joined):
            self.recorder.look_at(self.scheduler, event.worker, event.at)
        elif isinstance(event, Completed):
            if isinstance(event.command, Update):
                self._note_update(event)
            worker = getattr(event.command, "worker", None)
            if worker is not None and self.scheduler.is_there(worker):
                self.recorder.look_at(self.scheduler, worker, event.at)
        if self.scheduler.is_there(TRAINER):
            self.recorder.look_at(self.scheduler, TRAINER, event.at)

    def _start(self, command: Command, now: float) -> None:
        """Begins a command now, or as soon as a scorer or a giver of weights is free; schedules its completion."""
        name = getattr(command, "worker", "")
        speed = self.meshes[name].speed if name else 1.0
        seconds = self.costs.seconds(cost_of(command), self.settings.fragment_images, speed)
        if self.disturbance.jitter:
            seconds *= 1 + self.disturbance.jitter * self.random.uniform(-1, 1)
        start = now
        values: tuple[float, ...] = ()
        if isinstance(command, Score):
            if self.scorers:
                start = max(now, heapq.heappop(self.scorers))
                heapq.heappush(self.scorers, start + seconds)
            values = self._values(command.fragment)
        end = start + seconds
        self._push(Completed(end, command, end - now, values))
        self._note(command, start, end)

    def _values(self, fragment: Fragment) -> tuple[float, ...]:
        """Values, all equal in a group without variance; which groups these are is independent of the order."""
        images = self.settings.fragment_images
        if not self.disturbance.flat_groups:
            return (0.0, *(1.0,) * (images - 1))
        group = fragment.index // self.settings.unit_fragments
        draw = random.Random(f"{self.disturbance.seed} {fragment.step} {group}").random()
        flat = draw < self.disturbance.flat_groups
        first = 0.0 if flat else float(fragment.index)
        return (first, *(float(not flat),) * (images - 1))

    # ------------------------------------------------------------------------------ the report

    def _note(self, command: Command, start: float, end: float) -> None:
        """Records the interval of a command; transfers to and from a rollout worker occupy nobody."""
        name = getattr(command, "worker", "reward")
        fragment, kind = getattr(command, "fragment", None), command.kind
        if isinstance(command, Publish | Deliver) and name != TRAINER:
            if isinstance(command, Publish) and self.recorder.waits(name):
                self.recorder.wait(name, "publish", start)
            self.recorder.work(f"{command.kind} {name}", command.kind, start, end, fragment)
            return
        if fragment is not None and fragment.evaluation and name != "reward":
            kind = "evaluate"
        elif isinstance(command, Generate):
            self.versions[fragment] = command.version
            self.report.generated += 1
            if name == TRAINER and self.scheduler.has_rollout:
                kind = "tag"
                self.report.tagged += 1
        if isinstance(command, Train):
            self.report.trained_by_age[fragment.step - self.versions[fragment]] += 1
        self.recorder.work(name, kind, start, end, fragment)

    def _note_update(self, event: Completed) -> None:
        if event.command.update == self.settings.updates - 1:
            self.report.step_ends.append(event.at)


def work_of_image(layout: Layout, costs: Costs) -> float:
    """The least device-seconds of one image: its generation on the cheapest mesh, and its training."""
    meshes: Sequence[Mesh] = layout.rollout or (layout.trainer,)
    generation = min(mesh.devices / mesh.speed for mesh in meshes)
    generation *= costs.generate + costs.decode
    return generation + costs.train * layout.trainer.devices
