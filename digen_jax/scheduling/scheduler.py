"""The scheduler of a pool of workers: handles one event at a time and returns the resulting commands.

    event --> Scheduler.handle --> Pool (steps, weights, workers, costs) --> next work of idle workers --> commands

`handle` applies an event to the pool, then assigns work to every idle worker (`assignment`). Executors or the simulator
execute the commands and answer each with one event.
"""

from typing import Any

from digen_jax.scheduling.assignment import Assigner
from digen_jax.scheduling.commands import (
    SAMPLE,
    TRAIN,
    TRAINER,
    Chunk,
    Command,
    Completed,
    Decode,
    Deliver,
    DropChunks,
    Encode,
    Evaluate,
    Event,
    Failed,
    Generate,
    Joined,
    Removed,
    Score,
    SyncWeights,
    Train,
    Update,
    WeightsVersion,
    pack,
    unpack,
)
from digen_jax.scheduling.pool import SchedulerError, Worker
from digen_jax.scheduling.settings import CostModel, Costs, Settings
from digen_jax.scheduling.step import SCORING, Step


class Scheduler(Assigner):
    """A deterministic state machine: equal events lead to equal commands.

    It has no clock: events carry the time. It can be deep-copied, and saved at the end of a step.

    Args:
      settings: Settings; the number of steps and the chunks may differ from those of `saved`.
      costs: Expected costs. None means those of `saved`, and what was measured there.
      saved: Result of `save` in an earlier process. The clock starts at 0, workers have to join again, nothing is in
        flight, and started chunks are generated again, with their group's version. None means a new run.
    """

    def __init__(
        self, settings: Settings, costs: Costs | None, saved: dict[str, Any] | None = None
    ):
        start = saved or {"step": 0, "serials": 0, "versions": []}
        sizes = settings.chunk_images, settings.passes
        model = CostModel(costs, *sizes) if costs else unpack(start["costs"])
        super().__init__(settings, model, start["step"], start["serials"])
        for number, versions in start["versions"]:
            if number < settings.steps:
                self.steps[number] = step = Step(number, settings)
                step.restore_versions(versions, unpack(start["settings"]).unit_images)
                versions = (g.version for g in step.groups if g.version is not None)
                self.references.update(map(WeightsVersion, versions))
        self._open_steps()
        self._open_evaluation()

    def save(self) -> dict[str, Any]:
        """Returns the JSON state from which a new process continues, at the end of a step.

        Raises:
          ValueError: The current step is partly trained.
        """
        step = self._current_step
        if step is not None and (step.update or step.trained):
            raise ValueError("a scheduler can only be saved at the end of a step")
        versions = [[s.number, [g.version for g in s.groups]] for s in self.steps.values()]
        saved = {"step": self.step, "serials": self._serials, "versions": versions}
        return {**saved, "settings": pack(self.settings), "costs": pack(self.costs)}

    def handle(self, event: Event) -> list[Command]:
        """Applies an event and returns the resulting commands, in the order in which to send them.

        Completions and failures of commands that are no longer in flight are ignored.

        Raises:
          SchedulerError: No worker can do the remaining work, or a piece of it failed too often.
        """
        self._out = []
        self.now = max(self.now, event.at)
        match event:
            case Joined():
                self._join(event)
            case Removed():
                self._remove(event.worker)
            case Completed() | Failed():
                if self.in_flight.pop(event.command.serial, None):
                    self._answer(event)
        self._dispatch()
        return self._out

    # -------------------------------------------------------------------------------------- events

    def _join(self, event: Joined) -> None:
        """Adds a worker. If its name is known, the old worker disconnected without notice."""
        if event.worker in self.workers:
            self._remove(event.worker)
        worker = Worker(event.worker, self._joins, event.roles, event.spare)
        self._joins += 1
        self.workers[worker.name] = worker
        if TRAINER not in self.workers:
            return
        self._assign_roles()
        if worker.name == TRAINER:
            worker.held.add(self._current_weights)
        for one in self.workers.values() if worker.name == TRAINER else [worker]:
            self._sync(one)

    def _remove(self, name: str) -> None:
        """Removes a worker, requeues its chunks and passes, and takes its commands out of flight."""
        if name == TRAINER:
            raise SchedulerError(
                "the trainer disconnected: restart the run from its last checkpoint"
            )
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self._assign_roles()
        if worker.task is not None:
            self._requeue(worker.task.chunk)
        if worker.piece is not None:
            self._return_piece(worker)
        # An update in flight may already have the worker's sums; if not, it fails.
        sums = not any(isinstance(command, Update) for command in self.in_flight.values())
        interrupted = []  # deliveries to the worker
        for serial, command in list(self.in_flight.items()):
            if command.receiver == name:
                del self.in_flight[serial]
                if isinstance(command, Deliver):
                    interrupted.append(command.chunk)
            elif isinstance(command, Deliver) and command.worker == name:
                del self.in_flight[serial]
                receiver = self.workers[command.to]
                if receiver.busy == serial:
                    receiver.busy = None
                    self._return_piece(receiver)
                    self._set_idle(receiver)
        scores = [one for one in self.in_flight.values() if isinstance(one, Score)]
        lost = {one.chunk for one in scores if one.maker == name}
        for step in self.steps.values():
            lost |= {Chunk(step.number, index) for index in step.remove_worker(name, sums)}
        for score in scores:
            if score.chunk in lost:
                del self.in_flight[score.serial]
        for chunk in lost:
            self._requeue(chunk)
        for chunk in interrupted:
            self._deliver(chunk)

    def _return_piece(self, worker: Worker) -> None:
        """Makes the passes of a worker's unfinished piece available again."""
        self._current_step.return_piece(worker.piece)
        worker.piece = None

    def _answer(self, event: Completed | Failed) -> None:
        """Handles the answer to a command that was in flight; its worker, if free, continues."""
        worker = self.workers.get(event.command.receiver)
        occupied = worker is not None and worker.busy == event.command.serial
        if occupied:
            worker.busy = None
        if isinstance(event, Completed):
            self._complete(event, worker)
        else:
            self._fail(event, worker, occupied)
        if worker is not None and worker.busy is None:
            self._continue(worker)

    def _complete(self, event: Completed, worker: Worker | None) -> None:
        """Applies the result of a command to its worker and its step."""
        command = event.command
        self.costs.observe(command, event.seconds)
        # A chunk counts as generated after it is decoded.
        if self.failures and not isinstance(command, Encode | Generate):
            self.failures.pop(self.work(command), None)
        match command:
            case SyncWeights():
                worker.arriving.discard(command.weights_version)
                if self._is_needed(command.weights_version):
                    worker.held.add(command.weights_version)
                self._sync(worker)
            case Encode():
                worker.encoded.add(command.step)
            case Generate():
                worker.task.generated = True
            case Decode():
                self.failed_on.pop(command.chunk, None)
                self._decoded(worker, command.chunk)
            case Deliver():
                self._delivered_to(worker, command)
            case Score(chunk=chunk) if chunk.evaluation:
                self._scored_evaluation(chunk.step)
            case Score(chunk=chunk) if self._is_wanted(chunk):
                self.steps[chunk.step].chunks[chunk.index].values = event.values
                self._score(chunk)
            case Train():
                worker.failed[TRAIN] = 0
                self._current_step.trained_piece(worker.name, worker.piece)
                worker.piece = None
            case Update():
                self._updated()

    def _fail(self, event: Failed, worker: Worker | None, occupied: bool) -> None:
        """Repeats the work of a failed command, on another worker if possible; it `occupied` its worker or did not."""
        command: Any = event.command
        if self.is_superseded(command):
            worker.arriving.discard(command.weights_version)
            return self._sync(worker)
        if not (isinstance(command, Update) and self._missing_sums()):
            self._count_failure(command, event.reason)
        match command:  # a failed update is issued again once all passes are trained
            case Encode() | Generate() | Decode():
                chunk = worker.task.chunk
                worker.task = None
                self._requeue(chunk)
                if self._is_wanted(chunk):
                    self.failed_on.setdefault(chunk, []).append(worker.name)
                self._fail_role(worker, SAMPLE, event.reason)
            case Train():
                self._return_piece(worker)
                self._fail_role(worker, TRAIN, event.reason)
            case SyncWeights():
                worker.arriving.discard(command.weights_version)
                if self._is_needed(command.weights_version):
                    self._send_weights(worker, command.weights_version)
            case Deliver():
                if occupied:
                    self._return_piece(worker)
                else:
                    self._deliver(command.chunk)
            case Score():
                if self._is_wanted(command.chunk):
                    self._issue(Score, command.chunk, command.maker)
        return None

    def _missing_sums(self) -> bool:
        """Requeues passes whose sums disconnected workers held before an update; returns whether there are any."""
        step = self._current_step
        removed = [name for name in step.pieces if name not in self.workers]
        for name in removed:
            for index in step.remove_worker(name):
                self._requeue(Chunk(step.number, index))
        return bool(removed)

    def _updated(self) -> None:
        """Ends an update set; the last one of a step creates the new version and starts the next step."""
        step, old = self._current_step, self._current_weights
        if step.next_set():
            del self.steps[self.step]
            self.step += 1
            self.references.setdefault(WeightsVersion(self.step), 0)
            self._open_evaluation()
            used = [g.version for g in step.groups if g.version is not None and not g.untrained]
            kept = (one.version for one in self.references if not one.evaluated)
            for version in sorted({*used, *kept}):
                self._release(WeightsVersion(version), used.count(version))
            self._open_steps()
        self.workers[TRAINER].held.add(self._current_weights)
        for worker in self.workers.values():
            if old.update:
                worker.held.discard(old)
            worker.encoded = {number for number in worker.encoded if number >= self.step}
            self._sync(worker)

    # -------------------------------------------------------- scores and samples of decoded chunks

    def _decoded(self, worker: Worker, chunk: Chunk) -> None:
        """Issues the scoring of a decoded chunk, and its delivery if the worker does not train."""
        worker.task, worker.failed[SAMPLE] = None, 0
        if not self._is_wanted(chunk):
            return
        if not chunk.evaluation:
            step = self.steps[chunk.step]
            step.decoded(chunk.index, worker.name, self.now + self.costs.handover())
            state = step.chunks[chunk.index]
            if TRAIN in worker.roles:
                state.holders.add(worker.name)
            else:
                self._deliver(chunk)
            if state.values is not None:
                return self._score(chunk)
        self._issue(Score, chunk, worker.name)

    def _deliver(self, chunk: Chunk) -> None:
        """Sends samples that no training worker has, if any, to the next training worker in rotation."""
        step = self.steps.get(chunk.step)
        if step is None or step.chunks[chunk.index].stage != SCORING:
            return
        turn = chunk.index if self.settings.ordered else self._delivered
        self._delivered += 1
        receiver = self.trainers[turn % len(self.trainers)]
        version = step.group_of(chunk.index).version
        self._issue(Deliver, step.chunks[chunk.index].maker, chunk, version, receiver)

    def _delivered_to(self, worker: Worker, command: Deliver) -> None:
        if not self._is_wanted(command.chunk):
            return
        state = self.steps[command.chunk.step].chunks[command.chunk.index]
        if state.maker == command.worker and state.maker not in state.holders:
            state.maker = ""  # a worker that only samples frees samples that another worker has
        state.holders.add(worker.name)
        self._score(command.chunk)

    def _score(self, chunk: Chunk) -> None:
        """Continues with a chunk once it is both scored and delivered; drops candidates that became superfluous."""
        step = self.steps[chunk.step]
        step.score(chunk.index)
        started, versions = step.drop_others()
        if started:
            self._issue(DropChunks, tuple(Chunk(step.number, index) for index in started))
        for version in versions:
            self._release(WeightsVersion(version), 1)

    def _scored_evaluation(self, version: int) -> None:
        """Counts a scored chunk of a version's evaluation; the last one ends it."""
        evaluation = self.evaluations[version]
        evaluation.unscored -= 1
        if not evaluation.unscored:
            del self.evaluations[version]
            self._issue(Evaluate, version)
            self._release(self._evaluated(version), 1)
