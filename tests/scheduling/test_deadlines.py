import math

from digen_jax.scheduling.commands import TRAINER, Fragment, Generate, Publication, Score, Train
from digen_jax.scheduling.costs import GUESSED, CostModel, cost_of
from digen_jax.scheduling.deadlines import Deadline, expected

GENERATE, OTHER = (Generate(1, worker, Fragment(0, 0), Publication(0)) for worker in ("r0", "r1"))


def test_a_deadline_is_a_floor_or_ten_times_what_is_expected():
    deadline = Deadline(60.0)
    assert [deadline.seconds(s) for s in (None, 0.0, 6.0, 6.1, 100.0)] == [60, 60, 60, 61, 1000]
    assert Deadline(0.0).seconds(5.0) == Deadline(math.inf).seconds(5.0) == math.inf


def test_what_was_measured_is_expected_and_no_guess():
    costs = CostModel(GUESSED, images=4)
    assert expected(costs, GENERATE) is None
    costs.observe("generate", "r0", 1.0, 8.0)
    costs.observe("generate", "r1", 1.0, 2.0)
    costs.observe("score", "", 1.0, 3.0)
    assert [expected(costs, command) for command in (GENERATE, OTHER)] == [8.0, 2.0]
    assert expected(costs, Generate(1, "r2", Fragment(0, 0), Publication(0))) == 5.0
    assert expected(costs, Score(1, Fragment(0, 0), "r0")) == 3.0
    assert expected(costs, Train(1, TRAINER, Fragment(0, 0), 0, False)) is None


def test_an_evaluation_is_measured_apart():
    """Its fragments have another size, schedule and guidance."""
    costs = CostModel(GUESSED, images=4)
    evaluation = Generate(1, "r0", Fragment(0, 0, evaluation=True), Publication(0))
    costs.observe(cost_of(evaluation), "r0", 1.0, 30.0)
    assert (expected(costs, evaluation), expected(costs, GENERATE)) == (30.0, None)
