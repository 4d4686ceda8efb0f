"""Assigns work to every idle worker, and issues the next command of each task."""

import heapq
from collections.abc import Iterable

from digen_jax.scheduling.batch import Batch
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    Encode,
    Fragment,
    Generate,
    Switch,
    Train,
    Update,
)
from digen_jax.scheduling.outlook import evaluation_fits, helps_evaluation, tag_pays
from digen_jax.scheduling.state import SchedulerState
from digen_jax.scheduling.tasks import Worker


def give_work(state: SchedulerState, out: list[Command]) -> None:
    """Issues commands to all idle workers, to the trainer last."""
    if state.trainer is None:
        return
    _serve_rollout(state, out)
    if state.trainer.busy is None:
        _serve_trainer(state, out)


def continue_task(state: SchedulerState, worker: Worker, out: list[Command]) -> None:
    """Issues the next command of a worker's task, unless its weights are in transfer."""
    task, name = worker.task, worker.name
    fragment = task.fragment
    if worker.role != "sample":
        state.send(Switch(state.next_serial(), name, "sample"), out, worker)
    elif task.publication not in worker.held:
        if task.publication not in worker.arriving:
            state.publish(worker, task.publication, out)
    elif not fragment.evaluation and fragment.step not in worker.encoded:
        state.send(Encode(state.next_serial(), name, fragment.step), out, worker)
    elif not task.generated:
        command = Generate(state.next_serial(), name, fragment, task.publication)
        state.send(command, out, worker)
    else:
        state.send(Decode(state.next_serial(), name, fragment), out, worker)


# -------------------------------------------------------------------------------- rollout workers


def _serve_rollout(state: SchedulerState, out: list[Command]) -> None:
    """Fragments for the idle rollout workers, the fastest first."""
    passed = []
    while state.idle:
        rank = heapq.heappop(state.idle)
        worker = state.rollout.get(rank[2])
        if worker is None or worker.rank != rank or worker.task or worker.busy:
            continue
        fragment = _next_fragment(state, worker)
        if fragment is not None:
            state.assign(worker, fragment)
            continue_task(state, worker, out)
            continue
        passed.append(rank)
        # After a failure, work refused to this worker may go to another one; otherwise no worker gets any.
        if not state.failed_on:
            break
    for rank in passed:
        heapq.heappush(state.idle, rank)


def _next_fragment(state: SchedulerState, worker: Worker) -> Fragment | None:
    """A fragment of the present step, else of the evaluation, else of the next steps within their bounds.

    So an evaluation fills the time in which the trainer trains the rest of a step.
    """
    return (
        _of_steps(state, worker, [state.batch] if state.batch else [])
        or _of_evaluation(state, worker)
        or _of_steps(state, worker, [b for b in state.batches.values() if b.step != state.step])
    )


def _of_evaluation(state: SchedulerState, worker: Worker) -> Fragment | None:
    """The first fragment of an evaluation that a worker may generate."""
    for evaluation in state.evaluations.values():
        if evaluation.queue:
            fragment = Fragment(evaluation.version, evaluation.queue[0], evaluation=True)
            if not _refused(state, worker, fragment):
                return fragment
    return None


def _of_steps(state: SchedulerState, worker: Worker, batches: Iterable[Batch]) -> Fragment | None:
    """The first fragment of some steps that a worker may generate."""
    for batch in batches:
        index = batch.next_queued()
        if index is not None and state.failed_on:
            refused = (f for f in state.failed_on if f.step == batch.step and not f.evaluation)
            passed_over = [f.index for f in refused if _refused(state, worker, f)]
            index = batch.next_queued(passed_over)
        if index is None:
            continue
        if batch.step == state.step:
            if not _sooner_elsewhere(state, worker, batch.queued):
                return Fragment(batch.step, index)
        elif batch.group_of(index).version is not None or (
            batch.stale < state.settings.stale_units
        ):
            return Fragment(batch.step, index)
    return None


def _refused(state: SchedulerState, worker: Worker, fragment: Fragment) -> bool:
    """Whether a fragment failed on this worker and another worker may generate it."""
    failed = state.failed_on.get(fragment, ())
    if worker.name not in failed:
        return False
    return any(name not in failed for name in state.rollout)


def _sooner_elsewhere(state: SchedulerState, worker: Worker, queued: int) -> bool:
    """Whether faster workers, as soon as they are free, finish all queued fragments before this worker could."""
    if queued > len(state.rollout):
        return False
    finish = state.now + state.generation_seconds(worker)
    sooner = 0
    for other in state.rollout.values():
        if other.task is not None and other.speed > worker.speed:
            sooner += max(other.free_at, state.now) + state.generation_seconds(other) < finish
            if sooner == queued:
                return True
    return False


# ---------------------------------------------------------------------------------------- trainer


def _serve_trainer(state: SchedulerState, out: list[Command]) -> None:
    """Continues the trainer's task; without one it trains, updates or generates."""
    trainer, batch = state.trainer, state.batch
    if trainer.task is not None and not state.wanted(trainer.task.fragment):
        trainer.task = None
    if trainer.task is not None:
        return continue_task(state, trainer, out)
    if not state.rollout:
        fragment = _next_fragment_of_colocated(state)
        if fragment is not None:
            state.assign(trainer, fragment)
            return continue_task(state, trainer, out)
    if batch is None:
        return _help_evaluation(state, out)
    index = batch.next_ready()
    if index is None and batch.set_trained and batch.in_last_set and state.evaluations:
        # The version is evaluated before the next one exists, so evaluations end in order, and no
        # evaluation needs the weights that the update consumes.
        return _help_evaluation(state, out)
    if index is not None or batch.set_trained:
        if trainer.role != "train":
            state.send(Switch(state.next_serial(), TRAINER, "train"), out, trainer)
        elif index is not None:
            _train(state, index, out)
        else:
            update = Update(state.next_serial(), TRAINER, batch.step, batch.update)
            state.send(update, out, trainer)
    elif _may_tag(state) and tag_pays(state):
        batch.tagged += 1
        state.assign(trainer, Fragment(batch.step, batch.next_queued()))
        continue_task(state, trainer, out)
    elif evaluation_fits(state):
        _help_evaluation(state, out)
    return None


def _help_evaluation(state: SchedulerState, out: list[Command]) -> None:
    """The trainer generates an evaluation fragment, if it may sample and the rollout would not be sooner."""
    fragment = _of_evaluation(state, state.trainer)
    if fragment is not None and state.settings.tag_fragments and helps_evaluation(state):
        state.assign(state.trainer, fragment)
        continue_task(state, state.trainer, out)


def _train(state: SchedulerState, index: int, out: list[Command]) -> None:
    batch = state.batch
    early = batch.train(index)
    fragment = Fragment(batch.step, index)
    command = Train(state.next_serial(), TRAINER, fragment, batch.update, early)
    state.send(command, out, state.trainer)


def _next_fragment_of_colocated(state: SchedulerState) -> Fragment | None:
    """Without rollout workers the trainer generates everything before it trains."""
    evaluation = _of_evaluation(state, state.trainer)
    if evaluation is not None:
        return evaluation
    index = state.batch.next_queued() if state.batch else None
    return None if index is None else Fragment(state.step, index)


def _may_tag(state: SchedulerState) -> bool:
    """Whether there is a fragment that the trainer may generate in addition to the rollout workers."""
    batch = state.batch
    return bool(
        state.rollout
        and batch.tagged < state.settings.tag_fragments
        and batch.next_queued() is not None
    )
