"""The runtime with waits for work: steps against formulas, work against other placements, and predictions."""

import dataclasses
import statistics

import pytest

from digen_jax.benchmark import report
from digen_jax.benchmark.runtime import TimedRun, bound, compare, driving, measure
from digen_jax.benchmark.variants import (
    COLOCATED,
    PLAIN,
    VARIANTS,
    Work,
    best_split,
    colocated,
)
from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner.proposal import Proposal

WORK = Work(devices=4, seconds=0.3, publish=0.1, update=0.05, encode=0.05, score=0.25, groups=4)
EXACT = TimedRun(learn=1, steps=2, jitter=0.0)
FRAGMENTS = 8  # of a step of `WORK`, of 4 images each; a group has two
APART = Proposal(2, 1, 2)  # two workers of one device, and a trainer of two
ASYNCHRONOUS = dataclasses.replace(APART, gap=True, tag=True, asynchrony=True)
# Waits on a clock, which other load of the machine disturbs.
pytestmark = pytest.mark.slow
# On a busy machine sending commands takes time of its own. Then longer waits decide.
LONGER = (1, 4, 10)


def plain(problem):
    """The problem unchanged."""
    return problem


def takes(proposal, formula, easier=plain, **fields):
    """Whether the better of two steps is as long as a formula says, to 10%."""
    found = []
    for factor in LONGER:
        work = dataclasses.replace(WORK, seconds=factor * WORK.seconds, **fields)
        problem = easier(work.problem)
        seconds = min(measure(problem, proposal, EXACT).step_times)
        found.append(seconds / formula(problem.costs))
        if 0.98 < found[-1] < 1.1:
            return True
    return found


def test_plain_disaggregation_is_the_sum_of_its_parts():
    def formula(c):
        generation = FRAGMENTS / 2 * 4 * (c.generate + c.decode)
        # The last fragments of both workers end together, and the scorer takes one after the other.
        before = c.publish + c.encode + generation + 2 * 4 * c.score
        return before + FRAGMENTS * 4 * c.train / 2 + c.update

    assert takes(APART, formula) is True


def test_gap_overlaps_what_plain_does_in_turn():
    def formula(c):
        generation = FRAGMENTS / 2 * 4 * (c.generate + c.decode)
        # Faster than both workers, the trainer has only the last group left to train after them.
        return c.publish + c.encode + generation + 2 * 4 * c.score + 2 * 4 * c.train / 2 + c.update

    assert takes(dataclasses.replace(APART, gap=True), formula, generate=2.0) is True


def test_colocated_is_generation_and_training_in_turn():
    def formula(c):
        # A fragment is of 4 images a device. The last one is scored while the one before is trained, nothing
        # is published, and whose turn it is changes at no cost.
        return c.encode + FRAGMENTS * 4 * (c.generate + c.decode + c.train) / 4 + c.update

    assert takes(Proposal(0, 0, 4), formula, colocated, score=0.45) is True


def test_the_bound_is_what_all_devices_would_take_without_a_pause():
    assert bound(WORK.problem, EXACT) == pytest.approx(WORK.seconds)
    assert bound(colocated(WORK.problem), TimedRun()) == pytest.approx(
        bound(WORK.problem, TimedRun())
    )
    jittered = bound(WORK.problem, TimedRun(learn=3, steps=400))
    assert jittered == pytest.approx(WORK.seconds, rel=5e-3)
    assert jittered != WORK.seconds


def test_every_placement_has_the_same_work_to_do():
    """A timeline shows the drawn seconds of a fragment, divided by the speed of its worker."""
    run, problem = TimedRun(learn=1, steps=1), WORK.problem

    def lengths(proposal):
        kinds = {"generate": 1, "train": proposal.trainer}
        with driving(problem, proposal, run) as driver:
            driver.step()
            found = [i for i in driver.intervals if i.kind in kinds and not i.fragment.step]
        return {(i.kind, i.fragment): i.seconds * kinds[i.kind] for i in found}

    first = lengths(APART)
    other = lengths(dataclasses.replace(APART, workers=3, data=1, gap=True))
    assert len(first) == 2 * FRAGMENTS and first.keys() == other.keys()
    assert len({round(value, 4) for value in first.values()}) > FRAGMENTS
    late = [abs(first[key] - other[key]) for key in first]
    assert sorted(late)[len(late) // 2] < 0.01  # a median, as single ones may be late


# -------------------------------------------------------------------------------------- prediction


@pytest.mark.parametrize(
    ("proposal", "easier"),
    [(APART, plain), (ASYNCHRONOUS, plain), (Proposal(0, 0, 4), colocated)],
    ids=["plain", "asynchronous", "colocated"],
)
def test_the_simulator_predicts_later_steps_from_the_first_ones(proposal, easier):
    """Within 5% of the median; as above, longer waits decide if the machine is busy."""
    run, found = TimedRun(learn=3, steps=5), []
    for factor in LONGER:
        work = dataclasses.replace(WORK, seconds=0.25 * factor, publish=0.02, groups=8)
        measured = measure(easier(work.problem), proposal, run)
        found.append(measured.predicted / statistics.median(measured.step_times) - 1)
        if abs(found[-1]) < 0.05:
            return
    raise AssertionError(found)


# ------------------------------------------------------------------------------- rows and tables


def test_each_variant_has_its_tactics_and_all_devices():
    problem = dataclasses.replace(WORK, devices=8, generate=1, train=4).problem
    chosen = {variant.name: best_split(variant, problem) for variant in VARIANTS}
    for proposal in chosen.values():
        assert proposal.trainer + proposal.workers * proposal.worker_devices == 8
    assert chosen[COLOCATED].workers == 0
    tactics = {name: set(proposal.tactics) for name, proposal in chosen.items()}
    assert tactics[PLAIN] == tactics[COLOCATED] == set()
    assert tactics["+ GAP"] == {"GAP"}
    assert tactics["+ asynchrony"] >= {"GAP", "TAG", "asynchrony"}
    # A fragment has 4 images: no more devices can train it unless time is split, too.
    assert chosen["+ GAP"].trainer == 4
    assert chosen["+ TSP"].trainer > 4 and chosen["+ TSP"].time > 1
    # (sqrt G + sqrt T)² / N is taken with sqrt(T) / (sqrt G + sqrt T) of the devices: two thirds.
    assert chosen[PLAIN].trainer in (5, 6)


def test_the_table_compares_with_plain_and_colocated():
    work, run = dataclasses.replace(WORK, seconds=0.1), TimedRun(learn=1, steps=1)
    rows = compare(work, run, [v for v in VARIANTS if v.name in (PLAIN, COLOCATED)])
    plain, both = rows[PLAIN], rows[COLOCATED]
    assert plain.images_per_device_second == pytest.approx(32 / plain.step_seconds / 4)
    lines = report.table(work, rows).splitlines()
    assert lines[0].startswith("generate:train 1:1, bound (G + T)/N 0.")
    ratio = both.step_seconds / plain.step_seconds
    assert f" 1.00x  {ratio:.2f}x".split() == lines[-1].split()[-4:-2]
    saved = report.record(work, rows)["variants"]
    assert saved[PLAIN]["speed_up_over_colocated"] == pytest.approx(ratio)
    assert saved[PLAIN]["utilisation"] == pytest.approx(plain.bound / plain.step_seconds)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"devices": 1}, "devices must be at least 2"),
        ({"train": 0.0}, "train must be above 0"),
        ({"seconds": -1.0}, "seconds must be above 0"),
        ({"publish": -0.1}, "publish must be 0 or more"),
    ],
)
def test_work_that_cannot_be_measured_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compare(dataclasses.replace(WORK, **fields), EXACT)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (TimedRun(jitter=1.0), r"jitter must lie in \[0, 1\)"),
        (TimedRun(learn=0), "learn must be above 0"),
        (TimedRun(steps=0), "steps must be above 0"),
    ],
)
def test_a_run_that_cannot_be_done_is_refused(run, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compare(WORK, run)
