import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digen_jax.algorithms.advantages import best_and_worst
from digen_jax.diffusion.windows import random_timesteps

PINNED = [0, 1, 4, 5, 6, 7, 9, 10, 12]


@settings(max_examples=100, deadline=None)
@given(
    images=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=30),
    count=st.integers(1, 3),
)
def test_best_and_worst_by_sorting_each_group(images, count):
    """Few different scores, so that there are ties."""
    groups = collections.defaultdict(list)
    for index, (group, score) in enumerate(images):
        groups[group].append((score, index))
    expected = set()
    for members in groups.values():
        members.sort()
        expected |= {index for _, index in members[:count] + members[-count:]}
    scores = np.array([score for _, score in images], np.float64)
    ids = np.array([7 * group - 5 for group, _ in images])
    if min(map(len, groups.values())) < 2 * count:
        with pytest.raises(ValueError, match=f"too few for {count} best and {count} other"):
            best_and_worst(scores, ids, count)
    else:
        assert set(np.flatnonzero(best_and_worst(scores, ids, count))) == expected


def test_of_equal_images_the_first_are_the_worst_and_the_last_the_best():
    trained = best_and_worst(np.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]), np.zeros(6, int), 2)
    np.testing.assert_array_equal(np.flatnonzero(trained), [0, 1, 4, 5])


def test_the_order_of_different_images_does_not_matter():
    rng = np.random.default_rng(0)
    scores, ids = rng.normal(size=40), np.repeat(np.arange(4), 10)
    order = rng.permutation(40)
    trained = best_and_worst(scores, ids, 2)
    assert trained.sum() == 16
    np.testing.assert_array_equal(best_and_worst(scores[order], 3 - ids[order], 2), trained[order])


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(ValueError, match="score of image 1 is not a number"):
        best_and_worst(np.array([0.0, np.nan]), np.array([0, 0]), 1)
    with pytest.raises(ValueError, match=r"group 3 has 3 images, too few for 2 best .* give it 4"):
        best_and_worst(np.arange(7.0), np.array([1, 1, 1, 1, 3, 3, 3]), 2)


def test_a_share_of_the_timesteps_is_a_uniformly_drawn_subset():
    drawn = [tuple(random_timesteps((5, step), 5, 0.4).tolist()) for step in range(2000)]
    counts = collections.Counter(drawn)
    assert set(counts) == set(itertools.combinations(range(5), 2))  # ascending, all different
    # 2000 draws of 10 subsets: 200 each, with a standard deviation of 13.4
    assert max(abs(count - 200) for count in counts.values()) < 4 * 13.4


def test_the_draw_is_that_of_the_bit_generator_of_the_seed():
    """Fixed values: another version of numpy must not train other steps."""
    assert random_timesteps(3, 15, 0.6).tolist() == PINNED
    raw = np.random.PCG64(3).random_raw(15).tolist()
    assert sorted(sorted(range(15), key=raw.__getitem__)[:9]) == PINNED
    np.testing.assert_array_equal(
        random_timesteps([3, 1], 15, 0.6), random_timesteps((3, 1), 15, 0.6)
    )


@pytest.mark.parametrize(
    ("steps", "fraction", "count"),
    [(15, 0.6, 9), (10, 0.55, 5), (100, 0.29, 29), (10, 0.3, 3), (7, 1.0, 7), (3, 0.34, 1)],
)
def test_the_share_is_rounded_down(steps, fraction, count):
    drawn = random_timesteps(0, steps, fraction)
    assert len(set(drawn.tolist())) == len(drawn) == count
    assert drawn.min() >= 0 and drawn.max() < steps


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (0.0, "fraction is 0.0"),
        (1.1, r"lie in \(0, 1\]"),
        (0.09, "selects none of 10 denoising steps"),
    ],
)
def test_shares_that_train_nothing_are_refused(fraction, message):
    with pytest.raises(ValueError, match=message):
        random_timesteps(0, 10, fraction)
