"""The stand-ins for device work: their duration, and that all placements get the same work."""

import time
from contextlib import closing

import numpy as np
import pytest

from digen_jax.benchmark.waits import WaitingExecutors, Waits, score
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.scheduling.commands import (
    TRAINER,
    Decode,
    Deliver,
    DropVersion,
    Encode,
    Fragment,
    Generate,
    Publication,
    Publish,
    Score,
    Switch,
    Train,
    Update,
)
from digen_jax.scheduling.planner.simulate import Layout, Mesh
from digen_jax.scheduling.settings import Costs

COSTS = Costs(
    generate=0.02,
    train=0.01,
    decode=0.005,
    encode=0.03,
    score=0.006,
    update=0.04,
    publish=0.05,
    deliver=0.002,
)
EXACT = Waits(COSTS, images=4, unit=4, jitter=0.0, seed=0)
FRAGMENT = Fragment(3, 5)


@pytest.mark.parametrize(
    ("command", "seconds"),
    [
        (Generate(1, "rollout 0", FRAGMENT, Publication(2)), 0.08 / 2),
        (Decode(1, "rollout 0", FRAGMENT), 0.02 / 2),
        (Deliver(1, "rollout 0", FRAGMENT, 2), 0.008),
        (Generate(1, TRAINER, FRAGMENT, Publication(2)), 0.08 / 4),
        (Train(1, TRAINER, FRAGMENT, 0, False), 0.04),
        (Encode(1, "rollout 0", 3), 0.03),
        (Update(1, TRAINER, 3, 0), 0.04),
        (Publish(1, "rollout 0", Publication(3)), 0.05),
        (Switch(1, TRAINER, "sample"), 0.0),
        (DropVersion(1, Publication(3)), 0.0),
    ],
)
def test_a_command_takes_its_cost(command, seconds):
    executors = WaitingExecutors(EXACT, Layout(Mesh(4, 4.0), (Mesh(2, 2.0),)))
    taken = []
    for _ in range(5):  # the shortest counts, because a busy machine delays wake-ups
        begin = time.perf_counter()
        executors.do(command)
        taken.append(time.perf_counter() - begin)
    assert seconds <= min(taken) < seconds + 0.03


def test_the_pool_of_rewards_takes_as_long_as_scores_cost():
    executors = WaitingExecutors(EXACT, Layout(Mesh(), (Mesh(),)))
    with closing(RewardPool(alone("waits", score), 0)) as rewards:
        found = [
            executors.score(Score(0, FRAGMENT, "rollout 0"), rewards).result() for _ in range(5)
        ]
    assert found[0].scores.columns.shape == (4, 1)
    assert 0.024 <= min(scored.seconds for scored in found) < 0.054


def test_jitter_is_of_the_work_and_not_of_who_does_it():
    waits = Waits(COSTS, 4, 4, jitter=0.2, seed=7)

    def factors(worker, serial, version):
        fragments = [Fragment(step, index) for step in range(20) for index in range(20)]
        return [
            [waits.factor(command) for command in kind]
            for kind in (
                [
                    Generate(serial + i, worker, f, Publication(version))
                    for i, f in enumerate(fragments)
                ],
                [Decode(serial, worker, f) for f in fragments],
                [Train(serial, worker, f, serial, False) for f in fragments],
                [Score(serial, f, worker) for f in fragments],
                [Publish(serial, worker, Publication(step)) for step in range(400)],
            )
        ]

    drawn = np.array(factors("rollout 0", 1, 1))
    np.testing.assert_array_equal(drawn, factors(TRAINER, 9, 2))
    # Uniform from 0.8 to 1.2: standard deviation 0.4 / sqrt(12); and no kind follows another.
    assert 0.8 <= drawn.min() < 0.81 and 1.19 < drawn.max() <= 1.2
    np.testing.assert_allclose(drawn.mean(1), 1, atol=0.02)
    np.testing.assert_allclose(drawn.std(1), 0.1155, rtol=0.1)
    assert np.abs(np.corrcoef(drawn) - np.eye(5)).max() < 0.2
    other = Waits(COSTS, 4, 4, jitter=0.2, seed=8)
    assert other.factor(Score(0, FRAGMENT, "")) != waits.factor(Score(0, FRAGMENT, ""))
    generate = Generate(0, "rollout 0", FRAGMENT, Publication(0))
    assert waits.seconds(generate, 2.0) == pytest.approx(0.04 * waits.factor(generate))


def test_a_larger_fragment_has_the_work_of_smaller_ones():
    small, large = Waits(COSTS, 4, 4, 0.2, 1), Waits(COSTS, 12, 4, 0.2, 1)
    parts = [small.seconds(Train(0, TRAINER, Fragment(3, i), 0, False)) for i in (6, 7, 8)]
    whole = large.seconds(Train(0, TRAINER, Fragment(3, 2), 0, False))
    assert whole == pytest.approx(sum(parts)) and len(set(parts)) == 3
