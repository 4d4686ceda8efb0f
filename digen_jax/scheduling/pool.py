"""State of the scheduler between two events: workers with their roles, weights versions, steps, open commands.

`Pool` keeps this state consistent and issues commands; `scheduler.Scheduler` handles events and chooses the next work.
"""

import dataclasses
import heapq
from collections import Counter
from typing import Any

from digen_jax.scheduling.commands import (
    SAMPLE,
    TRAIN,
    TRAINER,
    Chunk,
    Command,
    DropVersion,
    Encode,
    Score,
    SyncWeights,
    Update,
    WeightsVersion,
)
from digen_jax.scheduling.settings import CostModel, Settings
from digen_jax.scheduling.step import DROPPED, Piece, Step

FAILURES = 2  # consecutive failures after which a worker loses a role


class SchedulerError(RuntimeError):
    """The run cannot continue: no worker can do the remaining work, or a piece of it failed too often."""


@dataclasses.dataclass
class Task:
    """A chunk that a worker samples, and its progress."""

    chunk: Chunk
    weights_version: WeightsVersion
    generated: bool = False


@dataclasses.dataclass
class Worker:
    """A worker of the pool. `roles` are in order of preference; `task` is set until the chunk is decoded."""

    name: str
    order: int  # position in the order of joining
    first_roles: tuple[str, ...]  # roles that it joined with
    spare: tuple[str, ...] = ()  # roles that it takes while no other worker has them
    roles: tuple[str, ...] = ()
    held: set[WeightsVersion] = dataclasses.field(default_factory=set)
    arriving: set[WeightsVersion] = dataclasses.field(default_factory=set)
    encoded: set[int] = dataclasses.field(default_factory=set)  # steps
    task: Task | None = None
    piece: Piece | None = None
    busy: int | None = None  # serial of the command that occupies it
    failed: Counter[str] = dataclasses.field(default_factory=Counter)  # consecutive, by role

    def can(self, role: str) -> bool:
        """Returns whether it may take a role: it joined with it (spare or not) and has not lost it after failures."""
        return role in (*self.first_roles, *self.spare) and self.failed[role] < FAILURES

    @property
    def is_idle(self) -> bool:
        """Whether it has no task, no piece and no command."""
        return not (self.task or self.piece or self.busy)


@dataclasses.dataclass
class PendingEvaluation:
    """The chunks of a version's evaluation."""

    queue: list[int]  # heap
    unscored: int


class Pool:
    """Workers and open work. `step` is the current step, which is also the newest version of the weights."""

    def __init__(self, settings: Settings, costs: CostModel, step: int, serials: int):
        self.settings, self.costs = settings, costs
        self.now, self.step = 0.0, step
        self.steps: dict[int, Step] = {}  # the current and later ones
        self.evaluations: dict[int, PendingEvaluation] = {}  # by version
        self.workers: dict[str, Worker] = {}
        self.trainers: list[str] = []  # workers that train, in order
        self.samplers: list[str] = []
        # Heaps of idle workers, (order of joining, name), by their roles.
        self.idle: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        self.in_flight: dict[int, Command] = {}
        # Number of groups and evaluations that need each weights version that the home worker keeps.
        self.references = Counter({WeightsVersion(step): 0})
        self.failures = Counter[str]()  # by piece of work
        self.failed_on: dict[Chunk, list[str]] = {}  # workers on which sampling a chunk failed
        self._serials, self._joins = serials, 0
        self._delivered = 0  # chunks of workers that only sample; selects the next receiver
        self._out: list[Command] = []  # commands issued by the current event

    @property
    def finished(self) -> bool:
        """Whether all steps and evaluations are done."""
        return self.step == self.settings.steps and not self.evaluations

    @property
    def kept(self) -> list[WeightsVersion]:
        """Weights that the home worker keeps and that a checkpoint contains."""
        return sorted(self.references)

    def is_superseded(self, command: Command) -> bool:
        """Returns whether a command sends weights that the worker no longer needs because newer ones exist."""
        if not isinstance(command, SyncWeights) or command.weights_version == self._current_weights:
            return False
        worker = self.workers.get(command.worker)
        task = worker and worker.task
        return not (task and task.weights_version == command.weights_version)

    def waits_for(self, name: str) -> str | None:
        """Returns the cause of a worker's wait, one of `commands.CAUSES`, or None if it is busy."""
        worker, step = self.workers[name], self._current_step
        if worker.busy is not None:
            return None
        if worker.task is not None or (worker.arriving and step is not None):
            return "weights"
        if self.evaluations and (step is None or step.set_trained):
            return "evaluation"
        if step is None:
            return "end"
        if step.set_trained:
            return "update"
        if step.queued or step.sampling:
            return "sampling"
        return "reward" if step.left and TRAIN in worker.roles else "training"

    def work(self, command: Any) -> str:
        """Returns a description, for messages, of the piece of work that an answered command belongs to."""
        match command:
            case SyncWeights(weights_version=found):
                what = "the evaluated weights of version" if found.evaluated else "version"
                return f"sending {what} {found.version} to {command.worker}"
            case Update():
                return f"update {command.update} of step {command.step}"
            case Encode():
                chunk = self.workers[command.worker].task.chunk
            case _:
                chunk = command.chunk
        owner = "the evaluation of version" if chunk.evaluation else "step"
        verbs = {"score": "scoring", "train": "training on", "deliver": "delivering"}
        verb = verbs.get(command.kind, "generating")
        return f"{verb} chunk {chunk.index} of {owner} {chunk.step}"

    def _issue(self, kind: type[Command], *fields: Any, occupies: Worker | None = None) -> None:
        """Issues a command, which is in flight and occupies the worker `occupies`, if given, until it is answered."""
        self._serials += 1
        command = kind(self._serials, *fields)
        if command.answered:
            self.in_flight[command.serial] = command
        if occupies is not None:
            occupies.busy = command.serial
        self._out.append(command)

    # --------------------------------------------------------------------------- roles and failures

    def _assign_roles(self) -> None:
        """Assigns roles to workers.

        A role without a worker goes to workers that have it as a spare role, or else returns to workers that lost it.
        """
        workers, spare_roles = self.workers.values(), set()
        for role in (SAMPLE, TRAIN):
            able = [one for one in workers if one.can(role)]
            if not any(role in one.first_roles for one in able):
                spare_roles.add(role)
            if not able:
                for one in workers:
                    one.failed[role] = 0
        for worker in workers:
            own = (*worker.first_roles, *(role for role in worker.spare if role in spare_roles))
            roles = tuple(filter(worker.can, own))
            if roles != worker.roles:
                worker.roles = roles
                if worker.is_idle:
                    self._set_idle(worker)
        self.samplers = [one.name for one in workers if SAMPLE in one.roles]
        self.trainers = [one.name for one in workers if TRAIN in one.roles]
        for step in self.steps.values():
            step.turns.clear()  # the assignment of chunks to workers has changed

    def _set_idle(self, worker: Worker) -> None:
        heapq.heappush(self.idle.setdefault(worker.roles, []), (worker.order, worker.name))

    def _count_failure(self, command: Command, reason: str) -> None:
        """Counts a failure of a piece of work.

        Raises:
          SchedulerError: It failed more often than `retries` or `score_retries` allows.
        """
        settings, work = self.settings, self.work(command)
        self.failures[work] += 1
        count = self.failures[work]
        if count > (settings.score_retries if isinstance(command, Score) else settings.retries):
            raise SchedulerError(f"{work} failed {count} times, the last time with: {reason}")

    def _fail_role(self, worker: Worker, role: str, reason: str) -> None:
        """Counts a worker's failure in a role; after too many consecutive failures it loses the role.

        Raises:
          SchedulerError: No other worker has the role.
        """
        worker.failed[role] += 1
        if worker.failed[role] < FAILURES:
            return
        if not any(one.can(role) for one in self.workers.values() if one is not worker):
            raise SchedulerError(
                f"no worker is left that can {role}, the last failure is: {reason}"
            )
        self._assign_roles()

    # ----------------------------------------------------------------------- steps and evaluations

    @property
    def _current_step(self) -> Step | None:
        return self.steps.get(self.step)

    def _open_steps(self) -> None:
        """Opens the current step and the next steps within `max_policy_lag`."""
        last = min(self.step + self.settings.max_policy_lag, self.settings.steps - 1)
        for number in range(self.step, last + 1):
            if number not in self.steps:
                self.steps[number] = Step(number, self.settings)

    def _open_evaluation(self) -> None:
        """Opens the evaluation of the newest version if it is due."""
        if count := self.settings.evaluated_chunks(self.step):
            self.evaluations[self.step] = PendingEvaluation(list(range(count)), count)
            self.references[self._evaluated(self.step)] += 1

    def _evaluated(self, version: int) -> WeightsVersion:
        """Returns the weights that are evaluated for a version."""
        return WeightsVersion(version, self.settings.separate_eval_weights)

    def _is_wanted(self, chunk: Chunk) -> bool:
        """Returns whether a started chunk is still needed."""
        if chunk.evaluation:
            return chunk.step in self.evaluations
        step = self.steps.get(chunk.step)
        return step is not None and step.chunks[chunk.index].stage != DROPPED

    def _requeue(self, chunk: Chunk) -> None:
        """Queues a started chunk again if it is still needed."""
        if not self._is_wanted(chunk):
            return
        if chunk.evaluation:
            heapq.heappush(self.evaluations[chunk.step].queue, chunk.index)
        else:
            self.steps[chunk.step].requeue(chunk.index)

    # ------------------------------------------------------------------------------------- weights

    @property
    def _current_weights(self) -> WeightsVersion:
        """Weights that are being trained."""
        step = self._current_step
        return WeightsVersion(self.step, update=step.update if step else 0)

    def _newest(self, worker: Worker) -> WeightsVersion:
        return self._current_weights if TRAIN in worker.roles else WeightsVersion(self.step)

    def _sync(self, worker: Worker) -> None:
        """Sends a worker the newest weights that it needs, unless another transfer to it is in flight.

        When a transfer ends, only the newest version is sent next.
        """
        newest = self._newest(worker)
        if worker.name != TRAINER and not worker.arriving and newest not in worker.held:
            self._send_weights(worker, newest)

    def _send_weights(self, worker: Worker, weights_version: WeightsVersion) -> None:
        """Sends weights to a worker; occupies only the home worker, if it needs weights other than those it trains."""
        worker.arriving.add(weights_version)
        home = worker if worker.name == TRAINER else None
        self._issue(SyncWeights, worker.name, weights_version, occupies=home)

    def _is_needed(self, weights_version: WeightsVersion) -> bool:
        return weights_version in self.references or weights_version == self._current_weights

    def _release(self, weights_version: WeightsVersion, count: int) -> None:
        """Decrements the references of a weights version by `count`; drops old versions without references."""
        self.references[weights_version] -= count
        oldest = self.step - self.settings.max_policy_lag
        is_recent = not weights_version.evaluated and weights_version.version >= oldest
        newest = WeightsVersion(self.step)  # generates the next chunks
        if is_recent or weights_version == newest or self.references[weights_version]:
            return
        del self.references[weights_version]
        for worker in self.workers.values():
            worker.held.discard(weights_version)
        self._issue(DropVersion, weights_version)
