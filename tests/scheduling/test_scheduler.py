"""Random runs with delays, disconnects and failures, each checked by a referee; then single rules."""

import copy
import dataclasses
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Command,
    Completed,
    Decode,
    Deliver,
    Failed,
    Generate,
    Joined,
    Removed,
    Score,
    SyncWeights,
    Train,
    WeightsVersion,
)
from digen_jax.scheduling.pool import SchedulerError
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout, simulate
from tests.scheduling.world import BOTH, Referee, World, values_of

COSTS = Costs(generate=1.0, train=1.0, decode=0.1, score=0.1, sync=0.2)
SAMPLE_ONLY, TRAIN_ONLY, SAMPLE_FIRST = ("sample",), ("train",), ("sample", "train")
PLAIN = Settings(2, groups=2, images=2, chunk_images=1, max_policy_lag=0, passes=2)
runs = settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def plans(draw, ordered=None):
    """Draws settings that pass the checks of configs; `ordered` draws only ordered ones."""
    dynamic = draw(st.booleans())
    images = draw(st.sampled_from([2, 4, 6] if dynamic else [1, 2, 4, 6]))
    updates = draw(st.integers(1, 3))
    groups = updates * draw(st.integers(1, 3))
    divisors = [n for n in range(1, images + 1) if images % n == 0]
    share = groups // updates * images
    multiples = [images * n for n in range(1, 4) if groups // updates % n == 0]
    chunk = draw(st.sampled_from(divisors if dynamic else divisors + multiples))
    max_incomplete_groups = 0 if dynamic or ordered else draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    if max_incomplete_groups:
        chunk = draw(st.sampled_from(divisors))
    elif not dynamic and draw(st.booleans()):
        chunk = draw(st.sampled_from([n for n in range(1, share + 1) if share % n == 0]))
    redundant = draw(st.integers(0, 3)) if dynamic else 0
    return Settings(
        steps=draw(st.integers(1, 4)),
        groups=groups,
        images=images,
        chunk_images=chunk,
        updates=updates,
        readiness=draw(st.sampled_from(["group", "step"])),
        ordered=ordered or (not max_incomplete_groups and draw(st.booleans())),
        max_incomplete_groups=max_incomplete_groups,
        max_policy_lag=draw(st.sampled_from([0, 0, 1])),
        max_off_policy_fraction=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        passes=draw(st.sampled_from([1, 2, 3, 7])),
        max_candidates=groups + redundant + draw(st.integers(0, 4)) if dynamic else 0,
        oversampled_groups=redundant,
        retries=draw(st.integers(0, 2)),
        evaluate_every=draw(st.integers(0, 2)),
        evaluation_images=draw(st.integers(1, 3)),
        show_every=draw(st.integers(0, 2)),
        shown_images=1,
        evaluation_batch=draw(st.integers(1, 2)),
        separate_eval_weights=draw(st.booleans()),
    )


def world(plan, seed, trouble=0.0, workers=2, flat_share=0.4):
    referee = Referee(plan, seed, flat_share)
    return World(Scheduler(plan, COSTS), referee, random.Random(seed), trouble, workers)


def run_by_the_rules(*arguments):
    found = world(*arguments)
    found.run()
    found.referee.finish()
    return found


some_runs = given(
    plan=plans(),
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.02, 0.1]),
    workers=st.integers(0, 5),
    flat_share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)


@runs
@some_runs
def test_every_run_ends_by_the_rules_and_equal_events_give_equal_commands(
    plan, seed, trouble, workers, flat_share
):
    """Also if the scheduler is copied in the middle of the run."""
    found = run_by_the_rules(plan, seed, trouble, workers, flat_share)
    middle = random.Random(seed).randrange(len(found.log))
    again = Scheduler(plan, COSTS)
    for event, commands in found.log[:middle]:
        assert again.handle(event) == commands
    other = copy.deepcopy(again)
    for event, commands in found.log[middle:]:
        assert again.handle(event) == commands == other.handle(event)
    assert again.save() == other.save()


@pytest.mark.slow
@settings(runs, max_examples=500)
@some_runs
def test_very_many_runs_end_by_the_rules(plan, seed, trouble, workers, flat_share):
    run_by_the_rules(plan, seed, trouble, workers, flat_share)


@runs
@given(
    plan=plans(ordered=True),
    seed=st.integers(0, 2**32),
    roles=st.lists(st.sampled_from([SAMPLE_ONLY, TRAIN_ONLY, *BOTH]), max_size=4),
    flat_share=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_ordered_workers_train_the_same_pieces_whatever_the_timing(plan, seed, roles, flat_share):
    found = []
    for timing in (1, 2):
        run = world(plan, seed, flat_share=flat_share)
        run.rng = random.Random(seed + timing)
        run.start(roles)
        run.run()
        run.referee.finish()
        pieces = {}
        for command in (c for _, commands in run.log for c in commands if isinstance(c, Train)):
            piece = command.chunk, command.update, command.first, command.count
            pieces.setdefault(command.worker, []).append(piece)
        found.append(pieces)
    assert found[0] == found[1]


@runs
@some_runs
def test_a_resumed_run_continues_from_the_end_of_a_step(plan, seed, trouble, workers, flat_share):
    plan = dataclasses.replace(plan, steps=plan.steps + 1)
    first = at_step_end(plan, seed, trouble, workers, flat_share)
    saved, referee = json.loads(json.dumps(first.scheduler.save())), first.referee
    started = {g: v for g, v in referee.group_version.items() if g[0] >= referee.step}
    assert {WeightsVersion(referee.step), *map(WeightsVersion, started.values())} <= set(
        first.scheduler.kept
    )

    second = world(plan, seed, trouble, workers, flat_share)
    second.scheduler = Scheduler(plan, None, saved)
    records = second.referee
    records.group_version = dict(referee.group_version)
    records.trained = {f: u for f, u in referee.trained.items() if f.step < referee.step}
    records.scored = {f for f in referee.scored if f.evaluation and f.step in referee.evaluated}
    records.step, records.updates = referee.step, list(referee.updates)
    records.published, records.evaluated = set(referee.published), list(referee.evaluated)
    records.dropped = set(referee.dropped)
    older = map(WeightsVersion, range(referee.step))
    records.dropped |= set(older).difference(second.scheduler.kept)
    second.run()
    records.finish()


def at_step_end(plan, seed=0, trouble=0.0, workers=2, flat_share=0.4, step=1):
    """Returns a run in which `step` steps have just ended."""
    found = world(plan, seed, trouble, workers, flat_share)
    found.start()
    while found.referee.step < step:
        found.tick()
    return found


# --------------------------------------------------------------------------------- single rules


class Pool:
    """A scheduler whose workers have joined, home last, and the commands in flight."""

    def __init__(self, plan=PLAIN, roles=(SAMPLE_FIRST,) * 2, home=TRAIN_ONLY, seconds=None):
        self.scheduler, self.flying, self.issued = Scheduler(plan, COSTS), [], []
        names = [f"r{number}" for number in range(len(roles))]
        for name, duration in (seconds or {}).items():  # measured before
            command = Generate(0, name, Chunk(0, 0), WeightsVersion(0))
            self.scheduler.costs.observe(command, duration)
        for name, one in zip([*names, TRAINER], [*roles, home], strict=True):
            self.handle(Joined(0.0, name, one))

    def handle(self, event):
        new = self.scheduler.handle(event)
        self.issued += new
        self.flying += [c for c in new if c.answered]
        self.flying = [c for c in self.flying if c.serial in self.scheduler.in_flight]
        return new

    def find(self, kind=Command, worker=None, chunk=None):
        """The first command in flight of a kind, worker and chunk."""
        return next((c for c in self.flying if matches(c, kind, worker, chunk)), None)

    def complete(self, kind=Command, worker=None, chunk=None):
        command = self.find(kind, worker, chunk)
        self.flying.remove(command)
        settings, values = self.scheduler.settings, ()
        if isinstance(command, Score):
            values = values_of(0, command.chunk, settings, 0.0)
        seconds = getattr(command, "count", 1.0)
        return self.handle(Completed(0.0, command, seconds, values))

    def fail(self, kind, worker, reason="out of memory"):
        command = self.find(kind, worker)
        self.flying.remove(command)
        self.handle(Failed(0.0, command, reason))
        return command

    def until(self, kind, worker=None, hold=()):
        """Completes commands until one of a kind is in flight, which is returned; those of `hold` are not completed."""
        while (found := self.find(kind, worker)) is None:
            self.complete_except(hold)
        return found

    def complete_except(self, hold):
        command = next(c for c in self.flying if not any(matches(c, *one) for one in hold))
        self.complete(
            type(command), getattr(command, "worker", None), getattr(command, "chunk", None)
        )

    def drain(self, hold):
        """Completes all commands in flight, and those that follow, except those of `hold`."""
        while not all(any(matches(c, *one) for one in hold) for c in self.flying):
            self.complete_except(hold)

    def roles(self, worker):
        return self.scheduler.workers[worker].roles


def matches(command, kind=Command, worker=None, chunk=None):
    return (
        isinstance(command, kind)
        and worker in (None, getattr(command, "worker", 0))
        and chunk in (None, getattr(command, "chunk", 0))
    )


def test_work_that_failed_is_tried_elsewhere_and_not_forever():
    pool = Pool(dataclasses.replace(PLAIN, retries=1))
    first, second = pool.until(Generate, "r0"), pool.until(Generate, "r1")
    pool.fail(Generate, "r0")
    assert pool.find(Generate, "r0").chunk not in (first.chunk, second.chunk)
    pool.complete(Generate, "r1")
    pool.complete(Decode, "r1")
    assert pool.find(Generate, "r1").chunk == first.chunk
    with pytest.raises(SchedulerError, match=r"chunk 0 of step 0 failed 2 times.*no luck"):
        pool.fail(Generate, "r1", "no luck")


@pytest.mark.parametrize(("kind", "role"), [(Generate, "sample"), (Train, "train")])
def test_two_failures_in_a_row_remove_a_role_and_the_run_ends_without_workers(kind, role):
    plan = dataclasses.replace(PLAIN, groups=8, retries=99)
    pool = Pool(plan, home=SAMPLE_FIRST)
    for worker in ("r0", "r1"):
        for _ in range(2):
            assert role in pool.roles(worker)
            pool.until(kind, worker)
            pool.fail(kind, worker)
        assert pool.roles(worker) == tuple(r for r in SAMPLE_FIRST if r != role)
    issued = len(pool.issued)
    pool.until(kind, TRAINER)
    pool.fail(kind, TRAINER)
    pool.until(kind, TRAINER)
    assert not any(matches(c, kind, w) for c in pool.issued[issued:] for w in ("r0", "r1"))
    with pytest.raises(SchedulerError, match=f"no worker is left that can {role}"):
        pool.fail(kind, TRAINER)


def test_the_run_ends_when_the_home_worker_disconnects():
    with pytest.raises(SchedulerError, match="the trainer"):
        Pool().handle(Removed(1.0, TRAINER))


@pytest.mark.parametrize(("seconds", "expected"), [(1.2, 2), (20.0, 1)])
def test_a_slow_worker_leaves_the_last_chunk_to_a_fast_one(seconds, expected):
    pool = Pool(dataclasses.replace(PLAIN, groups=1), seconds={"r0": 1.0, "r1": seconds})
    pool.drain([(Generate,)])
    assert sum(isinstance(c, Generate) for c in pool.flying) == expected


def test_pieces_get_smaller_towards_the_end():
    """A piece is at most half of its worker's share of the passes that are left, and at least one pass."""
    plan = dataclasses.replace(PLAIN, steps=1, groups=8, images=1, passes=32)
    pool = Pool(plan, roles=(SAMPLE_FIRST,) * 3, home=SAMPLE_FIRST)
    step, known, pieces = pool.scheduler.steps[0], {}, []
    while not pool.scheduler.finished:
        left = step.left
        pool.complete()
        for name, worker in pool.scheduler.workers.items():
            if worker.piece not in (None, known.get(name)):
                pieces.append(worker.piece.count)
                assert 1 <= worker.piece.count <= max(1, left / 8)
            known[name] = worker.piece
    assert sum(pieces) == 8 * 32 and pieces[0] == 32 and pieces[-4:] == [1] * 4


# ------------------------------------------------------------------------------------- policy lag


def late_weight_sync(steps=4):
    """Version 1 is in transfer to r1 while r0, which makes a step's one chunk, takes the run to its last step."""
    plan = dataclasses.replace(PLAIN, steps=steps, groups=1, chunk_images=2, retries=0)
    pool = Pool(plan, roles=(SAMPLE_ONLY,) * 2)
    pool.until(Generate, "r0")
    while pool.scheduler.step < steps - 1:
        pool.complete_except([(SyncWeights, "r1", None)] if pool.scheduler.step else [])
    return pool


def test_a_worker_gets_only_the_last_of_the_versions_that_exist_after_a_transfer():
    pool = late_weight_sync()
    sent = [c.weights_version for c in pool.issued if matches(c, SyncWeights, "r1")]
    assert sent == [WeightsVersion(0), WeightsVersion(1)]
    pool.complete(SyncWeights, "r1")
    assert pool.find(SyncWeights, "r1").weights_version.version == 3


def test_a_failed_transfer_of_superseded_weights_does_not_count_against_its_worker():
    pool = late_weight_sync()
    assert pool.scheduler.is_superseded(pool.find(SyncWeights, "r1"))
    pool.fail(SyncWeights, "r1")
    newest = pool.find(SyncWeights, "r1")
    assert newest.weights_version.version == 3 and not pool.scheduler.is_superseded(newest)
    with pytest.raises(SchedulerError, match="sending version 3 to r1 failed 1 times"):
        pool.fail(SyncWeights, "r1")


@pytest.mark.parametrize(
    ("max_policy_lag", "share", "expected"),
    [(0, 0.5, 0), (1, 0.0, 0), (1, 0.3, 3), (1, 0.5, 5), (1, 1.0, 10)],
)
def test_lag_and_fraction_bound_the_chunks_that_start_early(max_policy_lag, share, expected):
    plan = dataclasses.replace(
        PLAIN,
        groups=10,
        images=1,
        steps=3,
        max_policy_lag=max_policy_lag,
        max_off_policy_fraction=share,
    )
    pool = Pool(plan, roles=(SAMPLE_ONLY,) * 2)
    pool.drain([(Train,)])
    started = {c.chunk for c in pool.issued if isinstance(c, Generate)}
    assert sorted(f.index for f in started if f.step == 1) == list(range(expected))
    assert all(f.step <= 1 for f in started)


def test_the_home_worker_does_not_sample_ahead_when_its_update_is_due():
    """Other workers start the next step, and each update starts when its step's last piece ends."""
    pool = Pool(
        dataclasses.replace(PLAIN, max_policy_lag=1, max_off_policy_fraction=1.0),
        roles=(SAMPLE_FIRST,) * 2,
        home=SAMPLE_FIRST,
    )
    pool.until(Train, "r0")
    pool.drain([(Train, "r0")])
    step = pool.scheduler.steps[0]
    assert step.left == 0 and not step.set_trained
    early = {c.worker for c in pool.issued if isinstance(c, Generate) and c.chunk.step == 1}
    assert early and TRAINER not in early

    plan = dataclasses.replace(PLAIN, groups=32, images=1, max_policy_lag=1, passes=8)
    costs = dataclasses.replace(COSTS, update=1.0, score_latency=3.0)
    report = simulate((WorkerLayout(),) * 4, costs, plan, 6)
    for step, update in enumerate(i for i in report.intervals if i.kind == "update"):
        own = (i.end for i in report.intervals if i.kind == "train" and i.chunk.step == step)
        assert update.start == pytest.approx(max(own))


# ------------------------------------------------------------------------------------- resuming


def test_the_clock_of_a_resumed_scheduler_is_that_of_its_process():
    """Otherwise times would not advance until the new process is as old as the last one was."""
    plan = dataclasses.replace(PLAIN, steps=4)
    found = at_step_end(plan, step=2).scheduler
    assert found.now > 5
    scheduler = Scheduler(plan, None, found.save())
    for time in (0.5, 2.0):
        scheduler.handle(Removed(time, "unknown"))
        assert scheduler.now == time


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_a_run_resumes_with_other_chunks_and_workers(chunk):
    """Chunks started by an older version keep it, in any new division into units."""
    plan = dataclasses.replace(PLAIN, steps=4, groups=4, max_policy_lag=1, chunk_images=2)
    saved = at_step_end(plan, seed=2).scheduler
    old = saved.steps[1]
    started = {i for i, group in enumerate(old.groups) if group.version == 0}
    assert started and saved.kept == [WeightsVersion(0), WeightsVersion(1)]
    cut = dataclasses.replace(plan, chunk_images=chunk)
    other = Costs(generate=9.0, train=1.0)
    scheduler = Scheduler(cut, other, json.loads(json.dumps(saved.save())))
    per_unit = cut.unit_images // plan.images
    units = {i for i, group in enumerate(scheduler.steps[1].groups) if group.version == 0}
    assert units == {i // per_unit for i in started}
    assert scheduler.steps[1].off_policy == len(units)
    assert scheduler.costs.predict("generate", "r0") == 9.0 * chunk
    assert scheduler.kept == [WeightsVersion(0), WeightsVersion(1)]
    second = World(scheduler, Referee(cut, 0, 0.0), random.Random(0), 0.0, 1)
    records = second.referee
    records.step, records.updates, records.published = 1, [(0, 0)], {0, 1}
    records.group_version = {(1, unit * per_unit): 0 for unit in units}
    second.run()
    assert scheduler.finished


def test_a_scheduler_is_saved_only_at_the_end_of_a_step():
    pool = Pool()
    pool.until(Train)
    pool.complete(Train)
    with pytest.raises(ValueError):
        pool.scheduler.save()


def test_samples_of_workers_that_only_sample_are_spread_over_those_that_train():
    plan = dataclasses.replace(PLAIN, groups=6, images=1, steps=1)
    pool = Pool(plan, roles=(SAMPLE_ONLY, TRAIN_ONLY, TRAIN_ONLY))
    while not pool.scheduler.finished:
        pool.complete()
    receivers = {}
    for command in pool.issued:
        if isinstance(command, Deliver):
            receivers.setdefault(command.chunk, command.to)
    assert sorted(receivers.values()) == ["r1", "r1", "r2", "r2", TRAINER, TRAINER]


EVALUATED = dataclasses.replace(
    PLAIN, groups=4, evaluate_every=1, evaluation_images=4, evaluation_batch=2
)
SLOW_EVALUATION = dataclasses.replace(COSTS, evaluate=3.0)


@pytest.mark.parametrize("roles", [TRAIN_ONLY, SAMPLE_FIRST])
def test_every_worker_that_samples_evaluates(roles):
    plan = dataclasses.replace(EVALUATED, evaluation_images=8)
    layout = WorkerLayout(roles=roles), WorkerLayout(roles=SAMPLE_ONLY)
    report = simulate(layout, SLOW_EVALUATION, plan, 2)
    workers = {i.worker for i in report.intervals if i.kind == "evaluate"}
    assert workers == ({"rollout 0"} if roles == TRAIN_ONLY else {"rollout 0", TRAINER})


def test_shown_versions_have_their_own_images_and_times():
    plan = dataclasses.replace(
        EVALUATED, steps=5, evaluate_every=3, evaluation_images=7, show_every=2, shown_images=3
    )
    assert [plan.evaluated_images(version) for version in range(6)] == [7, 0, 3, 7, 3, 7]
    assert [plan.evaluated_chunks(version) for version in range(6)] == [4, 0, 2, 4, 2, 4]
