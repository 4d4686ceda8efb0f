"""Who does what next: gives work to every worker that has none, and takes tasks one command further."""

import heapq

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
from digen_jax.scheduling.outlook import tag_pays
from digen_jax.scheduling.state import State, Worker


def give_work(state: State, out: list[Command]) -> None:
    """Commands for all who have nothing to do; the trainer's turn comes last."""
    if state.trainer is None:
        return
    _serve_rollout(state, out)
    if state.trainer.busy is None:
        _serve_trainer(state, out)


def continue_task(state: State, worker: Worker, out: list[Command]) -> None:
    """The next command of a worker's task; none while its weights are on their way."""
    task, name = worker.task, worker.name
    prompts = None if task.fragment.evaluation else task.fragment.step
    if worker.role != "sample":
        state.send(Switch(state.next_serial(), name, "sample"), out, worker)
    elif task.version not in worker.held:
        if task.version not in worker.arriving:
            state.publish(worker, task.version, out)
    elif prompts not in worker.encoded:
        state.send(Encode(state.next_serial(), name, prompts), out, worker)
    elif not task.generated:
        command = Generate(state.next_serial(), name, task.fragment, task.version)
        state.send(command, out, worker)
    else:
        state.send(Decode(state.next_serial(), name, task.fragment), out, worker)


# -------------------------------------------------------------------------------- rollout workers


def _serve_rollout(state: State, out: list[Command]) -> None:
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
        # Work that this worker was refused alone may be another's; otherwise nobody gets any.
        if not state.failed_on:
            break
    for rank in passed:
        heapq.heappush(state.idle, rank)


def _next_fragment(state: State, worker: Worker) -> Fragment | None:
    """Evaluation, then the step that is on, then the steps ahead within their bounds."""
    for evaluation in state.evaluations.values():
        if evaluation.queue:
            fragment = Fragment(evaluation.version, evaluation.queue[0], evaluation=True)
            if not _refused(state, worker, fragment):
                return fragment
    for batch in state.batches.values():
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


def _refused(state: State, worker: Worker, fragment: Fragment) -> bool:
    """Whether a fragment failed on a worker and there is another one that may have it."""
    failed = state.failed_on.get(fragment, ())
    if worker.name not in failed:
        return False
    return any(name not in failed for name in state.rollout)


def _sooner_elsewhere(state: State, worker: Worker, queued: int) -> bool:
    """Whether faster workers, once they are free, finish all that is queued before this one could."""
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


def _serve_trainer(state: State, out: list[Command]) -> None:
    """Its task, if it has one; else train, update, or generate by itself."""
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
        return None
    index = batch.next_ready()
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
    return None


def _train(state: State, index: int, out: list[Command]) -> None:
    batch = state.batch
    early = batch.train(index)
    fragment = Fragment(batch.step, index)
    command = Train(state.next_serial(), TRAINER, fragment, batch.update, early)
    state.send(command, out, state.trainer)


def _next_fragment_of_colocated(state: State) -> Fragment | None:
    """Without rollout workers the trainer generates all that there is before it trains."""
    for evaluation in state.evaluations.values():
        if evaluation.queue:
            return Fragment(evaluation.version, evaluation.queue[0], evaluation=True)
    index = state.batch.next_queued() if state.batch else None
    return None if index is None else Fragment(state.step, index)


def _may_tag(state: State) -> bool:
    """Whether there is something that the trainer may generate beside the rollout workers."""
    batch = state.batch
    return bool(
        state.rollout
        and batch.tagged < state.settings.tag_fragments
        and batch.next_queued() is not None
    )
