"""Simulated runs against closed forms, and TAG against a search over all choices of a trainer."""

import functools
import itertools
import math

import pytest

from digen_jax.scheduling.commands import TRAINER
from digen_jax.scheduling.planner.simulate import Change, Disturbance, Layout, Mesh, simulate
from digen_jax.scheduling.settings import Costs, Settings

DEVICES, FRAGMENTS = 32, 64


def run(rollout, generation, training, steps=6, devices=DEVICES, fragments=FRAGMENTS, **fields):
    """Without losses: device-seconds a fragment; rollout workers of one device, a linear trainer."""
    n = devices - rollout
    fields = dict(staleness=0) | fields
    settings = Settings(steps, groups=fragments, images=1, fragment_images=1, **fields)
    costs = Costs(generate=float(generation), train=training / n)
    layout = Layout(Mesh(n, float(n)), (Mesh(),) * rollout)
    return simulate(layout, costs, settings, steps)


@pytest.mark.parametrize("rollout", [1, 7, 16, 28])
@pytest.mark.parametrize("ratio", [0.25, 1, 4])
def test_plain_disaggregation_generates_all_then_trains(rollout, ratio):
    report = run(rollout, ratio, 1, readiness="step")
    expected = math.ceil(FRAGMENTS / rollout) * ratio + FRAGMENTS / (DEVICES - rollout)
    assert report.step_times == pytest.approx([expected] * 6)


@pytest.mark.parametrize("ratio", [0.125, 1, 8])
def test_plain_disaggregation_at_its_best_split(ratio):
    """(sqrt G + sqrt T)²/N, as near as whole devices and fragments come."""
    fragments = 720  # divisible by most splits
    middle = round(DEVICES * math.sqrt(ratio) / (1 + math.sqrt(ratio)))
    best = min(
        run(n, ratio, 1, steps=1, fragments=fragments, readiness="step").step_seconds
        for n in range(middle - 2, middle + 3)
    )
    expected = fragments * (1 + math.sqrt(ratio)) ** 2 / DEVICES
    assert expected <= best <= 1.02 * expected


def test_colocated_without_switching_is_at_the_bound():
    assert run(0, 3, 1).utilisation == pytest.approx(1)


@pytest.mark.parametrize(("rollout", "ratio"), [(8, 1), (16, 1), (16, 4), (24, 2)])
def test_overlap_of_a_fixed_split(rollout, ratio):
    """max(G/n_r, T/n_t) plus the fill: the first fragments to come, or the last to be trained."""
    report = run(rollout, ratio, 1)
    generation = FRAGMENTS * ratio / rollout
    training = FRAGMENTS / (DEVICES - rollout)
    for seconds in report.step_times:
        assert seconds >= max(generation, training) + min(ratio, training / FRAGMENTS) - 1e-9
        first = ratio + rollout / (DEVICES - rollout)
        assert seconds <= max(generation, training) + first + 1e-9


@pytest.mark.parametrize(
    ("generation", "training"), [(1, 8), (1, 5), (1, 3), (1, 1), (3, 2), (2, 1), (4, 1), (8, 1)]
)
def test_asynchrony_of_half_a_step_reaches_98_percent_of_the_bound(generation, training):
    share = generation / (generation + training)
    near = {math.floor(DEVICES * share), math.ceil(DEVICES * share)}
    reports = [
        run(n, generation, training, staleness=1, stale_share=0.5, tag_fragments=FRAGMENTS)
        for n in near
    ]
    best = max(reports, key=lambda report: report.utilisation)
    assert 0.98 <= best.utilisation <= 1 + 1e-9
    assert set(best.trained_by_age) <= {0, 1}
    assert best.trained_by_age[1] <= best.trained_by_age.total() / 2


# ------------------------------------------------------------------------------------ friction


def test_nothing_is_lost_when_workers_come_and_go():
    changes = (
        Change(2.5, "rollout 0"),
        Change(3.0, "rollout 1"),
        Change(7.0, "late", Mesh(2, 2.0)),
    )
    settings = Settings(3, groups=8, images=4, fragment_images=2)
    costs = Costs(generate=1.0, train=0.1, decode=0.1, score=0.05, publish=0.2, update=0.3)
    layout = Layout(Mesh(), (Mesh(),) * 3)
    disturbed = Disturbance(jitter=0.3, scorers=2, changes=changes, seed=3)
    report = simulate(layout, costs, settings, 3, disturbed)
    trained = [i.fragment for i in report.intervals if i.kind == "train"]
    assert len(trained) == len(set(trained)) == 3 * 16
    assert any(i.worker == "late" and i.kind == "generate" for i in report.intervals)
    again = simulate(layout, costs, settings, 3, disturbed)
    assert again.intervals == report.intervals


def test_a_timeline_has_neither_gaps_nor_overlaps():
    settings = Settings(3, groups=8, images=4, fragment_images=2, tag_fragments=3)
    costs = Costs(0.5, 0.4, decode=0.1, score=0.3, publish=0.2, update=0.3, switch=0.1)
    layout = Layout(Mesh(2, 2.0), (Mesh(),) * 3)
    report = simulate(layout, costs, settings, 3, Disturbance(jitter=0.2, scorers=2))
    end = report.step_ends[-1]
    for worker in report.devices:
        spans = sorted((i.start, i.end) for i in report.intervals if i.worker == worker)
        assert spans[0][0] == 0
        for (_, before), (after, _) in itertools.pairwise(spans):
            assert after == pytest.approx(before)
        assert spans[-1][1] == pytest.approx(end) or spans[-1][1] > end
    assert set(report.bubbles()) <= {"generation", "reward", "trainer", "publish", "end"}


def test_waiting_has_its_cause():
    settings = Settings(1, groups=2, images=1, fragment_images=1, staleness=0)
    costs = Costs(generate=3.0, train=1.0, score_latency=2.0, publish=0.5)
    report = simulate(Layout(Mesh(4), (Mesh(),)), costs, settings, 1)
    # The worker gets its weights at 0.5, generates until 6.5, the rewards take until 8.5.
    assert report.step_times == pytest.approx([9.5])
    expected = {"publish": 0.5, "trainer": 3.0, "generation": 4 * 5.5, "reward": 4 * 2.0}
    assert report.bubbles() == pytest.approx(expected)


def test_more_scorers_than_one_work_side_by_side():
    settings = Settings(1, groups=4, images=1, fragment_images=1, readiness="step", staleness=0)
    costs = Costs(generate=0.0, train=0.0, score_latency=1.0)
    layout = Layout(Mesh(), (Mesh(),))
    seconds = [
        simulate(layout, costs, settings, 1, Disturbance(scorers=n)).step_seconds for n in (1, 2, 0)
    ]
    assert seconds == pytest.approx([4, 2, 1])


# ----------------------------------------------------------------------------------------- TAG


def best_step(fragments, rollout, generate, score, train, switch, free=False):
    """The shortest step over all that the trainer can do, by trying everything.

    Fragments are alike. A free rollout worker takes one, unless faster ones that are busy would
    have finished all of them before it is done. A free trainer trains
    what is scored (if `free`, it may generate all the same); with nothing to train it generates one
    or waits until something happens.
    """

    @functools.cache
    def finish(now, busy, workers, scored, queued, untrained, sampling):
        """The trainer is busy until `time`; workers as (free at, seconds); times of scores."""
        if not untrained:
            return busy
        for worker in sorted(workers, key=lambda worker: worker[1]):
            at, seconds = worker
            sooner = [u for u, s in workers if s < seconds and now < u and u + s < now + seconds]
            if at <= now and len(sooner) < queued:
                workers = (*(w for w in workers if w is not worker), (now + seconds, seconds))
                scored = (*scored, now + seconds + score)
                queued -= 1
        scored = tuple(sorted(scored))
        ready, ends = bool(scored) and scored[0] <= now, []
        if busy <= now and ready:
            end = now + switch * sampling + train
            ends.append(finish(now, end, workers, scored[1:], queued, untrained - 1, False))
        if busy <= now and queued and (free or not ready):
            end = now + switch * (not sampling) + generate
            made = (*scored, end + score)
            ends.append(finish(now, end, workers, made, queued - 1, untrained, True))
        if busy > now or not ready:
            events = [busy, *scored, *(at for at, _ in workers if queued)]
            events = [at for at in events if at > now]
            if events:
                ends.append(finish(min(events), busy, workers, scored, queued, untrained, sampling))
        return min(ends)

    workers = tuple((0.0, seconds) for seconds in rollout)
    return finish(0.0, 0.0, workers, (), fragments, fragments, False)


def tag_step(fragments, rollout, generate, score, train, switch):
    """The simulator's seconds for the same step."""
    settings = Settings(1, fragments, 1, 1, staleness=0, tag_fragments=fragments)
    layout = Layout(Mesh(1, 1 / generate), tuple(Mesh(1, 1 / seconds) for seconds in rollout))
    costs = Costs(generate=1.0, train=train, score_latency=score, switch=switch)
    return simulate(layout, costs, settings, 1).step_seconds


# Numbers without common multiples, so that no two things happen at the same time.
CASES = list(
    itertools.product(
        [1, 2, 3, 5],  # fragments
        [(1.0,), (1.0, 1.0), (1.0, 1.73)],  # rollout workers' seconds a fragment
        [0.31, 0.87, 2.13],  # the trainer's
        [0.023, 0.337],  # the rewards'
        [0.109, 0.461, 1.193],  # seconds to train a fragment
        [0.0, 0.071, 0.419],  # and to switch
    )
)


def test_tag_is_within_2_percent_of_the_best_that_can_be_done():
    worse = {}
    for case in CASES:
        found, best = tag_step(*case), best_step(*case)
        assert found >= best - 1e-9, case
        if found > 1.02 * best + 1e-9:
            worse[case] = (found, best)
    assert not worse


def test_tag_helps_a_starving_trainer_and_leaves_a_busy_one_alone():
    starving = run(4, 4, 1, tag_fragments=FRAGMENTS)
    assert starving.tag_share > 0.3
    assert starving.step_seconds < 0.6 * run(4, 4, 1).step_seconds
    busy = run(28, 0.25, 1, tag_fragments=FRAGMENTS)
    assert busy.tag_share < 0.1
    assert run(4, 4, 1, tag_fragments=5).tagged == 6 * 5
    assert TRAINER in starving.devices
