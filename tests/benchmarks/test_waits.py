"""The stand-ins for device work: their duration, and a driver with several workers that train."""

import time
from contextlib import closing

import numpy as np
import pytest

from benchmarks.waits import WaitingExecutors, Waits, score
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.driver import Driver
from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Decode,
    Deliver,
    DropVersion,
    Encode,
    Generate,
    Score,
    SyncWeights,
    Train,
    Update,
    WeightsVersion,
)
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout

COSTS = Costs(
    generate=0.02,
    train=0.01,
    decode=0.005,
    encode=0.03,
    score=0.006,
    update=0.04,
    sync=0.05,
    deliver=0.002,
)
SETTINGS = Settings(3, groups=4, images=4, chunk_images=4, passes=4, max_policy_lag=0)
EXACT = Waits(COSTS, SETTINGS)
CHUNK = Chunk(3, 5)
LAYOUT = WorkerLayout(4), WorkerLayout(), WorkerLayout(2, ("sample",)), WorkerLayout(1, speed=0.5)


@pytest.mark.parametrize(
    ("command", "seconds"),
    [
        (Generate(1, "rollout 0", CHUNK, WeightsVersion(2)), 0.08 / 2),
        (Decode(1, "worker 2", CHUNK), 0.02 / 0.5),
        (Deliver(1, "rollout 0", CHUNK, 2, TRAINER), 0.008),
        (Generate(1, TRAINER, CHUNK, WeightsVersion(2)), 0.08 / 4),
        (Train(1, "worker 1", CHUNK, 0, 0, 0, 4), 0.04),
        (Train(1, TRAINER, CHUNK, 0, 0, 1, 2), 0.02 / 4),
        (Encode(1, "worker 1", 3), 0.03),
        (Update(1, TRAINER, 3, 0, (TRAINER,)), 0.04),
        (SyncWeights(1, "rollout 0", WeightsVersion(3)), 0.05),
        (DropVersion(1, WeightsVersion(3)), 0.0),
    ],
)
def test_a_command_takes_its_cost(command, seconds):
    executors = WaitingExecutors(EXACT, LAYOUT)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        executors.do(command)
        taken.append(time.perf_counter() - start)
    # A late wake-up shortens the next wait, so that waits are never too short in total.
    assert sum(taken) >= 5 * seconds and min(taken) < seconds + 0.03


def test_the_pool_of_rewards_takes_as_long_as_scores_cost():
    executors = WaitingExecutors(EXACT, LAYOUT)
    with closing(RewardPool(alone("waits", score), 0)) as rewards:
        found = [executors.score(Score(0, CHUNK, "rollout 0"), rewards).result() for _ in range(5)]
    assert found[0].scores.columns.shape == (4, 1)
    assert 0.024 <= min(scored.seconds for scored in found) < 0.054


def test_jitter_is_of_the_work_and_not_of_who_does_it():
    waits, one = Waits(COSTS, SETTINGS, jitter=0.2, seed=7), WorkerLayout()

    def factors(worker, serial, version, waits=waits, layout=one):
        chunks = [Chunk(step, index) for step in range(20) for index in range(20)]
        kinds = (
            [Generate(serial, worker, f, WeightsVersion(version)) for f in chunks],
            [Decode(serial, worker, f) for f in chunks],
            [Train(serial, worker, f, version, 0, 0, 4) for f in chunks],
            [Train(serial, worker, f, version, 0, 1, 4) for f in chunks],
        )
        exact = [EXACT.seconds(same[0], layout) for same in kinds]
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
    assert (drawn != factors(TRAINER, 1, 1, Waits(COSTS, SETTINGS, 0.2, 8))).all()
    # The slowest of 8 devices: the mean of the largest of 8 numbers from [0, 1) is 8/9.
    slowest = factors(TRAINER, 1, 1, layout=WorkerLayout(8))
    np.testing.assert_allclose(slowest.mean(1), 1 + 0.2 * 7 / 9, atol=0.01)


def test_a_driver_has_several_workers_sample_and_train():
    """Samples of the trainer reach other workers while the trainer is at work."""
    log, layout = [], (WorkerLayout(), WorkerLayout(), WorkerLayout(roles=("train",)))
    costs = Costs(generate=0.01, train=0.02, update=0.01, sync=0.01)
    executors = WaitingExecutors(Waits(costs, SETTINGS, jitter=0.2), layout)
    with (
        closing(RewardPool(alone("waits", score), 0)) as rewards,
        closing(Driver(executors, Scheduler(SETTINGS, costs), rewards, log=log)) as driver,
    ):
        for _ in range(SETTINGS.steps):
            driver.step()
        driver.finish()
    names = {TRAINER, "worker 1", "worker 2"}
    assert {command.worker for command in log if isinstance(command, Train)} == names
    assert {command.worker for command in log if isinstance(command, Generate)} < names
    trained = sum(command.count for command in log if isinstance(command, Train))
    assert trained == SETTINGS.steps * SETTINGS.chunks * SETTINGS.passes
    assert any(isinstance(command, Deliver) and command.worker == TRAINER for command in log)
    assert all(set(c.trained) == names for c in log if isinstance(c, Update))
