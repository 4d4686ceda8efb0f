"""TAG: turns the scheduler's state into the rest of the step, and asks the forecast."""

import math

from digen_jax.scheduling import forecast
from digen_jax.scheduling.batch import SCORED
from digen_jax.scheduling.commands import TRAINER, Publication
from digen_jax.scheduling.forecast import Ahead, Outlook
from digen_jax.scheduling.state import SchedulerState

PLAYABLE = 64  # fragments and rollout workers; larger numbers are judged by rates
ALWAYS_PLAYED = 8  # fragments; larger numbers are judged by rates if these leave no doubt


def tag_pays(state: SchedulerState) -> bool:
    """Whether the step ends sooner if the trainer generates a fragment now instead of waiting."""
    batch = state.batch
    left = state.settings.fragments - batch.finished * state.settings.unit_fragments
    gain, doubt = _gain_by_rates(state, left), 0.0
    if max(left, len(state.rollout)) <= PLAYABLE:
        doubt = math.inf
        if left > ALWAYS_PLAYED:
            doubt = 5 * max(map(state.generation_seconds, state.rollout.values()))
    if abs(gain) > doubt:
        return gain > 0
    outlook = look_ahead(state)
    # Queued redundant candidates do not belong to the step yet.
    queued = any(fragment.scored_in is None for fragment in outlook.fragments)
    return queued and forecast.tag_pays(outlook)


def evaluation_fits(state: SchedulerState) -> bool:
    """Whether the trainer can generate a fragment of the evaluation before it has anything to train.

    False until the duration of one is known.
    """
    batch, own = state.batch, state.evaluation_seconds(state.trainer)
    if not batch.scored_at or not own:
        return False
    seconds = _evaluation_seconds(state) + _seconds(state, "switch")
    return state.now + seconds <= min(batch.scored_at.values())


def helps_evaluation(state: SchedulerState) -> bool:
    """Whether the trainer generates an evaluation fragment before the workers have generated all queued ones."""
    queued = sum(len(evaluation.queue) for evaluation in state.evaluations.values())
    workers = state.rollout.values()
    each = [state.evaluation_seconds(worker) for worker in workers]
    busy = sum(
        max(0.0, w.free_at - state.now) / max(1e-12, s) for w, s in zip(workers, each, strict=True)
    )
    ends = (queued + busy) / sum(1 / max(1e-12, seconds) for seconds in each)
    return _evaluation_seconds(state) <= ends


def _evaluation_seconds(state: SchedulerState) -> float:
    """Seconds of an evaluation fragment on the trainer, including a switch from its present role."""
    trainer = state.trainer
    seconds = state.evaluation_seconds(trainer)
    if trainer.role != "sample":
        seconds += _seconds(state, "switch")
    if not all(state.evaluated(version) in trainer.held for version in state.evaluations):
        seconds += _seconds(state, "publish")
    return seconds


def look_ahead(state: SchedulerState) -> Outlook:
    """The rest of the present step, by measured costs."""
    trainer, settings, batch = state.trainer, state.settings, state.batch
    return Outlook(
        fragments=_fragments(state),
        rollout=tuple(
            (
                max(0.0, worker.free_at - state.now),
                max(1e-9, state.generation_seconds(worker)),
                worker.speed,
            )
            for worker in state.rollout.values()
        ),
        sampling=trainer.role == "sample",
        tags=settings.tag_fragments - batch.tagged,
        generate=state.generation_seconds(trainer),
        score=state.handover_seconds(),
        train=_seconds(state, "train"),
        update=_seconds(state, "update"),
        to_sample=_seconds(state, "switch") + _preparation(state),
        to_train=_seconds(state, "switch"),
    )


def _fragments(state: SchedulerState) -> tuple[Ahead, ...]:
    """The fragments of the step that are not trained, in the order of their index."""
    settings, batch = state.settings, state.batch
    ahead, units = [], []
    for index in batch.unfinished():
        unit = index // settings.unit_fragments
        if not units or units[-1] != unit:
            units.append(unit)
        update = (batch.finished + len(units) - 1) // settings.set_units - batch.update
        gate = {"group": unit, "step": 0}[settings.readiness]
        if settings.early:
            gate = index
        scored_in = None
        if index in batch.scored_at:
            scored_in = max(0.0, batch.scored_at[index] - state.now)
        elif batch.stages[index] == SCORED:
            scored_in = -1.0
        ahead.append(Ahead(scored_in, gate, update))
    return tuple(ahead)


def _gain_by_rates(state: SchedulerState, left: int) -> float:
    """Seconds for which the rollout workers make the trainer wait, less the seconds of one fragment.

    The trainer waits for the whole step, where fragments in generation count half, or at least for the next
    fragment. This is coarse, but computed again until the step is short enough to be played.
    """
    batch = state.batch
    generated = (batch.queued + batch.generating / 2) / state.rollout_rate()
    slack = generated + state.handover_seconds() - (left - 1) * _seconds(state, "train")
    cost = state.generation_seconds(state.trainer) + _seconds(state, "switch")
    if state.trainer.role != "sample":
        cost += _seconds(state, "switch") + _preparation(state)
    if slack < cost and batch.scored_at:
        slack = max(slack, min(batch.scored_at.values()) - state.now)
    return slack - cost


def _preparation(state: SchedulerState) -> float:
    """Seconds before the trainer can sample the newest version."""
    missing = Publication(state.version) not in state.trainer.held
    seconds = _seconds(state, "publish") if missing else 0.0
    return seconds + (_seconds(state, "encode") if state.step not in state.trainer.encoded else 0.0)


def _seconds(state: SchedulerState, kind: str) -> float:
    return state.costs.predict(kind, TRAINER, 1.0)
