"""The scheduler of a pool of workers: handles one event at a time and returns the resulting commands.

    event --> scheduler.handle --> state (steps, weights, workers, costs) --> next work of idle workers --> commands

`handle` applies an event to the state, then assigns work to every idle worker. Executors or the simulator
execute the commands and answer each with one event.

Every worker samples, trains, or does both; `_next_work` chooses its next work.
"""

import heapq
import math
from typing import Any

from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Command,
    Completed,
    Decode,
    Deliver,
    DropChunks,
    DropVersion,
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
)
from digen_jax.scheduling.settings import CostModel, Costs, Settings
from digen_jax.scheduling.state import (
    SAMPLE,
    TRAIN,
    Handover,
    PendingEvaluation,
    SchedulerState,
    Task,
    Worker,
    pack,
    unpack,
)
from digen_jax.scheduling.step import DROPPED, SAMPLING, SCORING, Step

FAILURES = 2  # consecutive failures after which a worker loses a role


class SchedulerError(RuntimeError):
    """The run cannot continue: no worker can do the remaining work, or a piece of it failed too often."""


class Scheduler:
    """A deterministic state machine: equal events lead to equal commands.

    It has no clock: events carry the time. It can be deep-copied, and saved at the end of a step.
    """

    def __init__(self, settings: Settings, costs: Costs):
        self.state = SchedulerState(settings, CostModel.create(costs, settings))
        self.state.references[WeightsVersion(0)] = 0
        self._open_steps()
        self._open_evaluation()

    def handle(self, event: Event) -> list[Command]:
        """Applies an event and returns the resulting commands, in the order in which to send them.

        Completions and failures of commands that are no longer in flight are ignored.

        Raises:
          SchedulerError: No worker can do the remaining work, or a piece of it failed too often.
        """
        state, self._out = self.state, list[Command]()
        state.now = max(state.now, event.at)
        match event:
            case Joined():
                self._join(event)
            case Removed():
                self._remove(event.worker)
            case Completed():
                if state.in_flight.pop(event.command.serial, None) is not None:
                    self._complete(event)
            case Failed():
                if state.in_flight.pop(event.command.serial, None) is not None:
                    self._fail(event)
        self._dispatch()
        return self._out

    @property
    def finished(self) -> bool:
        """Whether all steps and evaluations are done."""
        return self.state.step == self.state.settings.steps and not self.state.evaluations

    @property
    def kept(self) -> list[WeightsVersion]:
        """Weights that the home worker keeps and that a checkpoint contains."""
        return sorted(self.state.references)

    def save(self) -> dict[str, Any]:
        """Returns the JSON state that `resume` needs, at the end of a step.

        Raises:
          ValueError: The current step is partly trained.
        """
        state, step = self.state, self._current_step
        if step is not None and (step.update or step.trained):
            raise ValueError("a scheduler can only be saved at the end of a step")
        versions = [[s.number, [g.version for g in s.groups]] for s in state.steps.values()]
        saved = {"step": state.step, "serials": state.serials, "versions": versions}
        return {**saved, "settings": pack(state.settings), "costs": pack(state.costs)}

    @classmethod
    def resume(
        cls, saved: dict[str, Any], settings: Settings | None = None, costs: Costs | None = None
    ) -> "Scheduler":
        """Creates the scheduler in a new process, with the clock at 0; workers have to join again.

        Nothing is in flight. Started chunks are generated again, with their group's version.

        Args:
          saved: Result of `save`.
          settings: New settings, if the number of steps or the devices changed. None means the saved ones.
          costs: Expected costs, if the measured ones are from other devices. None keeps the measured ones.
        """
        old = unpack(saved["settings"])
        settings, scheduler = settings or old, cls.__new__(cls)
        model = CostModel.create(costs, settings) if costs is not None else unpack(saved["costs"])
        scheduler.state = state = SchedulerState(
            settings, model, step=saved["step"], serials=saved["serials"]
        )
        state.references[WeightsVersion(state.step)] = 0
        for number, versions in saved["versions"]:
            if number < settings.steps:
                state.steps[number] = step = Step(number, settings)
                step.restore_versions(versions, old.unit_images)
                versions = (g.version for g in step.groups if g.version is not None)
                state.references.update(map(WeightsVersion, versions))
        scheduler._open_steps()
        scheduler._open_evaluation()
        return scheduler

    def is_busy(self, worker: str) -> bool:
        """Returns whether a worker is occupied by a command."""
        return self.state.workers[worker].busy is not None

    def has_worker(self, worker: str) -> bool:
        """Returns whether a worker has joined and was not removed."""
        return worker in self.state.workers

    def is_in_flight(self, command: Command) -> bool:
        """Returns whether a command is in flight; commands of a removed worker are not."""
        return command.serial in self.state.in_flight

    def is_superseded(self, command: Command) -> bool:
        """Returns whether a command sends weights that the worker no longer needs because newer ones exist."""
        if not isinstance(command, SyncWeights) or command.weights_version == self._current_weights:
            return False
        worker = self.state.workers.get(command.worker)
        task = worker and worker.task
        return not (task and task.weights_version == command.weights_version)

    def waits_for(self, worker: str) -> str:
        """Returns the cause of an idle worker's wait, one of `timeline.CAUSES`."""
        state, found, step = self.state, self.state.workers[worker], self._current_step
        if found.task is not None or (found.arriving and step is not None):
            return "weights"
        if state.evaluations and (step is None or step.set_trained):
            return "evaluation"
        if step is None:
            return "end"
        if step.set_trained:
            return "update"
        if step.queued or step.sampling:
            return "sampling"
        return "reward" if step.left and TRAIN in found.roles else "training"

    def work(self, command: Command) -> str:
        """Returns a description, for messages, of the piece of work that a command belongs to."""
        match command:
            case SyncWeights(weights_version=found):
                what = "the evaluated weights of version" if found.evaluated else "version"
                return f"sending {what} {found.version} to {command.worker}"
            case Update():
                return f"update {command.update} of step {command.step}"
            case Encode():
                chunk = self.state.workers[command.worker].task.chunk
            case Generate() | Decode() | Deliver() | Score() | Train():
                chunk = command.chunk
            case _:
                return f"the command {command.kind!r}"
        owner = "the evaluation of version" if chunk.evaluation else "step"
        verbs = {"score": "scoring", "train": "training on", "deliver": "delivering"}
        return (
            f"{verbs.get(command.kind, 'generating')} chunk {chunk.index} of {owner} {chunk.step}"
        )

    # -------------------------------------------------------------------------------- events

    def _join(self, event: Joined) -> None:
        """Adds a worker. If its name is known, the old worker disconnected without notice."""
        state = self.state
        if event.worker in state.workers:
            self._remove(event.worker)
        worker = Worker(event.worker, state.joins, event.roles, event.spare)
        state.joins += 1
        state.workers[worker.name] = worker
        if state.spare_roles.isdisjoint(worker.first_roles):
            self._set_roles(worker)  # the others keep theirs
        else:
            self._assign_roles()
        if worker.name == TRAINER:
            worker.held.add(self._current_weights)
            for other in state.workers.values():
                self._sync(other)
        elif TRAINER in state.workers:
            self._sync(worker)
        self._set_idle(worker)

    def _remove(self, name: str) -> None:
        """Removes a worker, requeues its chunks and passes, and takes its commands out of flight."""
        state = self.state
        if name == TRAINER:
            raise SchedulerError(
                "the trainer disconnected: restart the run from its last checkpoint"
            )
        worker = state.workers.pop(name, None)
        if worker is None:
            return
        self._assign_roles()
        if worker.task is not None:
            self._requeue(worker.task.chunk)
        if worker.piece is not None:
            self._current_step.return_piece(worker.piece)
        # An update in flight may already have the worker's sums; if not, it fails.
        sums = not any(isinstance(command, Update) for command in state.in_flight.values())
        interrupted = []  # transfers to the worker
        for serial, command in list(state.in_flight.items()):
            if command.receiver == name:
                del state.in_flight[serial]
                if isinstance(command, Deliver):
                    interrupted.append(command.chunk)
            elif isinstance(command, Deliver) and command.worker == name:
                del state.in_flight[serial]
                receiver = state.workers.get(command.to)
                if receiver is not None and receiver.busy == serial:
                    self._free(receiver)
        lost = {c for c, handover in state.handovers.items() if handover.worker == name}
        for step in state.steps.values():
            lost |= {Chunk(step.number, index) for index in step.remove_worker(name, sums)}
        for serial, command in list(state.in_flight.items()):
            if isinstance(command, Score) and command.chunk in lost:
                del state.in_flight[serial]
        for chunk in lost:
            state.handovers.pop(chunk, None)
            self._requeue(chunk)
        for chunk in interrupted:
            if chunk in state.handovers:
                self._deliver(chunk)

    def _free(self, worker: Worker) -> None:
        """Returns a worker's piece whose samples did not arrive, and sets the worker idle."""
        self._current_step.return_piece(worker.piece)
        worker.busy = worker.piece = None
        self._set_idle(worker)

    def _complete(self, event: Completed) -> None:
        """Handles the completion of a command that was in flight."""
        state, command = self.state, event.command
        state.costs.observe(command, event.seconds)
        # A chunk counts as generated after it is decoded.
        if state.failures and not isinstance(command, Encode | Generate):
            state.failures.pop(self.work(command), None)
        worker = state.workers.get(command.receiver)
        if worker is not None and worker.busy == command.serial:
            worker.busy = None
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
                state.failed_on.pop(command.chunk, None)
                self._decoded(worker, command.chunk)
            case Deliver():
                self._delivered(worker, command)
            case Score():
                if handover := state.handovers.get(command.chunk):
                    handover.values = event.values
                    self._handed_over(command.chunk)
            case Train():
                worker.failed[TRAIN] = 0
                self._current_step.trained_piece(worker.name, worker.piece)
                worker.piece = None
            case Update():
                self._updated()
        if worker is not None and worker.busy is None:
            self._continue(worker)

    def _fail(self, event: Failed) -> None:
        """Repeats the work of a failed command, on another worker if possible."""
        state, command = self.state, event.command
        worker = state.workers.get(command.receiver)
        if isinstance(command, SyncWeights) and self.is_superseded(command):
            worker.arriving.discard(command.weights_version)
            return self._sync(worker)
        if not (isinstance(command, Update) and self._missing_sums()):
            self._count_failure(command, event.reason)
        occupied = worker is not None and worker.busy == command.serial
        if occupied:
            worker.busy = None
        match command:  # a failed update is issued again once all passes are trained
            case Encode() | Generate() | Decode():
                chunk = worker.task.chunk
                worker.task = None
                self._requeue(chunk)
                if self._is_wanted(chunk):
                    state.failed_on.setdefault(chunk, []).append(worker.name)
                self._fail_role(worker, SAMPLE, event.reason)
            case Train():
                self._current_step.return_piece(worker.piece)
                worker.piece = None
                self._fail_role(worker, TRAIN, event.reason)
            case SyncWeights():
                worker.arriving.discard(command.weights_version)
                if self._is_needed(command.weights_version):
                    self._send_weights(worker, command.weights_version)
            case Deliver():
                if occupied:
                    self._free(worker)
                elif command.chunk in state.handovers:
                    self._deliver(command.chunk)
            case Score():
                if command.chunk in state.handovers:
                    self._score(command.chunk)
        if worker is not None and worker.busy is None:
            self._continue(worker)
        return None

    def _missing_sums(self) -> bool:
        """Requeues passes whose sums disconnected workers held before an update; returns whether there are any."""
        step, state = self._current_step, self.state
        removed = [name for name in step.pieces if name not in state.workers]
        for name in removed:
            for index in step.remove_worker(name):
                self._requeue(Chunk(step.number, index))
        return bool(removed)

    def _count_failure(self, command: Command, reason: str) -> None:
        """Counts a failure of a piece of work.

        Raises:
          SchedulerError: It failed more often than `retries` or `score_retries` allows.
        """
        settings, work = self.state.settings, self.work(command)
        self.state.failures[work] += 1
        count = self.state.failures[work]
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
        if not any(one.can(role) for one in self.state.workers.values() if one is not worker):
            raise SchedulerError(
                f"no worker is left that can {role}, the last failure is: {reason}"
            )
        worker.failed_roles.add(role)
        self._assign_roles()

    def _assign_roles(self) -> None:
        """Assigns roles to workers.

        A role without a worker goes to workers that have it as a spare role, or else returns to workers that lost it.
        """
        state, workers = self.state, self.state.workers.values()
        state.spare_roles, state.samplers, state.trainers = set(), [], []
        for role in (SAMPLE, TRAIN):
            able = [one for one in workers if one.can(role)]
            if not any(role in one.first_roles for one in able):
                state.spare_roles.add(role)
            if not able:
                for one in workers:
                    one.failed_roles.discard(role)
                    one.failed[role] = 0
        for worker in workers:
            self._set_roles(worker)

    def _set_roles(self, worker: Worker) -> None:
        state = self.state
        own = (*worker.first_roles, *(one for one in worker.spare if one in state.spare_roles))
        roles = tuple(role for role in own if role not in worker.failed_roles)
        if roles != worker.roles:
            worker.roles = roles
            if worker.is_idle:
                self._set_idle(worker)
        if SAMPLE in roles:
            state.samplers.append(worker.name)
        if TRAIN in roles:
            state.trainers.append(worker.name)
        for step in state.steps.values():
            step.turns.clear()  # the assignment of chunks to workers has changed

    # ------------------------------------------------------------------------ choice of work

    def _dispatch(self) -> None:
        """Assigns work to idle workers, for each combination of roles until a worker gets none."""
        state = self.state
        if TRAINER not in state.workers:
            return
        for heap in state.idle.values():
            passed = []
            while heap:
                rank = heapq.heappop(heap)
                worker = state.workers.get(rank[1])
                if worker is None or worker.rank != rank or not worker.is_idle:
                    continue
                if worker.arriving and self._newest(worker) not in worker.held:
                    self._sample_old(worker)
                    continue  # otherwise it becomes idle again when the weights arrive
                if self._next_work(worker):
                    continue
                passed.append(rank)
                # In these cases another worker may take work that this one may not.
                if not (state.failed_on or state.settings.ordered):
                    break
            for rank in passed:
                heapq.heappush(heap, rank)
        if state.workers[TRAINER].is_idle:
            self._next_work(state.workers[TRAINER])

    def _next_work(self, worker: Worker) -> bool:
        """Assigns a worker its next work; returns whether there is any.

        First the step's chunks and passes, in the order of the worker's roles; then evaluation chunks; then chunks of
        later steps, if `max_policy_lag` allows them. The home worker updates as soon as possible.
        """
        step, samples = self._current_step, SAMPLE in worker.roles
        if step is None:
            return samples and self._evaluate(worker)
        if worker.name == TRAINER and self._update(step):
            return True
        if (
            samples
            and self._should_sample_later_step(step)
            and self._sample_later_step(worker, self._reserved_groups())
        ):
            return True
        for role in worker.roles:
            if self._sample(worker, step) if role == SAMPLE else self._train(worker, step):
                return True
        return samples and (self._evaluate(worker) or self._sample_later_step(worker))

    def _sample_old(self, worker: Worker) -> None:
        """Samples with the previous weights while the newest are in transfer, if `max_policy_lag` allows it."""
        step, old = self._current_step, self.state.step - 1
        lags = self.state.settings.max_policy_lag and WeightsVersion(old) in worker.held
        if step is not None and SAMPLE in worker.roles and lags:
            self._sample(worker, step, old)

    def _should_sample_later_step(self, step: Step) -> bool:
        """Returns whether chunks of the next step must start now, to be scored when the current step ends."""
        state = self.state
        if not state.settings.max_policy_lag or step.queued:
            return False
        left = step.left * state.costs.predict("train") / len(state.trainers)
        return left < self._handover_seconds()

    def _reserved_groups(self) -> int:
        """Returns the number of the next step's groups to hold back for the update and the weight sync.

        Enough other groups start earlier that workers do not wait for rewards when the next step starts.
        """
        state, settings, cost = self.state, self.state.settings, self.state.costs.predict
        sample = max(1e-9, self._sampling_seconds())
        train = max(1e-9, cost("train") * settings.passes)
        fresh = (settings.units - settings.off_policy_units) * settings.unit_chunks
        waiting = max(0.0, self._handover_seconds() - fresh * sample / len(state.samplers))
        scored = waiting * len(state.trainers) / train
        started = len(state.samplers) * math.ceil((cost("update") + cost("sync")) / sample)
        left = settings.off_policy_units - math.ceil(scored / settings.unit_chunks)
        return max(0, min(left, math.ceil(started / settings.unit_chunks)))

    def _sample_later_step(self, worker: Worker, reserve: int = 0) -> bool:
        """Starts a chunk of a later step; keeps `reserve` of the groups that may start early."""
        later = (step for step in self.state.steps.values() if step is not self._current_step)
        return any(self._sample(worker, step, reserve=reserve) for step in later)

    def _sample(self, worker: Worker, step: Step, old: int | None = None, reserve: int = 0) -> bool:
        """Starts the next queued chunk of a step, unless other workers would finish all queued chunks sooner.

        Uses the newest weights or, if given, version `old`.
        """
        index = self._next_queued(worker, step)
        if index is None or self._sooner_elsewhere(worker, step.queued):
            return False
        version = step.group_of(index).version
        is_new = version is None
        if version is None:
            version = self.state.step if old is None else old
        weights_version = WeightsVersion(version)
        if weights_version in worker.arriving or (old is not None and old != version):
            return False
        most = self.state.settings.off_policy_units - reserve
        if is_new and version < step.number and step.off_policy >= most:
            return False
        if step is not self._current_step and worker.name == TRAINER and not self._has_time(worker):
            return False
        scored_at = self.state.now + self._sampling_seconds(worker.name) + self._handover_seconds()
        if step.generate(index, version, scored_at):
            self.state.references[weights_version] += 1
        worker.task = Task(Chunk(step.number, index), weights_version)
        self._continue(worker)
        return True

    def _has_time(self, worker: Worker) -> bool:
        """Returns whether the home worker can sample a chunk before an update is due."""
        step, end = self._current_step, self.state.now + self._sampling_seconds(worker.name)
        # Checks the bound over all chunks first, because scanning them on every event is slow.
        if step.set_trained or not step.left or step.latest_score < end:
            return False
        return any(c.scored_at >= end for c in step.chunks if c.stage in (SAMPLING, SCORING))

    def _next_queued(self, worker: Worker, step: Step) -> int | None:
        """Returns the queued chunk to generate next on a worker; chunks that failed there are left to other workers."""
        state = self.state
        failed = {f for f in state.failed_on if f.step == step.number and not f.evaluation}
        refused = [f.index for f in failed if self._is_refused(worker, f)]
        if not state.settings.ordered:
            return step.next_queued(refused)
        names = state.samplers
        index = step.next_own(worker.name, names.index(worker.name), len(names))
        if index is not None and index not in refused:
            return index
        return step.next_queued(
            i for i in step.queue if i in refused or Chunk(step.number, i) not in failed
        )

    def _sooner_elsewhere(self, worker: Worker, queued: int) -> bool:
        """Returns whether faster workers, once free, would finish all queued chunks before this worker finishes one."""
        state, own = self.state, self._sampling_seconds(worker.name)
        if queued > len(state.samplers) or own <= 1.5 * self._sampling_seconds():
            return False
        sooner = 0
        for name in state.samplers:
            if state.workers[name].task is not None and 2 * self._sampling_seconds(name) < own:
                sooner += 1
                if sooner == queued:
                    return True
        return False

    def _is_refused(self, worker: Worker, chunk: Chunk) -> bool:
        """Returns whether a chunk failed on this worker and another worker may generate it."""
        failed = self.state.failed_on.get(chunk, ())
        return worker.name in failed and any(name not in failed for name in self.state.samplers)

    def _train(self, worker: Worker, step: Step) -> bool:
        """Assigns a worker a piece to train."""
        state = self.state
        if self._current_weights not in worker.held:
            return False
        if state.settings.ordered:
            place = state.trainers.index(worker.name)
            worker.piece = step.take_in_order(worker.name, place, len(state.trainers))
        else:
            worker.piece = step.take_piece(worker.name, self._piece_size(worker, step))
        if worker.piece is None:
            return False
        self._continue(worker)
        return True

    def _piece_size(self, worker: Worker, step: Step) -> int:
        """Returns the number of passes that a worker takes at once: half of its share of the remaining ones."""
        costs = self.state.costs
        own, mean = costs.predict("train", worker.name), costs.predict("train")
        share = mean / (own * len(self.state.trainers))
        return max(1, int(step.left * share / 2))

    def _update(self, step: Step) -> bool:
        """Updates on the home worker if all passes are trained and the version is evaluated."""
        # The update may consume the version's weights, so its evaluation comes first; evaluations also end in order.
        if not step.set_trained or self.state.evaluations:
            return False
        trained = tuple(name for name in self.state.workers if step.pieces.get(name))
        home = self.state.workers[TRAINER]
        self._issue(Update, TRAINER, step.number, step.update, trained, occupies=home)
        return True

    def _evaluate(self, worker: Worker) -> bool:
        """Starts a chunk of an evaluation."""
        for evaluation in self.state.evaluations.values():
            if not evaluation.queue:
                continue
            chunk = Chunk(evaluation.version, evaluation.queue[0], evaluation=True)
            weights_version = self._evaluated(evaluation.version)
            if self._is_refused(worker, chunk) or weights_version in worker.arriving:
                continue
            heapq.heappop(evaluation.queue)
            worker.task = Task(chunk, weights_version)
            self._continue(worker)
            return True
        return False

    def _continue(self, worker: Worker) -> None:
        """Issues the next command of a worker's task or piece, unless its weights are in transfer.

        Drops a task that is no longer needed.
        """
        task, piece, name = worker.task, worker.piece, worker.name
        if task is not None and self._is_wanted(task.chunk):
            chunk = task.chunk
            if task.weights_version not in worker.held:
                if task.weights_version not in worker.arriving:
                    self._send_weights(worker, task.weights_version)
            elif not chunk.evaluation and chunk.step not in worker.encoded:
                self._issue(Encode, name, chunk.step, occupies=worker)
            elif not task.generated:
                self._issue(Generate, name, chunk, task.weights_version, occupies=worker)
            else:
                self._issue(Decode, name, chunk, occupies=worker)
            return
        worker.task = None
        if piece is None:
            return self._set_idle(worker)
        step = self._current_step
        chunk, held = Chunk(step.number, piece.index), step.chunks[piece.index]
        version = step.group_of(piece.index).version
        if name in held.holders:
            what = version, step.update, piece.first, piece.count, piece.early
            return self._issue(Train, name, chunk, *what, occupies=worker)
        source = min(held.holders, default=held.maker)
        return self._issue(Deliver, source, chunk, version, name, occupies=worker)

    def _set_idle(self, worker: Worker) -> None:
        heapq.heappush(self.state.idle.setdefault("".join(worker.roles), []), worker.rank)

    # -------------------------------------------------- scores and samples of a decoded chunk

    def _decoded(self, worker: Worker, chunk: Chunk) -> None:
        """Issues the scoring of a decoded chunk, and its delivery if the worker does not train."""
        state = self.state
        worker.task, worker.failed[SAMPLE] = None, 0
        if not self._is_wanted(chunk):
            return
        at_home = chunk.evaluation or TRAIN in worker.roles
        state.handovers[chunk] = handover = Handover(worker.name, delivered=at_home)
        if not chunk.evaluation:
            step = state.steps[chunk.step]
            step.decoded(chunk.index, worker.name, state.now + self._handover_seconds())
            if at_home:
                step.chunks[chunk.index].holders.add(worker.name)
            else:
                self._deliver(chunk)
            if step.chunks[chunk.index].scored:
                handover.values = ()
                return self._handed_over(chunk)
        return self._score(chunk)

    def _score(self, chunk: Chunk) -> None:
        self._issue(Score, chunk, self.state.handovers[chunk].worker)

    def _deliver(self, chunk: Chunk) -> None:
        """Sends samples of a worker that only samples to the next training worker in rotation."""
        state, names = self.state, self.state.trainers
        turn = chunk.index if state.settings.ordered else state.delivered
        state.delivered += 1
        version = state.steps[chunk.step].group_of(chunk.index).version
        source = state.handovers[chunk].worker
        self._issue(Deliver, source, chunk, version, names[turn % len(names)])

    def _delivered(self, worker: Worker, command: Deliver) -> None:
        state, chunk = self.state, command.chunk
        step = state.steps.get(chunk.step)
        if step is None or step.chunks[chunk.index].stage == DROPPED:
            return
        held = step.chunks[chunk.index]
        if held.maker == command.worker and held.maker not in held.holders:
            held.maker = ""  # a worker that only samples frees samples that another worker has
        held.holders.add(worker.name)
        if handover := state.handovers.get(chunk):
            handover.delivered = True
            self._handed_over(chunk)

    def _handed_over(self, chunk: Chunk) -> None:
        """Continues with a chunk once it is both scored and delivered."""
        state, handover = self.state, self.state.handovers[chunk]
        if handover.values is None or not handover.delivered:
            return
        del state.handovers[chunk]
        if not chunk.evaluation:
            step = state.steps[chunk.step]
            step.score(chunk.index, handover.values)
            return self._drop_others(step)
        evaluation = state.evaluations[chunk.step]
        evaluation.unscored -= 1
        if not evaluation.unscored:
            del state.evaluations[chunk.step]
            self._issue(Evaluate, chunk.step)
            self._release(self._evaluated(chunk.step), 1)
        return None

    def _requeue(self, chunk: Chunk) -> None:
        """Queues a started chunk again if it is still needed."""
        if not self._is_wanted(chunk):
            return
        if chunk.evaluation:
            heapq.heappush(self.state.evaluations[chunk.step].queue, chunk.index)
        else:
            self.state.steps[chunk.step].requeue(chunk.index)

    def _is_wanted(self, chunk: Chunk) -> bool:
        """Returns whether a started chunk is still needed."""
        if chunk.evaluation:
            return chunk.step in self.state.evaluations
        step = self.state.steps.get(chunk.step)
        return step is not None and step.chunks[chunk.index].stage != DROPPED

    def _drop_others(self, step: Step) -> None:
        """Drops the candidates outside the step once its members are known."""
        if step.settled or not step.candidates.dynamic or not step.candidates.step_known:
            return
        started, versions = step.drop_others()
        if started:
            chunks = tuple(Chunk(step.number, index) for index in started)
            for chunk in chunks:
                self.state.handovers.pop(chunk, None)
            self._issue(DropChunks, chunks)
        for version in versions:
            self._release(WeightsVersion(version), 1)

    # ------------------------------------------------------------------- steps and weights

    @property
    def _current_step(self) -> Step | None:
        return self.state.steps.get(self.state.step)

    @property
    def _current_weights(self) -> WeightsVersion:
        """Weights that are being trained."""
        step = self._current_step
        return WeightsVersion(self.state.step, update=step.update if step else 0)

    def _open_steps(self) -> None:
        """Opens the current step and the next steps within `max_policy_lag`."""
        state = self.state
        last = min(state.step + state.settings.max_policy_lag, state.settings.steps - 1)
        for number in range(state.step, last + 1):
            if number not in state.steps:
                state.steps[number] = Step(number, state.settings)

    def _open_evaluation(self) -> None:
        """Opens the evaluation of the newest version if it is due."""
        state = self.state
        count = state.settings.evaluated_chunks(state.step)
        if count:
            state.evaluations[state.step] = PendingEvaluation(state.step, list(range(count)), count)
            state.references[self._evaluated(state.step)] += 1

    def _evaluated(self, version: int) -> WeightsVersion:
        """Returns the weights that are evaluated for a version."""
        return WeightsVersion(version, self.state.settings.separate_eval_weights)

    def _updated(self) -> None:
        """Ends an update set; the last one of a step creates the new version and starts the next step."""
        state, step, old = self.state, self._current_step, self._current_weights
        if step.next_set():
            del state.steps[state.step]
            state.step += 1
            state.references.setdefault(WeightsVersion(state.step), 0)
            self._open_evaluation()
            used = [g.version for g in step.groups if g.version is not None and not g.untrained]
            kept = (one.version for one in state.references if not one.evaluated)
            for version in sorted({*used, *kept}):
                self._release(WeightsVersion(version), used.count(version))
            self._open_steps()
        state.workers[TRAINER].held.add(self._current_weights)
        for worker in state.workers.values():
            if old.update:
                worker.held.discard(old)
            worker.encoded = {number for number in worker.encoded if number >= state.step}
            self._sync(worker)

    def _sync(self, worker: Worker) -> None:
        """Sends a worker the newest weights that it needs, unless another transfer to it is in flight.

        When a transfer ends, only the newest version is sent next.
        """
        newest = self._newest(worker)
        if worker.name != TRAINER and not worker.arriving and newest not in worker.held:
            self._send_weights(worker, newest)

    def _newest(self, worker: Worker) -> WeightsVersion:
        return self._current_weights if TRAIN in worker.roles else WeightsVersion(self.state.step)

    def _send_weights(self, worker: Worker, weights_version: WeightsVersion) -> None:
        """Sends weights to a worker; occupies only the home worker, if it needs weights other than those it trains."""
        worker.arriving.add(weights_version)
        home = worker if worker.name == TRAINER else None
        self._issue(SyncWeights, worker.name, weights_version, occupies=home)

    def _is_needed(self, weights_version: WeightsVersion) -> bool:
        return weights_version in self.state.references or weights_version == self._current_weights

    def _release(self, weights_version: WeightsVersion, count: int) -> None:
        """Decrements the references of a weights version by `count`; drops old versions without references."""
        state = self.state
        state.references[weights_version] -= count
        oldest = state.step - state.settings.max_policy_lag
        is_recent = not weights_version.evaluated and weights_version.version >= oldest
        # The newest weights generate the next chunks.
        if (
            is_recent
            or weights_version == WeightsVersion(state.step)
            or state.references[weights_version]
        ):
            return
        del state.references[weights_version]
        for worker in state.workers.values():
            worker.held.discard(weights_version)
        self._issue(DropVersion, weights_version)

    # ------------------------------------------------------------------------------ commands

    def _issue(self, kind: type[Command], *fields: Any, occupies: Worker | None = None) -> None:
        """Issues a command, which is in flight and occupies the worker `occupies`, if given, until it is answered."""
        state = self.state
        state.serials += 1
        command = kind(state.serials, *fields)
        if command.answered:
            state.in_flight[command.serial] = command
        if occupies is not None:
            occupies.busy = command.serial
        self._out.append(command)

    def _sampling_seconds(self, worker: str = "") -> float:
        """Returns the expected seconds to generate and decode a chunk on a worker; "" means the mean of all workers."""
        costs = self.state.costs
        return costs.predict("generate", worker) + costs.predict("decode", worker)

    def _handover_seconds(self) -> float:
        """Returns the expected seconds until a decoded chunk is scored and delivered."""
        return max(self.state.costs.predict(kind) for kind in ("score", "deliver"))
