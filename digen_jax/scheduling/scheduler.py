"""The scheduler: it takes one event and returns the resulting commands."""

from typing import Any

from digen_jax.scheduling import saving
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    Deliver,
    Encode,
    Evaluate,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Switch,
    Train,
    Update,
)
from digen_jax.scheduling.costs import cost_of
from digen_jax.scheduling.dispatch import continue_task, give_work
from digen_jax.scheduling.events import Completed, Event, Failed, Joined, Lost
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.state import SchedulerError, SchedulerState
from digen_jax.scheduling.tasks import Worker


class Scheduler:
    """A deterministic state machine: equal events lead to equal commands.

    It has no clock; events carry the time. It can be deep-copied, and saved between two events.
    """

    def __init__(self, settings: Settings, costs: Costs):
        self.state = SchedulerState.begin(settings, costs)

    def handle(self, event: Event) -> list[Command]:
        """Applies an event and returns the resulting commands, in the order in which to send them.

        A completion or failure of a command that is not in flight (any more) changes nothing.

        Raises:
          SchedulerError: the trainer is lost, or something failed too often.
        """
        state, out = self.state, []
        state.now = max(state.now, event.at)
        match event:
            case Joined():
                self._joined(event, out)
            case Lost():
                self._lost(event)
            case Completed():
                if state.in_flight.pop(event.command.serial, None) is not None:
                    self._completed(event, out)
            case Failed():
                if state.in_flight.pop(event.command.serial, None) is not None:
                    self._failed(event, out)
        give_work(state, out)
        return out

    @property
    def finished(self) -> bool:
        """Whether all steps and evaluations are done."""
        return self.state.finished

    @property
    def kept(self) -> list[Publication]:
        """The weights that the trainer keeps and that a checkpoint contains."""
        return sorted(self.state.references)

    def save(self) -> dict[str, Any]:
        """The whole state of the scheduler, as JSON."""
        return saving.pack(self.state)

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> "Scheduler":
        """The scheduler as it was saved; commands in flight stay in flight."""
        scheduler = cls.__new__(cls)
        scheduler.state = saving.unpack(saved)
        return scheduler

    @classmethod
    def resume(
        cls, saved: dict[str, Any], settings: Settings | None = None, costs: Costs | None = None
    ) -> "Scheduler":
        """The scheduler in a new process, whose clock begins at 0: workers have to join again.

        Nothing is in flight. Begun fragments are generated again, with the version of their group.

        Args:
          saved: the result of `save`.
          settings: new settings, if the number of steps or the devices changed; None: as saved.
          costs: expected costs, if the measured ones are of other devices; None: the measured ones hold.

        Raises:
          ValueError: it was saved after a part of a step was trained.
        """
        scheduler = cls.restore(saved)
        saving.rewind(scheduler.state, settings, costs)
        return scheduler

    def is_superseded(self, command: Command) -> bool:
        """Whether a command sends a version that the worker no longer needs because a newer one exists."""
        return isinstance(command, Publish) and self.state.is_superseded(command)

    def awaits(self, command: Command) -> bool:
        """Whether a command is in flight: after its worker's loss it no longer is."""
        return command.serial in self.state.in_flight

    @property
    def has_rollout(self) -> bool:
        """Whether there is a rollout worker at present."""
        return bool(self.state.rollout)

    def is_there(self, worker: str) -> bool:
        """Whether a worker has joined and was not lost."""
        return self.state.worker(worker) is not None

    def is_busy(self, worker: str) -> bool:
        """Whether a worker is occupied by a command."""
        return self.state.worker(worker).busy is not None

    def waits_for(self, worker: str) -> str:
        """What an idle worker waits for, one of `timeline.CAUSES`."""
        state = self.state
        found, batch = state.worker(worker), state.batch
        if found.task is not None or (found.arriving and batch is not None):
            return "publish"
        if state.evaluations and (batch is None or (batch.in_last_set and batch.set_trained)):
            return "evaluation"
        if batch is None:
            return "end"
        if worker != TRAINER:
            return "trainer" if not batch.queued else "faster worker"
        return "generation" if batch.queued or batch.generating else "reward"

    # -------------------------------------------------------------------------------- events

    def _joined(self, event: Joined, out: list[Command]) -> None:
        """Adds a worker; if its name is known, the old worker was lost without notice."""
        state = self.state
        if event.worker in state.rollout:
            self._lost(Lost(event.at, event.worker))
        worker = Worker(event.worker, event.speed, state.joins)
        state.joins += 1
        if event.worker == TRAINER:
            if state.trainer is not None:
                raise SchedulerError("the trainer joined a second time: it cannot be replaced")
            worker.role = "train"
            state.trainer = worker
            return
        state.rollout[worker.name] = worker
        state.publish(worker, Publication(state.version), out)
        state.set_idle(worker)
        state.rate = None

    def _lost(self, event: Lost) -> None:
        """Requeues a lost worker's fragments; its commands are no longer in flight."""
        state = self.state
        if event.worker == TRAINER:
            raise SchedulerError("the trainer is lost: restart the run from its last checkpoint")
        worker = state.rollout.get(event.worker)
        if worker is None:
            return
        del state.rollout[worker.name]
        state.lose(worker)
        state.rate = None

    def _completed(self, event: Completed, out: list[Command]) -> None:
        """Applies the completion of a command that was in flight."""
        state, command = self.state, event.command
        name = getattr(command, "worker", "")
        worker = state.worker(name)
        speed = worker.speed if worker else 1.0
        state.costs.observe(cost_of(command), name, speed, event.seconds)
        state.forget_failures(command)
        if worker is not None and worker.busy == command.serial:
            worker.busy = None
        match command:
            case Switch():
                worker.role = command.role
            case Publish():
                worker.arriving.discard(command.publication)
                if command.publication in state.references:
                    worker.held.add(command.publication)
            case Encode():
                worker.encoded.add(command.step)
            case Generate():
                worker.task.generated = True
            case Decode():
                self._decoded(worker, command.fragment, out)
            case Deliver():
                if handover := state.handovers.get(command.fragment):
                    handover.delivered = True
                    self._handed_over(command.fragment, out)
            case Score():
                if handover := state.handovers.get(command.fragment):
                    handover.values = event.values
                    self._handed_over(command.fragment, out)
            case Train():
                if state.batch.trained(command.fragment.index):
                    version = state.batch.group_of(command.fragment.index).version
                    state.release(Publication(version), 1, out)
            case Update():
                if state.batch.next_set():
                    state.end_step(out)
        self._go_on(worker, out)
        if isinstance(command, Publish) and worker is not state.trainer:
            state.publish_newest(worker, out)

    def _go_on(self, worker: Worker | None, out: list[Command]) -> None:
        """Continues a rollout worker's task, or gives it up if it has become superfluous."""
        state = self.state
        if worker is None or worker is state.trainer or worker.busy is not None:
            return
        if worker.task is not None and not state.wanted(worker.task.fragment):
            worker.task = None
        if worker.task is not None:
            continue_task(state, worker, out)
        else:
            state.set_idle(worker)

    def _decoded(self, worker: Worker, fragment: Fragment, out: list[Command]) -> None:
        state = self.state
        worker.task = None
        if not state.wanted(fragment):
            return
        if not fragment.evaluation:
            scored_at = state.now + state.handover_seconds()
            state.batches[fragment.step].decode(fragment.index, scored_at)
        state.hand_over(worker, fragment, out)

    def _handed_over(self, fragment: Fragment, out: list[Command]) -> None:
        """One part of a handover is done: continues with the fragment when both parts are."""
        state, handover = self.state, self.state.handovers[fragment]
        if handover.values is None or not handover.delivered:
            return
        del state.handovers[fragment]
        if not fragment.evaluation:
            batch = state.batches[fragment.step]
            batch.score(fragment.index, handover.values)
            state.drop_others(batch, out)
            return
        evaluation = state.evaluations[fragment.step]
        evaluation.unscored -= 1
        if not evaluation.unscored:
            del state.evaluations[fragment.step]
            out.append(Evaluate(state.next_serial(), fragment.step))
            state.release(state.evaluated(fragment.step), 1, out)

    def _failed(self, event: Failed, out: list[Command]) -> None:
        """Repeats the work of a failed command, on another worker if possible."""
        state, command = self.state, event.command
        worker = state.worker(getattr(command, "worker", ""))
        if isinstance(command, Publish) and state.is_superseded(command):
            worker.arriving.discard(command.publication)
            if worker is not state.trainer:
                state.publish_newest(worker, out)
            return
        state.fail(command, event.reason)
        if worker is not None and worker.busy == command.serial:
            worker.busy = None
        match command:
            case Encode() | Generate() | Decode():
                fragment = worker.task.fragment
                state.give_back(worker)
                if state.wanted(fragment):
                    state.failed_on.setdefault(fragment, []).append(worker.name)
                self._go_on(worker, out)
            case Publish():
                worker.arriving.discard(command.publication)
                if command.publication in state.references and worker is not state.trainer:
                    state.publish(worker, command.publication, out)
            case Deliver():
                if command.fragment in state.handovers:
                    state.deliver(worker, command.fragment, out)
            case Score():
                if command.fragment in state.handovers:
                    state.score(command.fragment, out)
            case Train():
                state.batch.retrain(command.fragment.index)
