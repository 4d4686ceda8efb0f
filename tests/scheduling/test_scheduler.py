"""Random runs with delays, losses and failures, each checked by a referee; then single rules."""

import copy
import dataclasses
import heapq
import itertools
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digen_jax.scheduling.commands import (
    TRAINER,
    Checkpoint,
    Command,
    Decode,
    Deliver,
    Encode,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Train,
)
from digen_jax.scheduling.costs import CostModel
from digen_jax.scheduling.events import Completed, Failed, Joined, Lost
from digen_jax.scheduling.outlook import look_ahead
from digen_jax.scheduling.planner.simulate import Layout, Mesh, simulate
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.state import SchedulerError
from tests.scheduling.world import Referee, World, values_of

COSTS = Costs(generate=1.0, train=1.0, decode=0.1, score=0.1, publish=0.2, switch=0.1)
PLAIN = Settings(2, groups=2, images=2, fragment_images=1, staleness=0)
runs = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def plans(draw):
    """Settings of any kind that pass the checks."""
    dynamic = draw(st.booleans())
    images = draw(st.sampled_from([2, 4, 6] if dynamic else [1, 2, 4, 6]))
    updates = draw(st.integers(1, 3))
    groups = updates * draw(st.integers(1, 3))
    divisors = [n for n in range(1, images + 1) if images % n == 0]
    share = groups // updates * images
    multiples = [images * n for n in range(1, 4) if groups // updates % n == 0]
    fragment = draw(st.sampled_from(divisors if dynamic else divisors + multiples))
    open_groups = 0 if dynamic else draw(st.integers(0, 3))
    if open_groups:
        fragment = draw(st.sampled_from(divisors))
    elif not dynamic and draw(st.booleans()):
        fragment = draw(st.sampled_from([n for n in range(1, share + 1) if share % n == 0]))
    redundant = draw(st.integers(0, 3)) if dynamic else 0
    found = Settings(
        steps=draw(st.integers(1, 4)),
        groups=groups,
        images=images,
        fragment_images=fragment,
        updates=updates,
        readiness=draw(st.sampled_from(["group", "step"])),
        ordered=not open_groups and draw(st.booleans()),
        open_groups=open_groups,
        staleness=draw(st.integers(0, 3)),
        stale_share=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        tag_fragments=draw(st.sampled_from([0, 1, 100])),
        max_candidates=groups + redundant + draw(st.integers(0, 4)) if dynamic else 0,
        redundant_groups=redundant,
        retries=draw(st.integers(0, 2)),
        evaluate_every=draw(st.integers(0, 2)),
        evaluation_images=draw(st.integers(1, 3)),
        show_every=draw(st.integers(0, 2)),
        shown_images=1,
        evaluation_batch=draw(st.integers(1, 2)),
        evaluated_apart=draw(st.booleans()),
        checkpoint_every=draw(st.integers(0, 2)),
    )
    found.check()
    return found


def world(plan, seed, trouble, workers, flat_share=0.4):
    referee = Referee(plan, seed, flat_share)
    return World(Scheduler(plan, COSTS), referee, random.Random(seed), trouble, workers)


some_runs = given(
    plan=plans(),
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.02, 0.1]),
    workers=st.integers(0, 5),
    flat_share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)


@runs
@some_runs
def test_every_run_ends_by_the_rules(plan, seed, trouble, workers, flat_share):
    found = world(plan, seed, trouble, workers, flat_share)
    found.run()
    found.referee.finish()


@pytest.mark.slow
@settings(runs, max_examples=400)
@some_runs
def test_very_many_runs_end_by_the_rules(plan, seed, trouble, workers, flat_share):
    found = world(plan, seed, trouble, workers, flat_share)
    found.run()
    found.referee.finish()


@runs
@some_runs
def test_equal_events_give_equal_commands_also_from_the_middle(
    plan, seed, trouble, workers, flat_share
):
    found = world(plan, seed, trouble, workers, flat_share)
    found.run()
    middle = random.Random(seed).randrange(len(found.log))
    again = Scheduler(plan, COSTS)
    for event, commands in found.log[:middle]:
        assert again.handle(event) == commands
    others = [copy.deepcopy(again), Scheduler.restore(json.loads(json.dumps(again.save())))]
    for event, commands in found.log[middle:]:
        assert again.handle(event) == commands
        for other in others:
            assert other.handle(event) == commands
    assert again.save() == others[0].save() == others[1].save()


@settings(runs, max_examples=150)
@some_runs
def test_a_new_process_goes_on_from_a_checkpoint(plan, seed, trouble, workers, flat_share):
    plan = dataclasses.replace(plan, steps=plan.steps + 1, checkpoint_every=1)
    found = world(plan, seed, trouble, workers, flat_share)
    found.start()
    while not found.referee.checkpoints:
        found.tick()
    scheduler, referee = found.scheduler, found.referee
    saved, kept = json.loads(json.dumps(scheduler.save())), scheduler.kept
    begun = {g: v for g, v in referee.group_version.items() if g[0] >= referee.step}
    assert kept == sorted({*kept, *map(Publication, begun.values())})

    second = world(plan, seed, trouble, workers, flat_share)
    second.scheduler = Scheduler.resume(saved)
    books = second.referee
    done = range(referee.step)
    books.group_version = dict(referee.group_version)
    books.trained = {f: u for f, u in referee.trained.items() if f.step in done}
    books.scored = {f for f in referee.scored if f.evaluation and f.step in referee.evaluated}
    books.step, books.updates = referee.step, list(referee.updates)
    books.published, books.dropped = set(referee.published), set(referee.dropped)
    books.evaluated, books.gone = list(referee.evaluated), set(referee.gone)
    second.run()
    books.tagged.clear()
    books.finish()


# --------------------------------------------------------------------------------- single rules


def joined(plan=PLAIN, workers=2):
    """A scheduler with workers that hold version 0, and the commands in flight."""
    scheduler, flying = Scheduler(plan, COSTS), []
    for event in [*(Joined(0.0, f"r{i}") for i in range(workers)), Joined(0.0, TRAINER)]:
        flying += scheduler.handle(event)
    return scheduler, flying


def complete(scheduler, flying, kind=Command, worker=None, at=0.0):
    """Completes the first command in flight of a kind and worker; returns the resulting commands."""
    command = next(
        c for c in flying if isinstance(c, kind) and worker in (None, getattr(c, "worker", 0))
    )
    flying.remove(command)
    values = ()
    if command.kind == "score":
        values = values_of(0, command.fragment, scheduler.state.settings, 0.0)
    new = scheduler.handle(Completed(at, command, 1.0, values))
    flying += [c for c in new if c.answered]
    return new


def until_generating(scheduler, flying):
    while any(isinstance(c, Publish | Encode) for c in flying):
        complete(scheduler, flying, Publish | Encode)


def test_a_lost_workers_fragment_is_generated_elsewhere_by_the_same_version():
    scheduler, flying = joined()
    until_generating(scheduler, flying)
    lost, other = (c for c in flying if isinstance(c, Generate))
    scheduler.handle(Lost(1.0, lost.worker))
    complete(scheduler, flying, Generate, other.worker)
    new = complete(scheduler, flying, worker=other.worker)
    found = [c for c in new if isinstance(c, Generate)]
    assert [(c.fragment, c.version) for c in found] == [(lost.fragment, lost.version)]


def test_what_failed_is_tried_elsewhere_and_not_for_ever():
    scheduler, flying = joined(dataclasses.replace(PLAIN, retries=1))
    until_generating(scheduler, flying)
    first, second = (c for c in flying if isinstance(c, Generate))
    (other,) = scheduler.handle(Failed(1.0, first, "out of memory"))
    assert other.worker == first.worker and other.fragment == Fragment(0, 2)
    complete(scheduler, flying, Generate, second.worker)
    new = complete(scheduler, flying, worker=second.worker)
    again = next(c for c in new if isinstance(c, Generate))
    assert again.fragment == first.fragment
    with pytest.raises(SchedulerError, match=r"fragment 0 of step 0 failed 2 times.*no luck"):
        scheduler.handle(Failed(2.0, again, "no luck"))


def test_a_lost_trainer_is_the_end():
    scheduler, _ = joined()
    with pytest.raises(SchedulerError, match="the trainer is lost"):
        scheduler.handle(Lost(1.0, TRAINER))


def test_a_slow_worker_leaves_the_last_fragment_to_a_fast_one():
    plan = dataclasses.replace(PLAIN, groups=1)
    for slow, expected in ((0.9, 2), (0.05, 1)):
        scheduler = Scheduler(plan, COSTS)
        flying = []
        for worker, speed in (("fast", 1.0), ("slow", slow), (TRAINER, 1.0)):
            flying += scheduler.handle(Joined(0.0, worker, speed))
        until_generating(scheduler, flying)
        assert sum(isinstance(c, Generate) for c in flying) == expected


def late_publication(steps=4):
    """Version 1 is in transfer to r1 while r0, which makes a step's one fragment, takes the run to its last step."""
    plan = dataclasses.replace(PLAIN, steps=steps, groups=1, fragment_images=2, retries=0)
    scheduler, flying = joined(plan)
    until_generating(scheduler, flying)
    late, sent = None, []
    while scheduler.state.step < steps - 1:
        command = next(c for c in flying if c is not late)
        flying.remove(command)
        values = (0.0, 1.0) if command.kind == "score" else ()
        new = scheduler.handle(Completed(0.0, command, 1.0, values))
        flying += [c for c in new if c.answered]
        sent += [c for c in new if isinstance(c, Publish) and c.worker == "r1"]
        late = late or next(iter(sent), None)
    return scheduler, late, sent


def test_of_the_versions_that_come_while_one_is_sent_a_worker_gets_the_last():
    scheduler, late, sent = late_publication()
    assert [c.version for c in sent] == [1]
    (newest,) = (c for c in scheduler.handle(Completed(1.0, late, 1.0)) if isinstance(c, Publish))
    assert (newest.worker, newest.version) == ("r1", 3)


def test_a_publication_that_fails_once_it_is_superseded_is_not_held_against_its_worker():
    scheduler, late, _ = late_publication()
    assert scheduler.is_superseded(late)
    (newest,) = (c for c in scheduler.handle(Failed(1.0, late, "gone")) if isinstance(c, Publish))
    assert (newest.worker, newest.version) == ("r1", 3) and not scheduler.is_superseded(newest)
    with pytest.raises(SchedulerError, match="publishing version 3 to r1 failed 1 times"):
        scheduler.handle(Failed(2.0, newest, "the link is down"))


def test_workers_stay_apart_from_a_step_ahead_when_strictly_on_policy():
    for staleness, share, expected in ((0, 0.5, set()), (1, 0.5, {0, 1}), (1, 1.0, {0, 1, 2, 3})):
        plan = dataclasses.replace(PLAIN, staleness=staleness, stale_share=share)
        scheduler, flying = joined(plan)
        begun = set()
        while any(not isinstance(c, Train) for c in flying):
            complete(scheduler, flying, tuple(set(map(type, flying)) - {Train}))
            begun |= {c.fragment for c in flying if isinstance(c, Generate)}
        assert {f.index for f in begun if f.step == 1} == expected


def test_a_checkpoint_comes_after_every_so_many_steps_and_the_last():
    plan = dataclasses.replace(PLAIN, steps=5, checkpoint_every=2)
    found = world(plan, 0, 0.0, 2)
    found.run()
    checkpoints = [c.step for _, out in found.log for c in out if isinstance(c, Checkpoint)]
    assert checkpoints == [1, 3, 4]


def at_a_checkpoint(plan, seed=0, after=1):
    """A world after so many checkpoints."""
    found = world(dataclasses.replace(plan, checkpoint_every=1), seed, 0.0, 2)
    found.start()
    while len(found.referee.checkpoints) < after:
        found.tick()
    return found.scheduler


def rejoined(scheduler, workers=2):
    """All commands in flight once workers have joined a resumed scheduler at its time 0."""
    flying = []
    for name in (*(f"r{i}" for i in range(workers)), TRAINER):
        flying += [c for c in scheduler.handle(Joined(0.0, name)) if c.answered]
    return flying


def test_the_clock_of_a_resumed_scheduler_is_its_new_processs():
    """Otherwise times would not advance until the new process is as old as the last one was."""
    plan = dataclasses.replace(PLAIN, steps=4, tag_fragments=4, staleness=1)
    saved = at_a_checkpoint(plan, after=2)
    assert saved.state.now > 5
    scheduler = Scheduler.resume(saved.save())
    flying = rejoined(scheduler)
    until_generating(scheduler, flying)
    assert any(worker.free_at > 0 for worker in scheduler.state.rollout.values())
    for time in (0.5, 2.0):
        scheduler.handle(Lost(time, "nobody"))
        assert scheduler.state.now == time
    batch = scheduler.state.batch
    ahead = look_ahead(scheduler.state)
    first = min(batch.scored_at.values()) - 2.0
    assert min(f.scored_in for f in ahead.fragments if f.scored_in is not None) == max(0, first)
    assert max(batch.scored_at.values()) < 10


def one_step(scheduler, costs):
    """The trainer's generated fragments in a step with these costs, their times, and the step's seconds."""
    flying, made, serials = [], [], itertools.count()
    settings, step = scheduler.state.settings, scheduler.state.step

    def begin(time, commands):
        for command in commands:
            if isinstance(command, Generate) and command.worker == TRAINER:
                made.append((round(time, 6), command.fragment.index))
            if command.answered:
                seconds = costs.seconds(command.kind, settings.fragment_images, 1.0)
                heapq.heappush(flying, (time + seconds, next(serials), seconds, command))

    for name in ("r0", "r1", TRAINER):
        begin(0.0, scheduler.handle(Joined(0.0, name)))
    while scheduler.state.step == step:
        time, _, seconds, command = heapq.heappop(flying)
        score = command.kind == "score"
        values = values_of(0, command.fragment, settings, 0.0) if score else ()
        begin(time, scheduler.handle(Completed(time, command, seconds, values)))
    return made, round(time, 6)


@pytest.mark.parametrize("groups", [8, 16])
def test_a_resumed_trainer_decides_on_tag_as_one_that_was_not_interrupted(groups):
    """With a clock that does not advance it generates more, and the step of 16 groups takes 3% longer."""
    costs = dataclasses.replace(COSTS, train=0.3)
    plan = dataclasses.replace(PLAIN, steps=4, groups=groups, images=1, tag_fragments=8)
    saved = at_a_checkpoint(plan, after=2)
    saved.state.costs = CostModel(costs, plan.fragment_images)
    made, seconds = one_step(Scheduler.resume(saved.save(), plan), costs)
    assert (made, seconds) == one_step(Scheduler(plan, costs), costs)
    assert made and seconds > 5 - 1e-9


@pytest.mark.parametrize("fragment", [1, 2, 4, 8])
def test_a_run_goes_on_with_other_fragments_and_workers(fragment):
    """Fragments begun by an older version keep it, in any new division into units."""
    plan = dataclasses.replace(PLAIN, steps=4, groups=4, staleness=1, fragment_images=2)
    saved = at_a_checkpoint(plan, seed=3)
    old = saved.state.batch
    begun = {i for i, group in enumerate(old.groups) if group.version == 0}
    assert begun and saved.kept == [Publication(0), Publication(1)]
    cut = dataclasses.replace(plan, fragment_images=fragment)
    other = Costs(generate=9.0, train=1.0)
    scheduler = Scheduler.resume(json.loads(json.dumps(saved.save())), cut, other)
    state = scheduler.state
    per_unit = cut.unit_images // plan.images
    units = {i for i, group in enumerate(state.batch.groups) if group.version == 0}
    assert units == {i // per_unit for i in begun} and state.batch.stale == len(units)
    assert state.costs.predict("generate", "r0", 1.0) == 9.0 * fragment
    assert scheduler.kept == [Publication(0), Publication(1)]
    second = World(scheduler, Referee(cut, 0, 0.0), random.Random(0), 0.0, 1)
    books = second.referee
    books.step, books.updates, books.published = 1, [0], {0, 1}
    books.group_version = {(1, unit): 0 for unit in units}
    second.run()
    assert scheduler.finished


def test_only_the_end_of_a_step_can_be_resumed_from():
    found = world(PLAIN, 0, 0.0, 2)
    found.start()
    while not found.referee.trained:
        found.tick()
    with pytest.raises(ValueError, match="from the end of a step"):
        Scheduler.resume(found.scheduler.save())


# ---------------------------------------------------------------------------------- handing over


def test_what_a_lost_worker_has_made_and_not_handed_over_is_made_again():
    """Decoded, scored or delivered alone is not enough: images and samples are on the worker."""
    for done in ((), (Score,), (Deliver,)):
        scheduler, flying = joined()
        until_generating(scheduler, flying)
        for kind in (Generate, Decode):
            complete(scheduler, flying, kind, "r0")
        fragment = next(c.fragment for c in flying if isinstance(c, Score))
        for kind in done:
            complete(scheduler, flying, kind)
        scheduler.handle(Lost(1.0, "r0"))
        made = []
        while not made:
            new = complete(scheduler, flying, Generate | Decode, "r1")
            made = [c for c in new if isinstance(c, Generate) and c.fragment == fragment]
        scheduler, flying = joined()
        until_generating(scheduler, flying)
        for kind in (Generate, Decode, Score, Deliver):
            complete(scheduler, flying, kind, "r0" if kind in (Generate, Decode) else None)
        scheduler.handle(Lost(1.0, "r0"))
        assert scheduler.state.batch.stages[fragment.index] in ("scored", "ready")


# ------------------------------------------------------------------------------------ evaluation


EVALUATED = dataclasses.replace(
    PLAIN, groups=4, evaluate_every=1, evaluation_images=4, evaluation_batch=2
)
DEAR = dataclasses.replace(COSTS, evaluate=3.0)


def simulated(plan, layout, costs=DEAR):
    return simulate(layout, costs, plan, plan.steps)


def test_an_evaluation_fills_the_time_in_which_the_trainer_trains():
    """If training is slower than generation it costs nothing, except for the last version's."""
    slow = dataclasses.replace(DEAR, train=4.0, evaluate=1.0)
    layout = Layout(Mesh(), (Mesh(), Mesh()))
    plan = dataclasses.replace(EVALUATED, steps=3)
    without = dataclasses.replace(plan, evaluate_every=0)
    ends = [simulated(settings, layout, slow).step_ends for settings in (plan, without)]
    assert ends[0] == pytest.approx(ends[1])


def test_it_is_over_before_the_next_version_is_there():
    report = simulated(EVALUATED, Layout(Mesh(), (Mesh(),)))
    made = [i for i in report.intervals if i.kind == "evaluate" and i.worker != "reward"]
    updates = [i for i in report.intervals if i.kind == "update"]
    for version, update in enumerate(updates):
        own = [i for i in made if i.fragment.step == version]
        assert len({i.fragment for i in own}) == 2
        assert max(i.end for i in own) <= update.start
    assert {i.fragment.step for i in made} == {0, 1, 2}


@pytest.mark.parametrize(("tags", "workers"), [(0, {"rollout 0"}), (4, {"rollout 0", TRAINER})])
def test_the_trainer_helps_where_it_may_sample_and_would_wait(tags, workers):
    plan = dataclasses.replace(EVALUATED, evaluation_images=8, tag_fragments=tags)
    report = simulated(plan, Layout(Mesh(), (Mesh(),)))
    made = [i for i in report.intervals if i.kind == "evaluate" and i.worker != "reward"]
    assert {i.worker for i in made} == workers
    alone = simulated(dataclasses.replace(plan, tag_fragments=0), Layout(Mesh(), (Mesh(),)))
    assert report.step_ends[-1] <= alone.step_ends[-1]


def test_what_is_only_shown_has_its_own_images_and_time():
    plan = dataclasses.replace(
        EVALUATED, steps=5, evaluate_every=3, evaluation_images=7, show_every=2, shown_images=3
    )
    assert [plan.evaluated_images(version) for version in range(6)] == [7, 0, 3, 7, 3, 7]
    assert [plan.evaluated_fragments(version) for version in range(6)] == [4, 0, 2, 4, 2, 4]
