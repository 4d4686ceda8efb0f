"""The runtime with waits for work: the rows of the benchmark, its table and its predictions."""

import dataclasses
from statistics import fmean

import pytest

from benchmarks import report
from benchmarks.runtime import TimedRun, compare, measure, simulations
from benchmarks.variants import COLOCATED, Work, best_layout
from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner import settings_of, workers_of

WORK = Work(devices=4, seconds=0.5, groups=4)
RUN = TimedRun(warm_up=1, steps=2)


@pytest.mark.slow
def test_the_simulator_predicts_the_steps_of_the_runtime():
    """Within 10% of the median."""
    found = []
    # On a busy machine sending commands takes time of its own. Then longer waits decide.
    for factor in (1, 4, 10):
        work = dataclasses.replace(WORK, seconds=0.5 * factor, groups=8)
        measured = measure(work, best_layout(work, "pool, lag 1"), TimedRun())
        found.append(measured.error)
        if abs(measured.error) < 0.1:
            assert measured.policy_lag > 0
            return
    raise AssertionError(found)


# ------------------------------------------------------------------------------- rows and tables


@pytest.mark.parametrize("kind", [COLOCATED, "pool", "disaggregated, lag 1"])
def test_each_row_has_all_devices_and_the_workers_of_its_kind(kind):
    work = dataclasses.replace(WORK, devices=8, groups=16, train=4.0)
    layout = best_layout(work, kind)
    workers, costs = workers_of(work.problem, layout)
    assert sum(worker.devices for worker in workers) == 8
    assert len(workers) == (1 if kind == COLOCATED else 8)
    assert layout.lag == kind.endswith("lag 1")
    assert (layout.rollout > 0) == ("disaggregated" in kind or "rollout" in kind)
    # One device takes the stated seconds of the work.
    assert (costs.generate, costs.train) == (work.problem.costs.generate, work.problem.costs.train)
    settings, run = settings_of(work.problem, layout), TimedRun()
    share = fmean(one.utilisation for one in simulations(workers, costs, settings, run))
    # The slowest of 8 devices takes 1.156 times as long as a mean one.
    least, most = (0.82, 0.87) if kind == COLOCATED else (0.95 if "pool" in kind else 0.8, 1.0)
    assert least < share < most


@pytest.mark.slow
def test_the_table_has_a_row_for_each_kind_of_layout():
    work = dataclasses.replace(WORK, seconds=0.2)
    rows = compare(work, RUN, [COLOCATED, "pool"])
    lines = report.table(work, rows).splitlines()
    assert lines[0].startswith("generate:train 1:1, bound (G + T)/N 0.200 s")
    assert [line.split()[0] for line in lines[-2:]] == [COLOCATED, "pool"]
    for line, row in zip(lines[-2:], rows.values(), strict=True):
        assert row.utilisation == pytest.approx(0.2 / row.step_seconds)
        assert f" {row.step_seconds:.3f}  " in line and f" {row.utilisation:.1%} " in line
    saved = report.record(work, rows)["kinds"]
    assert saved["pool"]["utilisation"] == rows["pool"].utilisation


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"devices": 1}, "devices must be at least 2"),
        ({"train": 0.0}, "train must be above 0"),
        ({"seconds": -1.0}, "seconds must be above 0"),
        ({"sync": -0.1}, "sync must be 0 or more"),
    ],
)
def test_work_that_cannot_be_measured_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compare(dataclasses.replace(WORK, **fields), RUN)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (TimedRun(jitter=1.0), r"jitter must lie in \[0, 1\)"),
        (TimedRun(warm_up=0), "warm_up must be above 0"),
        (TimedRun(steps=0), "steps must be above 0"),
    ],
)
def test_a_run_that_cannot_be_done_is_refused(run, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compare(WORK, run)
