import dataclasses

import pytest

from digen_jax.errors import ConfigError
from digen_jax.scheduling.settings import Costs, Settings

GOOD = Settings(1, groups=6, images=4, chunk_images=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            dict(chunk_images=5),
            r"chunk_images = 5 must divide groups \* images / updates = 24, as a chunk",
        ),
        (
            dict(chunk_images=16),
            r"chunk_images = 16 must divide groups \* images / updates = 24, as a chunk",
        ),
        (dict(updates=4), "updates = 4 must divide groups = 6"),
        (
            dict(oversampled_groups=2),
            "oversampled_groups = 2 is for dynamic sampling, which is off",
        ),
        (dict(max_candidates=7, oversampled_groups=2), "must be at least groups"),
        (
            dict(updates=4, max_candidates=5),
            r"(?s)2 things .*updates = 4 must divide .*max_candidates = 5 must be at least",
        ),
    ],
)
def test_invalid_settings_are_named(fields, words):
    GOOD.check()
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(GOOD, **fields).check()


def test_a_chunk_of_several_groups_is_one_unit():
    assert (GOOD.units, GOOD.unit_chunks, GOOD.chunks) == (6, 2, 12)
    large = dataclasses.replace(GOOD, chunk_images=8)
    assert (large.units, large.unit_chunks, large.chunks) == (3, 1, 3)
    across = dataclasses.replace(GOOD, chunk_images=3)
    assert (across.units, across.unit_chunks, across.chunks) == (2, 4, 8)


def test_costs_of_a_chunk():
    costs = Costs(generate=2.0, train=3.0, score=0.5, score_latency=1.0, update=7.0)
    assert costs.seconds("generate", 4) == 8
    assert costs.seconds("train", 4) == 12
    assert costs.seconds("train", 4, share=0.25) == 3
    assert costs.seconds("score", 4) == 3
    assert costs.seconds("update", 4) == 7


def test_the_share_of_units_that_may_begin_early_is_rounded_down():
    for share, expected in ((0.0, 0), (0.3, 3), (0.35, 3), (1.0, 10)):
        plan = Settings(1, groups=10, images=1, chunk_images=1, max_off_policy_fraction=share)
        assert plan.off_policy_units == expected
        assert dataclasses.replace(plan, max_policy_lag=0).off_policy_units == 0
