import numpy as np
import pytest

from digen_jax.scheduling.costs import WEIGHT, CostModel
from digen_jax.scheduling.settings import Costs


def test_predictions_move_from_the_expected_to_the_measured():
    model = CostModel(Costs(generate=1.0, train=2.0), images=4)
    assert model.predict("generate", "a", 2.0) == 2
    model.observe("generate", "a", 2.0, 3.0)
    assert model.predict("generate", "a", 2.0) == 3
    assert model.predict("generate", "b", 1.0) == 6  # as fast for its speed as a
    model.observe("generate", "a", 2.0, 5.0)
    assert model.predict("generate", "a", 2.0) == pytest.approx(4)
    assert model.predict("train", "trainer", 1.0) == 8


def test_an_average_is_plain_at_first_and_then_moves():
    rng, model = np.random.default_rng(0), CostModel(Costs(generate=1.0, train=1.0), images=1)
    many = round(1 / WEIGHT)
    seconds = rng.uniform(0.8, 1.2, size=3 * many)
    for value in seconds[:many]:
        model.observe("train", "trainer", 1.0, value)
    assert model.predict("train", "trainer", 1.0) == pytest.approx(seconds[:many].mean())
    expected = seconds[:many].mean()
    for value in seconds[many:]:
        model.observe("train", "trainer", 1.0, value)
        expected = (1 - WEIGHT) * expected + WEIGHT * value
    assert model.predict("train", "trainer", 1.0) == pytest.approx(expected)
