import math

from digen_jax.scheduling.commands import TRAINER, Chunk, Generate, Score, Train, WeightsVersion
from digen_jax.scheduling.settings import GUESSED, CostModel, Deadline, Settings

SETTINGS = Settings(1, groups=1, images=4, chunk_images=4, passes=10)
GENERATE, OTHER = (Generate(1, worker, Chunk(0, 0), WeightsVersion(0)) for worker in ("r0", "r1"))


def train(count):
    return Train(1, TRAINER, Chunk(0, 0), version=0, update=0, first=0, count=count)


def test_a_deadline_is_a_floor_or_ten_times_the_expected_duration():
    deadline = Deadline(60.0)
    assert [deadline.seconds(s) for s in (None, 0.0, 6.0, 6.1, 100.0)] == [60, 60, 60, 61, 1000]
    assert Deadline(0.0).seconds(5.0) == Deadline(math.inf).seconds(5.0) == math.inf


def test_only_measured_durations_are_expected():
    costs = CostModel.create(GUESSED, SETTINGS)
    assert costs.measured(GENERATE) is None
    costs.observe(GENERATE, 8.0)
    costs.observe(OTHER, 2.0)
    costs.observe(Score(1, Chunk(0, 0), "r0"), 3.0)
    assert [costs.measured(command) for command in (GENERATE, OTHER)] == [8.0, 2.0]
    assert costs.measured(Generate(1, "r2", Chunk(0, 0), WeightsVersion(0))) == 5.0
    assert costs.measured(Score(1, Chunk(0, 0), "r0")) == 3.0
    assert costs.measured(train(1)) is None


def test_a_piece_is_expected_to_take_as_long_as_its_passes():
    costs = CostModel.create(GUESSED, SETTINGS)
    costs.observe(train(4), 8.0)
    assert [costs.measured(train(count)) for count in (1, 3, 10)] == [2.0, 6.0, 20.0]


def test_an_evaluation_is_measured_separately():
    """Its chunks have another size, schedule and guidance."""
    costs = CostModel.create(GUESSED, SETTINGS)
    evaluation = Generate(1, "r0", Chunk(0, 0, evaluation=True), WeightsVersion(0))
    costs.observe(evaluation, 30.0)
    assert (costs.measured(evaluation), costs.measured(GENERATE)) == (30.0, None)
