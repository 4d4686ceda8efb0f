"""Runs in which prompts name the rewards that apply to them, against runs of one reward."""

import itertools

import jax
import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.rewards import RewardSettings
from digen_jax.runtime.steps import ScoredChunk, StepImages, StepScores
from tests.parallel import toy

STEPS = 2
NAMED = (["first"], ["second"])


def parts(images, prompts, metadata):
    """Brightness under the name of a reward, and what is only shown."""
    scores = toy.brightness(images, prompts, metadata)
    return {"second": scores, "double": 2 * scores}


FOUND = rewards.Rewards(
    tuple(
        rewards.NamedReward(RewardSettings(name), function)
        for name, function in (("first", toy.brightness), ("second", parts))
    )
)


def config(**fields):
    return toy.config(advantages__std="group", **fields)


def batches(named):
    """The prompts of each step: the groups take turns in the rewards that they name."""
    for records in toy.batches(2):
        yield [
            record | ({"rewards": names} if names else {})
            for record, names in zip(records, named, strict=True)
        ]


def driven(found, named, **fields):
    """(state, metrics of each step, evaluations by version, commands, system)"""
    c, seen, log = config(evaluation__every=1, evaluation__batch=4, **fields), {}, []
    system = toy.system(c)
    held_out = list(itertools.islice(itertools.chain.from_iterable(batches(named)), 6))
    options = dict(batches=batches(named), held_out=held_out, evaluated=seen.__setitem__)
    with toy.driver(system, c, found, log=log, **options) as driver:
        history = [driver.step() for _ in range(STEPS)]
        state = jax.device_get(driver.executor.state)
    return state, history, seen, log, system


@pytest.fixture(scope="module")
def single():
    return driven(rewards.alone("first", toy.brightness), ([], []), rewards=("first",))


@pytest.fixture(scope="module")
def mixed():
    both = dict(rewards=("first", "second"))
    return driven(FOUND, NAMED, **both, advantages__combine="advantages")


def test_groups_of_different_rewards_train_as_those_of_one_reward_of_equal_scores(single, mixed):
    assert toy.difference(mixed[0].tuned, single[0].tuned) < 1e-6
    for one, other in zip(mixed[1], single[1], strict=True):
        for name in ("reward", "reward_std", "loss", "gradient_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7)


def test_metrics_of_a_reward_are_over_the_images_that_it_applies_to(single, mixed):
    metrics = mixed[1][0]
    assert all(np.isfinite(value) for value in metrics.values())
    means = [metrics[f"reward_of/{name}"] for name in ("first", "second")]
    assert np.mean(means) == pytest.approx(metrics["reward"], rel=1e-5)
    assert abs(means[0] - means[1]) > 1e-4
    # A group of records has the tag of its place: the tags' statistics are those of the rewards.
    for name, tag in (("first", "one"), ("second", "two")):
        assert metrics[f"reward_of/{name}"] == pytest.approx(metrics[f"reward/{tag}"], rel=1e-5)
        std = metrics[f"reward_std/{tag}"]
        assert metrics[f"reward_std_of/{name}"] == pytest.approx(std, rel=1e-4)
        low, high = (metrics[f"reward_{what}_of/{name}"] for what in ("min", "max"))
        assert low < metrics[f"reward_of/{name}"] < high
    double = metrics["reward_of/second/double"]
    assert double == pytest.approx(2 * metrics["reward_of/second"], rel=1e-5)
    assert not any(name.startswith("reward_") and "_of/" in name for name in single[1][0])


def test_evaluations_have_the_means_of_what_applies(single, mixed):
    assert set(mixed[2]) == set(single[2]) and mixed[2]
    for version, found in mixed[2].items():
        scores = single[2][version].scores
        np.testing.assert_allclose(found.scores, scores, atol=1e-6)
        metrics = found.metrics()
        assert metrics["evaluation/reward_of/first"] == pytest.approx(scores[0::2].mean())
        assert metrics["evaluation/reward_of/second"] == pytest.approx(scores[1::2].mean())
        assert metrics["evaluation/reward_of/second/double"] == pytest.approx(
            2 * scores[1::2].mean()
        )
        tasks = found.by_task()
        assert (tasks["first"].images, tasks["all"].images) == (3, 6)


def test_a_step_without_a_reward_has_no_metric_of_it():
    asked = toy.opened(config(rewards=("first", "second"), advantages__combine="advantages"))
    images = StepImages.create(0, toy.records(2), 2, 4, asked.rng)
    known = StepScores(images, asked.advantages)
    columns = np.float32([[1, np.nan], [2, np.nan], [3, np.nan], [6, np.nan]])
    shown = {"second/double": np.full(4, np.nan, np.float32)}
    known.add(0, ScoredChunk(rewards.Scores(columns, shown)))
    metrics = known.metrics(("first", "second"))
    assert not any("/second" in name for name in metrics)
    assert metrics["reward_of/first"] == metrics["reward"] == 3.0
    assert (metrics["reward_min_of/first"], metrics["reward_max_of/first"]) == (1.0, 6.0)
