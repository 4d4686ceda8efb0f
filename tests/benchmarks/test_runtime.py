"""The scheduler's shares of the bound, and the runtime and the emulated cluster with waits instead of device work."""

import dataclasses
import importlib.util
from statistics import fmean

import numpy as np
import pytest

from benchmarks import cluster, runtime
from benchmarks.bound import LIMIT, RATIOS, SCENARIOS, SIZES, simulated
from benchmarks.cluster import LAYOUTS, Layout
from benchmarks.runtime import (
    COLOCATED,
    TimedRun,
    Work,
    best_layout,
    simulations,
)
from benchmarks.waits import Waits
from digen_jax.errors import ConfigError
from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Decode,
    Generate,
    Score,
    Train,
    Update,
    WeightsVersion,
)
from digen_jax.scheduling.planner import settings_of, workers_of
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout

POOLS = [one for one in SCENARIOS if one.layout != "colocated" and 8 in one.sizes]
RUN = TimedRun(warm_up=2, steps=3, jitter=0.0)
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
    problem = work.problem(kind)
    workers, costs = workers_of(problem, layout)
    assert sum(worker.devices for worker in workers) == 8
    assert len(workers) == (1 if kind == COLOCATED else 8)
    assert layout.lag == kind.endswith("lag 1")
    assert (layout.rollout > 0) == ("disaggregated" in kind or "rollout" in kind)
    # One device takes the stated seconds of the work.
    assert (costs.generate, costs.train) == (problem.costs.generate, problem.costs.train)
    settings, run = settings_of(problem, layout), TimedRun()
    reports = simulations(workers, costs, settings, run)
    share = fmean(report.bound / report.step_seconds for report in reports)
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


def simulated_layout(layout):
    (first, *_) = simulations(layout.workers, layout.costs(8), layout.settings(8), RUN)
    return first


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_worker_of_a_cluster_has_its_roles_and_waits_long_enough(layout):
    report = simulated_layout(layout)
    sampling = [one for one in report.intervals if one.kind == "generate"]
    assert any(one.worker == TRAINER for one in sampling) == layout.samples
    later = [one for one in sampling if one.chunk.step]
    early = any(one.start < report.step_ends[one.chunk.step - 1] for one in later)
    assert early == bool(layout.max_policy_lag)
    rollout = {f"rollout {number}": 1 for number in range(len(layout.speeds))}
    assert report.devices == {TRAINER: 1} | rollout
    costs, settings = layout.costs(8), layout.settings(8)
    # Of all rollout workers together.
    generation = settings.chunks * cluster.CHUNK * (costs.generate + costs.decode)
    assert generation / sum(layout.speeds) == pytest.approx(8)
    waits, chunk, (home, *_) = Waits(costs, settings), Chunk(0, 0), layout.workers
    train, update = Train(0, "", chunk, 0, 0, 0, 1), Update(0, "", 0, 0, ())
    for command in (Score(0, chunk, ""), train, update):
        assert waits.seconds(command, home) >= 0.1


def test_training_that_is_faster_than_generation_hides_behind_it():
    """All but what comes before the first chunk and after the last one."""
    layout = dataclasses.replace(LAYOUTS[1], training=0.1)
    costs = layout.costs(8)
    last = cluster.CHUNK * (costs.deliver + costs.score + 2 * costs.train)
    rest = costs.sync + costs.encode + last + costs.update
    assert simulated_layout(layout).step_seconds == pytest.approx(8 + rest, rel=0.03)


def test_layouts_of_a_cluster_are_chosen_by_number():
    assert cluster.chosen([], 8) == list(LAYOUTS) and cluster.chosen(["2"], 8) == [LAYOUTS[1]]
    with pytest.raises(ConfigError):
        cluster.chosen(["8"], 8)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray not installed")
def test_workers_on_ray_do_the_steps_that_the_simulator_predicts():
    layout, steps = Layout("2 workers", (1.0, 1.0), 8, max_policy_lag=1), []
    found = cluster.measure(layout, 2.0, RUN, lambda: steps.append(None))
    assert len(steps) == RUN.warm_up + RUN.steps
    assert found.policy_lag > 0
    # Waits are never shorter than their costs.
    assert found.bound < found.step_seconds and found.predicted < 1.05 * found.step_seconds
