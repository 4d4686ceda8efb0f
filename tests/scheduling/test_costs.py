import numpy as np
import pytest

from digen_jax.scheduling.commands import TRAINER, Chunk, Generate, Score, Train, WeightsVersion
from digen_jax.scheduling.settings import WEIGHT, CostModel, Costs, Settings

SETTINGS = Settings(1, groups=1, images=4, chunk_images=4, passes=2)


def generate(worker, evaluation=False):
    return Generate(1, worker, Chunk(0, 0, evaluation), WeightsVersion(0))


def train(count=1):
    return Train(1, TRAINER, Chunk(0, 0), version=0, update=0, first=0, count=count)


def test_predictions_move_from_the_expected_to_the_measured():
    model = CostModel.create(Costs(generate=1.0, train=2.0, evaluate=7.0), SETTINGS)
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


def test_training_is_predicted_by_the_pass():
    model = CostModel.create(Costs(generate=1.0, train=2.0), SETTINGS)
    assert model.predict("train", TRAINER) == 2.0 * 4 / 2
    model.observe(train(count=2), 6.0)
    assert model.predict("train", TRAINER) == 3
    model.observe(train(count=1), 5.0)
    assert model.predict("train", TRAINER) == pytest.approx(4)


def test_work_without_a_worker_has_one_average():
    model = CostModel.create(Costs(generate=1.0, train=1.0), SETTINGS)
    for seconds in (1.0, 3.0):
        model.observe(Score(1, Chunk(0, 0), "a"), seconds)
    assert model.averages["score"] == {"": 2.0} and model.counts["score"] == {"": 2}


def test_an_average_is_plain_at_first_and_then_moves():
    rng, model = (
        np.random.default_rng(0),
        CostModel.create(Costs(generate=1.0, train=1.0), SETTINGS),
    )
    many = round(1 / WEIGHT)
    seconds = rng.uniform(0.8, 1.2, size=3 * many)
    for value in seconds[:many]:
        model.observe(train(), value)
    assert model.predict("train", TRAINER) == pytest.approx(seconds[:many].mean())
    expected = seconds[:many].mean()
    for value in seconds[many:]:
        model.observe(train(), value)
        expected = (1 - WEIGHT) * expected + WEIGHT * value
    assert model.predict("train", TRAINER) == pytest.approx(expected)
