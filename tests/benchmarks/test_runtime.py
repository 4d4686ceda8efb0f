"""The scheduler's shares of the bound, and the runtime with waits instead of device work."""

import dataclasses
from statistics import fmean

import pytest

from benchmarks import runtime
from benchmarks.bound import LIMIT, RATIOS, SCENARIOS, SIZES, simulated
from benchmarks.runtime import (
    COLOCATED,
    Measured,
    TimedRun,
    Work,
    best_layout,
    simulations,
)
from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner import settings_of, workers_of

POOLS = [one for one in SCENARIOS if one.layout != "colocated" and 8 in one.sizes]
WORK = Work(devices=4, seconds=0.5, groups=4)
RUN = TimedRun(warm_up=2, steps=3, jitter=0.0)


@pytest.mark.parametrize("scenario", POOLS, ids=[one.name for one in POOLS])
@pytest.mark.parametrize("ratio", ["1:8", "8:1"])
def test_a_pool_reaches_the_required_share(scenario, ratio):
    share = simulated(scenario, SIZES[0], RATIOS[ratio], 0.2, seed=0)
    assert scenario.required <= share <= LIMIT


def test_colocated_devices_wait_for_the_slowest_one():
    (colocated,) = (one for one in SCENARIOS if one.layout == "colocated")
    # The largest of eight uniform factors from 0.8 to 1.2 is 1.156 in the mean.
    share = simulated(colocated, SIZES[0], 1.0, 0.2, seed=0)
    assert share == pytest.approx(1 / 1.156, rel=0.02)
    assert simulated(colocated, SIZES[0], 1.0, 0.0, seed=0) > 0.99


@pytest.mark.slow
def test_the_simulator_predicts_the_steps_of_the_runtime():
    """Within 10% of the median."""
    found = []
    # On a busy machine sending commands takes time. Then longer waits decide.
    for factor in (1, 4, 10):
        work = dataclasses.replace(WORK, seconds=0.5 * factor, groups=8)
        measured = runtime.measure(work, best_layout(work, "pool, lag 1"), TimedRun())
        found.append(measured.error)
        if abs(measured.error) < 0.1:
            assert measured.policy_lag > 0
            return
    raise AssertionError(found)


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


@pytest.mark.parametrize("field", ["devices", "train", "seconds", "warm_up", "steps"])
def test_what_cannot_be_measured_is_refused(field):
    settings = RUN if field in ("warm_up", "steps") else WORK
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(settings, **{field: 0})


def test_the_table_has_a_row_of_numbers_for_every_layout():
    one = Measured("1 + 2", (2.9, 3.0, 9.0), 1.5, 4.0, 0.5, 0.0)
    first, second = runtime.describe({"a": one, "b": one}).splitlines()[1:]
    assert first.split() == ["a", "1", "+", "2", "3.000", "50.0%", "37.5%", "+33.3%", "0.50"]
    assert second.split()[0] == "b"
