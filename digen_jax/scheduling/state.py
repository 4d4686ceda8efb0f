"""The scheduler's state, and the elementary changes that keep it consistent."""

import dataclasses
import heapq

from digen_jax.scheduling.batch import Batch
from digen_jax.scheduling.commands import (
    TRAINER,
    Checkpoint,
    Command,
    Decode,
    Deliver,
    DropFragments,
    DropVersion,
    Encode,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Switch,
    Train,
    Update,
)
from digen_jax.scheduling.costs import CostModel
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.tasks import Handover, PendingEvaluation, Task, Worker


class SchedulerError(RuntimeError):
    """The run cannot continue: the trainer is lost, or a piece of work failed too often."""


@dataclasses.dataclass
class SchedulerState:
    """The state between two events. `version` is the newest one; `step`, the present step, equals it."""

    settings: Settings
    costs: CostModel
    now: float = 0.0
    step: int = 0
    serials: int = 0
    joins: int = 0
    batches: dict[int, Batch] = dataclasses.field(default_factory=dict)  # steps on and ahead
    evaluations: dict[int, PendingEvaluation] = dataclasses.field(default_factory=dict)
    trainer: Worker | None = None
    rollout: dict[str, Worker] = dataclasses.field(default_factory=dict)
    idle: list[tuple[float, int, str]] = dataclasses.field(default_factory=list)  # heap of ranks
    in_flight: dict[int, Command] = dataclasses.field(default_factory=dict)
    # For weights that the trainer keeps: the number of groups and evaluations that need them.
    references: dict[Publication, int] = dataclasses.field(default_factory=dict)
    handovers: dict[Fragment, Handover] = dataclasses.field(default_factory=dict)
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    failed_on: dict[Fragment, list[str]] = dataclasses.field(default_factory=dict)
    rate: float | None = None  # fragments a second of all rollout workers; None: to be computed

    @classmethod
    def begin(cls, settings: Settings, costs: Costs) -> "SchedulerState":
        """The state before the first event."""
        state = cls(settings, CostModel(costs, settings.fragment_images))
        state.references[Publication(0)] = 0
        state.open_batches()
        state.open_evaluation()
        return state

    @property
    def version(self) -> int:
        """The newest published version: one a step."""
        return self.step

    @property
    def batch(self) -> Batch | None:
        """The present step; None after the last one."""
        return self.batches.get(self.step)

    @property
    def finished(self) -> bool:
        """Whether all steps and evaluations are done."""
        return self.step == self.settings.steps and not self.evaluations

    def worker(self, name: str) -> Worker | None:
        """A worker that has joined, or None."""
        return self.trainer if name == TRAINER else self.rollout.get(name)

    def open_batches(self) -> None:
        """Begins the bookkeeping of the present step and of the next steps within `staleness`."""
        last = min(self.step + self.settings.staleness, self.settings.steps - 1)
        for step in range(self.step, last + 1):
            if step not in self.batches:
                self.batches[step] = Batch.begin(step, self.settings)

    def open_evaluation(self) -> None:
        """Begins the evaluation of the newest version if it is due."""
        count = self.settings.evaluated_fragments(self.version)
        if count:
            self.evaluations[self.version] = PendingEvaluation(
                self.version, list(range(count)), count
            )
            self.refer(self.evaluated(self.version))

    def evaluated(self, version: int) -> Publication:
        """The weights that are evaluated for a version."""
        return Publication(version, self.settings.evaluated_apart)

    def end_step(self, out: list[Command]) -> None:
        """Ends a step after its last update: its version exists, and the next step begins."""
        del self.batches[self.step]
        self.step += 1
        self.references.setdefault(Publication(self.version), 0)
        self.open_evaluation()
        self.release(Publication(self.version - 1), 0, out)
        for worker in (self.trainer, *self.rollout.values()):
            worker.encoded = {step for step in worker.encoded if step >= self.step}
        for worker in self.rollout.values():
            self.publish_newest(worker, out)
        self.open_batches()
        self.rate = None
        every = self.settings.checkpoint_every
        if every and (self.step % every == 0 or self.step == self.settings.steps):
            out.append(Checkpoint(self.next_serial(), self.step - 1))

    # ------------------------------------------------------------------------------ commands

    def next_serial(self) -> int:
        """The number of the next command."""
        self.serials += 1
        return self.serials

    def send(self, command: Command, out: list[Command], worker: Worker | None = None) -> None:
        """Issues a command that will be answered; until then it occupies `worker`."""
        self.in_flight[command.serial] = command
        if worker is not None:
            worker.busy = command.serial
        out.append(command)

    def publish(self, worker: Worker, publication: Publication, out: list[Command]) -> None:
        """Sends weights to a worker; the transfer occupies only the trainer."""
        worker.arriving.add(publication)
        command = Publish(self.next_serial(), worker.name, publication)
        self.send(command, out, worker if worker is self.trainer else None)

    def publish_newest(self, worker: Worker, out: list[Command]) -> None:
        """Sends a rollout worker the newest version if no other transfer to it is in flight.

        So the worker gets only the last of the versions that are published during a transfer.
        """
        newest = Publication(self.version)
        if not worker.arriving and newest not in worker.held:
            self.publish(worker, newest, out)

    def is_superseded(self, command: Publish) -> bool:
        """Whether a newer version than the one in transfer exists, and the worker's task does not need the latter."""
        worker = self.worker(command.worker)
        task = worker and worker.task
        waited_for = task and task.publication == command.publication
        return command.version < self.version and not waited_for

    def hand_over(self, worker: Worker, fragment: Fragment, out: list[Command]) -> None:
        """Requests a decoded fragment's values, and the delivery of its samples to the trainer."""
        self.handovers[fragment] = Handover(worker.name, delivered=fragment.evaluation)
        self.score(fragment, out)
        if not fragment.evaluation:
            self.deliver(worker, fragment, out)

    def score(self, fragment: Fragment, out: list[Command]) -> None:
        """Requests a fragment's values."""
        self.send(Score(self.next_serial(), fragment, self.handovers[fragment].worker), out)

    def deliver(self, worker: Worker, fragment: Fragment, out: list[Command]) -> None:
        """Sends a fragment's samples to the trainer; this occupies only a trainer that sends its own fragment."""
        version = self.batches[fragment.step].group_of(fragment.index).version
        command = Deliver(self.next_serial(), worker.name, fragment, version)
        self.send(command, out, worker if worker is self.trainer else None)

    # ------------------------------------------------------------------------------ versions

    def refer(self, publication: Publication) -> None:
        """Counts one more group or evaluation that needs some weights."""
        self.references[publication] = self.references.get(publication, 0) + 1

    def release(self, publication: Publication, count: int, out: list[Command]) -> None:
        """Counts `count` groups fewer that need some weights; drops old weights that nobody needs."""
        self.references[publication] -= count
        newest = Publication(self.version)  # samples the next fragments
        if publication != newest and not self.references[publication]:
            del self.references[publication]
            for worker in filter(None, (self.trainer, *self.rollout.values())):
                worker.held.discard(publication)
            out.append(DropVersion(self.next_serial(), publication))

    # ----------------------------------------------------------------------------- fragments

    def wanted(self, fragment: Fragment) -> bool:
        """Whether a begun fragment is still needed."""
        if fragment.evaluation:
            return fragment.step in self.evaluations
        batch = self.batches.get(fragment.step)
        return batch is not None and batch.stages[fragment.index] != "dropped"

    def assign(self, worker: Worker, fragment: Fragment) -> None:
        """Assigns a fragment to a worker, with its group's version or the newest one."""
        worker.free_at = self.now + self.generation_seconds(worker)
        if fragment.evaluation:
            heapq.heappop(self.evaluations[fragment.step].queue)
            worker.free_at = self.now + self.evaluation_seconds(worker)
            worker.task = Task(fragment, self.evaluated(fragment.step))
            return
        batch = self.batches[fragment.step]
        version = batch.group_of(fragment.index).version
        if version is None:
            version = self.version
        scored_at = worker.free_at + self.handover_seconds()
        if batch.generate(fragment.index, version, scored_at):
            self.refer(Publication(version))
        worker.task = Task(fragment, Publication(version))

    def give_back(self, worker: Worker) -> None:
        """Returns a worker's fragment to the queue."""
        fragment = worker.task.fragment
        worker.task = None
        self.requeue(fragment)

    def lose(self, worker: Worker) -> None:
        """Requeues all fragments of a worker that were not handed over."""
        if worker.task is not None:
            self.give_back(worker)
        lost = [f for f, handover in self.handovers.items() if handover.worker == worker.name]
        for fragment in lost:
            del self.handovers[fragment]
            self.requeue(fragment)
        for serial, command in list(self.in_flight.items()):
            scored = isinstance(command, Score) and command.fragment in lost
            if scored or getattr(command, "worker", None) == worker.name:
                del self.in_flight[serial]

    def requeue(self, fragment: Fragment) -> None:
        """Queues a begun fragment again, if it is still wanted."""
        if not self.wanted(fragment):
            return
        if fragment.evaluation:
            heapq.heappush(self.evaluations[fragment.step].queue, fragment.index)
        else:
            self.batches[fragment.step].requeue(fragment.index)

    def drop_others(self, batch: Batch, out: list[Command]) -> None:
        """Drops the candidates outside the step as soon as its members are known."""
        if batch.settled or not batch.candidates.dynamic or not batch.candidates.step_known:
            return
        begun, versions = batch.drop_others()
        if begun:
            fragments = tuple(Fragment(batch.step, index) for index in begun)
            for fragment in fragments:
                self.handovers.pop(fragment, None)
            out.append(DropFragments(self.next_serial(), fragments))
        for version in versions:
            self.release(Publication(version), 1, out)

    # -------------------------------------------------------------------------------- workers

    def set_idle(self, worker: Worker) -> None:
        """Marks a rollout worker as free for work."""
        heapq.heappush(self.idle, worker.rank)

    def rollout_rate(self) -> float:
        """Fragments a second of all rollout workers, computed once a step or after a change of workers."""
        if self.rate is None:
            seconds = map(self.generation_seconds, self.rollout.values())
            self.rate = sum(1 / max(1e-12, s) for s in seconds)
        return self.rate

    def generation_seconds(self, worker: Worker) -> float:
        """Expected seconds in which a worker generates and decodes a fragment."""
        return self._seconds(worker, "generate") + self._seconds(worker, "decode")

    def evaluation_seconds(self, worker: Worker) -> float:
        """The same for a fragment of an evaluation."""
        return self._seconds(worker, "evaluate") + self._seconds(worker, "decode evaluation")

    def _seconds(self, worker: Worker, kind: str) -> float:
        return self.costs.predict(kind, worker.name, worker.speed)

    def handover_seconds(self) -> float:
        """Expected seconds until a decoded fragment is scored and delivered."""
        return max(self.costs.predict(kind, "", 1.0) for kind in ("score", "deliver"))

    def fail(self, command: Command, reason: str) -> None:
        """Counts a failure of a piece of work.

        Raises:
          SchedulerError: it failed more often than `retries`, or `score_retries`, allows.
        """
        settings = self.settings
        retries = settings.score_retries if isinstance(command, Score) else settings.retries
        key = self.work(command)
        self.failures[key] = self.failures.get(key, 0) + 1
        if self.failures[key] > retries:
            raise SchedulerError(
                f"{key} failed {self.failures[key]} times, the last time with: {reason}"
            )

    def forget_failures(self, command: Command) -> None:
        """Forgets the failures of completed work; a fragment counts as generated after it is decoded."""
        if self.failures and not isinstance(command, Encode | Generate):
            self.failures.pop(self.work(command), None)
        if self.failed_on and isinstance(command, Decode):
            self.failed_on.pop(command.fragment, None)

    def work(self, command: Command) -> str:
        """The piece of work that a command belongs to, in words."""
        if isinstance(command, Publish):
            what = (
                "the evaluated weights of version" if command.publication.evaluated else "version"
            )
            return f"publishing {what} {command.version} to {command.worker}"
        if isinstance(command, Encode):
            fragment = self.worker(command.worker).task.fragment
        elif isinstance(command, Generate | Decode | Deliver | Score | Train):
            fragment = command.fragment
        elif isinstance(command, Update):
            return f"update {command.update} of step {command.step}"
        elif isinstance(command, Switch):
            return f"making the trainer's devices {command.role}"
        else:
            return f"the command {command.kind!r}"
        owner = "the evaluation of version" if fragment.evaluation else "step"
        verbs = {"score": "scoring", "train": "training on", "deliver": "delivering"}
        verb = verbs.get(command.kind, "generating")
        return f"{verb} fragment {fragment.index} of {owner} {fragment.step}"
