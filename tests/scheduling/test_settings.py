import dataclasses

import pytest

from digen_jax.errors import ConfigError
from digen_jax.scheduling.settings import Costs, Settings

GOOD = Settings(1, groups=6, images=4, fragment_images=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            dict(fragment_images=5),
            r"fragment_images = 5 must divide groups \* images / updates = 24, as a fragment",
        ),
        (
            dict(fragment_images=16),
            r"fragment_images = 16 must divide groups \* images / updates = 24, as a fragment",
        ),
        (dict(updates=4), "updates = 4 must divide groups = 6"),
        (dict(readiness="groups"), "did you mean 'group'"),
        (dict(readiness="early_group"), "did you mean 'group'"),
        (dict(open_groups=-1), "open_groups must be at least 0"),
        (
            dict(open_groups=1, fragment_images=3),
            "fragment_images = 3 must divide images = 4 with",
        ),
        (
            dict(readiness="step", open_groups=1, fragment_images=8),
            "fragment_images = 8 must divide images = 4 with open_groups = 1",
        ),
        (dict(stale_share=1.5), "stale_share must lie between 0 and 1"),
        (dict(staleness=-1), "staleness must be at least 0"),
        (
            dict(redundant_groups=2),
            "redundant_groups = 2 is for dynamic sampling, which is off",
        ),
        (dict(max_candidates=7, redundant_groups=2), "must be at least groups"),
        (dict(max_candidates=9, open_groups=1), "only a complete group"),
        (dict(max_candidates=9, readiness="step", open_groups=1), "only a complete group"),
        (dict(max_candidates=9, fragment_images=8), "fragment_images = 8 must divide images = 4"),
        (dict(open_groups=1, ordered=True), "ordered cannot go with open_groups = 1"),
        (dict(max_candidates=9, images=1, fragment_images=1), "one image has no variance"),
    ],
)
def test_what_cannot_work_is_named(fields, words):
    GOOD.check()
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(GOOD, **fields).check()


def test_a_fragment_of_several_groups_is_one_unit():
    assert (GOOD.units, GOOD.unit_fragments, GOOD.fragments) == (6, 2, 12)
    large = dataclasses.replace(GOOD, fragment_images=8)
    assert (large.units, large.unit_fragments, large.fragments) == (3, 1, 3)
    across = dataclasses.replace(GOOD, fragment_images=3)
    assert (across.units, across.unit_fragments, across.fragments) == (2, 4, 8)


def test_costs_of_a_fragment():
    costs = Costs(generate=2.0, train=3.0, score=0.5, score_latency=1.0, update=7.0)
    assert costs.seconds("generate", 4, 2.0) == 4
    assert costs.seconds("train", 4, 2.0) == 12
    assert costs.seconds("score", 4, 2.0) == 3
    assert costs.seconds("update", 4, 2.0) == 7
