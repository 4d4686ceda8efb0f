import dataclasses
import json
import math

import numpy as np
import pytest

from digen_jax.scheduling import commands
from digen_jax.scheduling.commands import TRAINER, Chunk, Generate, Score, Train, WeightsVersion
from digen_jax.scheduling.settings import WEIGHT, CostModel, Costs, Settings, time_limit

GOOD = Settings(1, groups=6, images=4, chunk_images=2)


def test_the_share_of_units_that_may_start_early_is_rounded_down():
    for share, expected in ((0.0, 0), (0.3, 3), (0.35, 3), (1.0, 10)):
        plan = Settings(1, groups=10, images=1, chunk_images=1, max_off_policy_fraction=share)
        assert plan.off_policy_units == expected
        assert dataclasses.replace(plan, max_policy_lag=0).off_policy_units == 0


def test_settings_of_an_older_checkpoint_are_readable():
    saved = json.loads(json.dumps(commands.pack(GOOD)))
    for old, new in commands.RENAMED.items():
        saved[old] = saved.pop(new)
    assert commands.unpack(saved) == GOOD


def generate(worker, evaluation=False):
    return Generate(1, worker, Chunk(0, 0, evaluation), WeightsVersion(0))


def train(count=1):
    return Train(1, TRAINER, Chunk(0, 0), version=0, update=0, first=0, count=count)


@pytest.fixture
def model():
    return CostModel(Costs(generate=1.0, train=2.0, evaluate=7.0), images=4, passes=2)


def test_predictions_move_from_the_expected_to_the_measured(model):
    assert model.predict("generate", "a") == 4
    model.observe(generate("a"), 3.0)
    assert model.predict("generate", "a") == 3
    assert model.predict("generate", "b") == 3  # the mean of all, until it is measured
    model.observe(generate("b"), 6.0)
    assert model.predict("generate", "b") == 6
    assert model.predict("generate") == pytest.approx(4.5)
    model.observe(generate("a"), 5.0)
    assert model.predict("generate", "a") == pytest.approx(4)
    assert model.predict("evaluate", "a") == 7  # its chunks have another size


def test_an_average_is_plain_at_first_and_then_moves(model):
    many = round(1 / WEIGHT)
    seconds = np.random.default_rng(0).uniform(0.8, 1.2, size=3 * many)
    for value in seconds[:many]:
        model.observe(train(), value)
    assert model.predict("train", TRAINER) == pytest.approx(seconds[:many].mean())
    expected = seconds[:many].mean()
    for value in seconds[many:]:
        model.observe(train(), value)
        expected = (1 - WEIGHT) * expected + WEIGHT * value
    assert model.predict("train", TRAINER) == pytest.approx(expected)


def test_only_measured_durations_are_expected_for_a_deadline(model):
    first, second = generate("r0"), generate("r1")
    assert model.measured(first) is None
    model.observe(first, 8.0)
    model.observe(second, 2.0)
    model.observe(Score(1, Chunk(0, 0), "r0"), 3.0)
    assert [model.measured(command) for command in (first, second)] == [8.0, 2.0]
    assert model.measured(generate("r2")) == 5.0
    assert model.measured(Score(1, Chunk(0, 0), "r0")) == 3.0
    assert model.measured(train()) is None and model.measured(generate("r0", True)) is None
    model.observe(train(4), 8.0)
    assert [model.measured(train(count)) for count in (1, 3, 10)] == [2.0, 6.0, 20.0]


def test_a_deadline_is_at_least_ten_times_the_expected_duration():
    assert [time_limit(60.0, s) for s in (None, 0.0, 6.0, 6.1, 100.0)] == [60, 60, 60, 61, 1000]
    assert time_limit(0.0, 5.0) == time_limit(math.inf, 5.0) == math.inf
