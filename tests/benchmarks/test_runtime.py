"""The scheduler's shares of the bound, and the runtime with waits instead of device work."""

import dataclasses
from statistics import fmean

import numpy as np
import pytest

from benchmarks import runtime
from benchmarks.bound import LIMIT, RATIOS, SCENARIOS, SIZES, simulated
from benchmarks.runtime import (
    COLOCATED,
    TimedRun,
    Work,
    best_layout,
    simulations,
)
from benchmarks.waits import Waits
from digen_jax.scheduling.commands import TRAINER, Chunk, Decode, Generate, Train, WeightsVersion
from digen_jax.scheduling.planner import settings_of, workers_of
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout

POOLS = [one for one in SCENARIOS if one.layout != "colocated" and 8 in one.sizes]
WORK = Work(devices=4, seconds=0.5, groups=4)


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


def test_jitter_is_of_the_work_and_not_of_who_does_it():
    settings = Settings(3, groups=4, images=4, chunk_images=4, passes=4)
    costs = Costs(generate=0.02, train=0.01, decode=0.005)
    waits, one = Waits(costs, settings, jitter=0.2, seed=7), WorkerLayout()

    def factors(worker, serial, version, waits=waits, layout=one):
        chunks = [Chunk(step, index) for step in range(20) for index in range(20)]
        kinds = (
            [Generate(serial, worker, f, WeightsVersion(version)) for f in chunks],
            [Decode(serial, worker, f) for f in chunks],
            [Train(serial, worker, f, version, 0, 0, 4) for f in chunks],
            [Train(serial, worker, f, version, 0, 1, 4) for f in chunks],
        )
        exact = [Waits(costs, settings).seconds(same[0], layout) for same in kinds]
        return np.array(
            [
                [waits.seconds(command, layout) / usual for command in same]
                for same, usual in zip(kinds, exact, strict=True)
            ]
        )

    drawn = factors("rollout 0", 1, 1)
    np.testing.assert_array_equal(drawn, factors(TRAINER, 9, 2))
    # Uniform from 0.8 to 1.2: standard deviation 0.4 / sqrt(12); and no kind follows another.
    assert 0.8 <= drawn.min() < 0.81 and 1.19 < drawn.max() <= 1.2
    np.testing.assert_allclose(drawn.mean(1), 1, atol=0.02)
    np.testing.assert_allclose(drawn.std(1), 0.1155, rtol=0.1)
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.2
    assert (drawn != factors(TRAINER, 1, 1, Waits(costs, settings, 0.2, 8))).all()
    # The slowest of 8 devices: the mean of the largest of 8 numbers from [0, 1) is 8/9.
    slowest = factors(TRAINER, 1, 1, layout=WorkerLayout(8))
    np.testing.assert_allclose(slowest.mean(1), 1 + 0.2 * 7 / 9, atol=0.01)
