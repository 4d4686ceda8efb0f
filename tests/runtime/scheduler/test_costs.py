import pytest

from digen_jax.runtime.scheduler.costs import WEIGHT, CostModel
from digen_jax.runtime.scheduler.settings import Costs


def test_predictions_move_from_the_expected_to_the_measured():
    model = CostModel(Costs(generate=1.0, train=2.0), images=4)
    assert model.predict("generate", "a", 2.0) == 2
    model.observe("generate", "a", 2.0, 3.0)
    assert model.predict("generate", "a", 2.0) == 3
    assert model.predict("generate", "b", 1.0) == 6  # as fast for its speed as a is
    model.observe("generate", "a", 2.0, 5.0)
    assert model.predict("generate", "a", 2.0) == pytest.approx(3 + 2 * WEIGHT)
    assert model.predict("train", "trainer", 1.0) == 8
