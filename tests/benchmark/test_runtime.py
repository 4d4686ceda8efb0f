"""The runtime with waits for work: steps against formulas, work against other placements, and predictions."""

import dataclasses
import statistics

import pytest

from digen_jax.benchmark import report
from digen_jax.benchmark.runtime import TimedRun, bound, compare, measure
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
APART = Proposal(2, 1, 2)  # two workers of one device, and a trainer of two
ASYNCHRONOUS = dataclasses.replace(APART, gap=True, tag=True, asynchrony=True)
# On a busy machine sending commands takes time of its own. Then longer waits decide.
LONGER = (1, 4, 10)
RUN = TimedRun(learn=1, steps=2, jitter=0.0)


def test_the_bound_is_what_all_devices_would_take_without_a_pause():
    assert bound(WORK.problem, RUN) == pytest.approx(WORK.seconds)
    assert bound(colocated(WORK.problem), TimedRun()) == pytest.approx(
        bound(WORK.problem, TimedRun())
    )
    jittered = bound(WORK.problem, TimedRun(learn=3, steps=400))
    assert jittered == pytest.approx(WORK.seconds, rel=5e-3)
    assert jittered != WORK.seconds


# -------------------------------------------------------------------------------------- prediction


@pytest.mark.slow
def test_the_simulator_predicts_later_steps_from_the_first_ones():
    """Within 10% of the median."""
    run, found = TimedRun(learn=3, steps=5), []
    for factor in LONGER:
        work = dataclasses.replace(WORK, seconds=0.25 * factor, publish=0.02, groups=8)
        measured = measure(work.problem, ASYNCHRONOUS, run)
        found.append(measured.predicted / statistics.median(measured.step_times) - 1)
        if abs(found[-1]) < 0.1:
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


@pytest.mark.slow
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
        compare(dataclasses.replace(WORK, **fields), RUN)


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
