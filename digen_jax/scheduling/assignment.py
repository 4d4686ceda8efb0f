"""Chooses the next work of idle workers. Every worker samples, trains, or does both."""

import heapq
import itertools
import math

from digen_jax.scheduling.commands import (
    SAMPLE,
    TRAINER,
    Chunk,
    Decode,
    Deliver,
    Encode,
    Generate,
    Train,
    Update,
    WeightsVersion,
)
from digen_jax.scheduling.pool import Pool, Task, Worker
from digen_jax.scheduling.step import QUEUED, SAMPLING, SCORING, Step


class Assigner(Pool):
    """Assigns work to the idle workers of a pool: `_dispatch` after every event, and `_next_work` to each worker."""

    def _dispatch(self) -> None:
        """Assigns work to idle workers, for each combination of roles until a worker gets none."""
        if TRAINER not in self.workers:
            return
        for heap in self.idle.values():
            passed = []
            while heap:
                order, name = heapq.heappop(heap)
                worker = self.workers.get(name)
                if worker is None or worker.order != order or not worker.is_idle:
                    continue
                if worker.arriving and self._newest(worker) not in worker.held:
                    self._sample_old(worker)
                    continue  # otherwise it becomes idle again when the weights arrive
                if self._next_work(worker):
                    continue
                passed.append((order, name))
                # In these cases another worker may take work that this one may not.
                if not (self.failed_on or self.settings.ordered):
                    break
            for one in passed:
                heapq.heappush(heap, one)
        if self.workers[TRAINER].is_idle:
            self._next_work(self.workers[TRAINER])

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
        early = samples and self._should_sample_later_step(step)
        if early and self._sample_later_step(worker, self._reserved_groups()):
            return True
        for role in worker.roles:
            if self._sample(worker, step) if role == SAMPLE else self._train(worker, step):
                return True
        return samples and (self._evaluate(worker) or self._sample_later_step(worker))

    def _sample_old(self, worker: Worker) -> None:
        """Samples with the previous weights while the newest are in transfer, if `max_policy_lag` allows it."""
        step, old = self._current_step, self.step - 1
        lags = self.settings.max_policy_lag and WeightsVersion(old) in worker.held
        if step is not None and SAMPLE in worker.roles and lags:
            self._sample(worker, step, old)

    def _should_sample_later_step(self, step: Step) -> bool:
        """Returns whether chunks of the next step must start now, to be scored when the current step ends."""
        if not self.settings.max_policy_lag or step.queued:
            return False
        left = step.left * self.costs.predict("train") / len(self.trainers)
        return left < self.costs.handover()

    def _reserved_groups(self) -> int:
        """Returns the number of the next step's groups to hold back for the update and the weight sync.

        Enough other groups start earlier that workers do not wait for rewards when the next step starts.
        """
        settings, cost = self.settings, self.costs.predict
        sample = max(1e-9, self.costs.sampling())
        train = max(1e-9, cost("train") * settings.passes)
        fresh = (settings.units - settings.off_policy_units) * settings.unit_chunks
        waiting = max(0.0, self.costs.handover() - fresh * sample / len(self.samplers))
        scored = waiting * len(self.trainers) / train
        started = len(self.samplers) * math.ceil((cost("update") + cost("sync")) / sample)
        left = settings.off_policy_units - math.ceil(scored / settings.unit_chunks)
        return max(0, min(left, math.ceil(started / settings.unit_chunks)))

    def _sample_later_step(self, worker: Worker, reserve: int = 0) -> bool:
        """Starts a chunk of a later step; keeps `reserve` of the groups that may start early."""
        later = (step for number, step in self.steps.items() if number != self.step)
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
            version = self.step if old is None else old
        weights_version = WeightsVersion(version)
        if weights_version in worker.arriving or (old is not None and old != version):
            return False
        most = self.settings.off_policy_units - reserve
        if is_new and version < step.number and step.off_policy >= most:
            return False
        if step.number != self.step and worker.name == TRAINER and not self._has_time(worker):
            return False
        scored_at = self.now + self.costs.sampling(worker.name) + self.costs.handover()
        if step.generate(index, version, scored_at):
            self.references[weights_version] += 1
        worker.task = Task(Chunk(step.number, index), weights_version)
        self._continue(worker)
        return True

    def _has_time(self, worker: Worker) -> bool:
        """Returns whether the home worker can sample a chunk before an update is due."""
        step, end = self._current_step, self.now + self.costs.sampling(worker.name)
        # Checks the bound over all chunks first, because scanning them on every event is slow.
        if step.set_trained or not step.left or step.latest_score < end:
            return False
        return any(c.scored_at >= end for c in step.chunks if c.stage in (SAMPLING, SCORING))

    def _next_queued(self, worker: Worker, step: Step) -> int | None:
        """Returns the queued chunk to generate next on a worker; chunks that failed there are left to other workers."""
        failed = [f for f in self.failed_on if f.step == step.number and not f.evaluation]
        refused = {f.index for f in failed if self._is_refused(worker, f)}
        if not self.settings.ordered:
            return step.next_queued(refused)
        names = self.samplers
        index = step.next_own(worker.name, names.index(worker.name), len(names))
        if index is not None and index not in refused:
            return index
        # A chunk that failed on the worker to which it belongs.
        others = {f.index for f in failed} - refused
        return min((i for i in others if step.chunks[i].stage == QUEUED), default=None)

    def _sooner_elsewhere(self, worker: Worker, queued: int) -> bool:
        """Returns whether faster workers, once free, would finish all queued chunks before this worker finishes one."""
        own = self.costs.sampling(worker.name)
        if queued > len(self.samplers) or own <= 1.5 * self.costs.sampling():
            return False
        sooner = (
            name
            for name in self.samplers
            if self.workers[name].task is not None and 2 * self.costs.sampling(name) < own
        )
        return len(list(itertools.islice(sooner, queued))) == queued

    def _is_refused(self, worker: Worker, chunk: Chunk) -> bool:
        """Returns whether a chunk failed on this worker and another worker may generate it."""
        failed = self.failed_on.get(chunk, ())
        return worker.name in failed and any(name not in failed for name in self.samplers)

    def _train(self, worker: Worker, step: Step) -> bool:
        """Assigns a worker a piece to train: its next chunk in order, or half of its share of the remaining passes."""
        if self._current_weights not in worker.held:
            return False
        name, workers = worker.name, len(self.trainers)
        if self.settings.ordered:
            worker.piece = step.take_in_order(name, self.trainers.index(name), workers)
        else:
            own, mean = self.costs.predict("train", name), self.costs.predict("train")
            share = mean / (own * workers)
            worker.piece = step.take_piece(name, max(1, int(step.left * share / 2)))
        if worker.piece is None:
            return False
        self._continue(worker)
        return True

    def _update(self, step: Step) -> bool:
        """Updates on the home worker if all passes are trained and the version is evaluated."""
        # The update may consume the version's weights, so its evaluation comes first; evaluations also end in order.
        if not step.set_trained or self.evaluations:
            return False
        trained = tuple(name for name in self.workers if step.pieces.get(name))
        home = self.workers[TRAINER]
        self._issue(Update, TRAINER, step.number, step.update, trained, occupies=home)
        return True

    def _evaluate(self, worker: Worker) -> bool:
        """Starts a chunk of an evaluation."""
        for version, evaluation in self.evaluations.items():
            if not evaluation.queue:
                continue
            chunk = Chunk(version, evaluation.queue[0], evaluation=True)
            weights_version = self._evaluated(version)
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
            chunk, weights_version = task.chunk, task.weights_version
            if weights_version not in worker.held:
                if weights_version not in worker.arriving:
                    self._send_weights(worker, weights_version)
            elif not chunk.evaluation and chunk.step not in worker.encoded:
                self._issue(Encode, name, chunk.step, occupies=worker)
            elif not task.generated:
                self._issue(Generate, name, chunk, weights_version, occupies=worker)
            else:
                self._issue(Decode, name, chunk, occupies=worker)
            return
        worker.task = None
        if piece is None:
            return self._set_idle(worker)
        step = self._current_step
        chunk, state = Chunk(step.number, piece.index), step.chunks[piece.index]
        version = step.group_of(piece.index).version
        if name in state.holders:
            passes = piece.first, piece.count, piece.early
            return self._issue(Train, name, chunk, version, step.update, *passes, occupies=worker)
        source = min(state.holders, default=state.maker)
        return self._issue(Deliver, source, chunk, version, name, occupies=worker)
