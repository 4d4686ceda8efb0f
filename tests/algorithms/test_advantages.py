import collections
import dataclasses
import itertools
import math
import pathlib
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digen_jax.algorithms.advantages import (
    STD_EPS,
    AdvantageSettings,
    advantages,
    best_and_worst,
    ranking,
    step_advantages,
    trained_images,
    zero_std_groups,
)

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "flow_rl.npz")
GROUPS = np.array([2, 0, 2, 2, 0, 3, 2, 0, 3, 3])  # interleaved and uneven; 1 and 4 are absent
REWARDS = np.random.default_rng(1).normal(size=(10, 3)) * [1.0, 20.0, 0.1] + [0.0, 1000.0, 0.5]
WEIGHTS = (1.0, 0.05, -2.0)
MODES = [
    AdvantageSettings(baseline, std, ddof, WEIGHTS, combine)
    for combine, baseline, std, ddof in itertools.product(
        ["rewards", "advantages"],
        ["group_mean", "leave_one_out"],
        ["group", "global", "max_group"],
        [0, 1],
    )
]
MODES += [
    AdvantageSettings(baseline, "none", 0, WEIGHTS, combine)
    for combine, baseline in itertools.product(
        ["rewards", "advantages"], ["group_mean", "leave_one_out"]
    )
]
MODES += [AdvantageSettings("group_mean", "group", d, WEIGHTS, "gdpo") for d in (0, 1)]


def label(setting):
    return "-".join(map(str, (setting.combine, setting.baseline, setting.std, setting.ddof)))


def oracle(setting, rewards, groups):
    """Image by image, in Python's own float64, as the papers write it."""
    deviation = statistics.stdev if setting.ddof else statistics.pstdev

    def every_group(values):
        pairs = [pair for pair in zip(groups, values, strict=True) if not math.isnan(pair[1])]
        return [[v for g, v in pairs if g == group] for group in {g for g, _ in pairs}]

    def standardised(values):
        found = []
        for i, group in enumerate(groups):
            mine = [v for v, other in zip(values, groups, strict=True) if other == group]
            others = [v for j, v in enumerate(values) if groups[j] == group and j != i]
            if math.isnan(values[i]):
                found.append(math.nan)
                continue
            centre = statistics.fmean(others if setting.baseline == "leave_one_out" else mine)
            applies = [v for v in values if not math.isnan(v)]
            scopes = {"group": [mine], "global": [applies], "max_group": every_group(values)}
            found_stds = map(deviation, scopes.get(setting.std, []))
            scale = max((std + STD_EPS for std in found_stds), default=1.0)
            found.append((values[i] - centre) / scale)
        return found

    def weighted(rows):
        return [
            sum(
                w * x for w, x in zip(setting.reward_weights, row, strict=True) if not math.isnan(x)
            )
            for row in rows
        ]

    rows = [[float(x) for x in row] for row in rewards]
    if setting.combine == "rewards":
        return standardised(weighted(rows))
    each = [standardised([row[k] for row in rows]) for k in range(len(rows[0]))]
    clips = setting.reward_clips or (0.0,) * len(each)
    each = [
        [math.copysign(clip, x) if clip and abs(x) > clip else x for x in column]
        for column, clip in zip(each, clips, strict=True)
    ]
    found = weighted(zip(*each, strict=True))
    if setting.combine == "gdpo":
        mean, scale = statistics.fmean(found), deviation(found) + STD_EPS
        found = [(x - mean) / scale for x in found]
    return found


def assert_close(ours, expected):
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


# Of group 0 the first and the second reward, of group 2 all, of group 3 the third alone.
MIXED = np.where(
    (GROUPS[:, None] == [[0, 0, 3]]) | (GROUPS[:, None] == [[2, 2, 2]]), REWARDS, np.nan
)


@pytest.mark.parametrize("setting", MODES, ids=label)
def test_every_mode_is_its_definition_image_by_image(setting):
    """Also where rewards apply to some groups."""
    setting.check(4)
    for rewards in (REWARDS, MIXED):
        assert_close(advantages(setting, rewards, GROUPS, 5), oracle(setting, rewards, GROUPS))
    # Statistics are of what applies: of each reward alone they are as if the others were not there.
    if setting.combine == "advantages":
        third = dataclasses.replace(setting, reward_weights=(0.0, 0.0, 1.0))
        has = ~np.isnan(MIXED[:, 2])
        alone = dataclasses.replace(setting, reward_weights=(1.0,), combine="rewards")
        expected = advantages(alone, REWARDS[has, 2], GROUPS[has], 5)
        np.testing.assert_array_equal(advantages(third, MIXED, GROUPS, 5)[has], expected)
        assert not advantages(third, MIXED, GROUPS, 5)[~has].any()


@pytest.mark.parametrize("rewards", [REWARDS, MIXED], ids=["all", "mixed"])
@pytest.mark.parametrize("std", ["group", "global", "max_group", "none"])
def test_a_clip_bounds_a_rewards_own_advantages_before_they_are_weighted(std, rewards):
    free = AdvantageSettings("group_mean", std, 0, WEIGHTS, "advantages")
    clipped = dataclasses.replace(free, reward_clips=(0.5, 0.0, 0.02))
    clipped.check(4)
    ours = advantages(clipped, rewards, GROUPS, 5)
    assert_close(ours, oracle(clipped, rewards, GROUPS))
    assert (ours != advantages(free, rewards, GROUPS, 5)).sum() > 3
    order = ranking(clipped, rewards, GROUPS, 5)
    for group in np.unique(GROUPS):
        ranked = np.argsort(order[group == GROUPS], kind="stable")
        assert (np.diff(ours[group == GROUPS][ranked]) >= -1e-6).all()
    loose = dataclasses.replace(free, reward_clips=(1e9, 0.0, 1e9))
    np.testing.assert_array_equal(
        advantages(loose, rewards, GROUPS, 5), advantages(free, rewards, GROUPS, 5)
    )


def genrl_update(groups, rewards, std):
    """GenRL's `PerPromptStatTracker.update` (ModelTC/GenRL, genrl/stat_tracking.py, 82a867e), rewards [n, steps]."""
    found, own = np.empty_like(rewards), {g: rewards[groups == g] for g in set(groups.tolist())}
    largest = max(np.max(np.std(one, axis=0) + 1e-4) for one in own.values())
    for g, one in own.items():
        scale = {
            "group": np.std(one, axis=0) + 1e-4,
            "global": np.std(rewards, axis=0) + 1e-4,
            "max_group": largest,
        }[std]
        found[groups == g] = (one - one.mean(axis=0)) / scale
    return found


@pytest.mark.parametrize("std", ["group", "global", "max_group"])
@pytest.mark.parametrize("combine", ["rewards", "advantages"])
def test_a_kl_is_subtracted_from_the_reward_of_its_own_step_as_in_genrl(std, combine):
    kl = np.random.default_rng(2).gamma(1.0, size=(10, 4)) * [1.0, 5.0, 0.2, 3.0]
    setting = AdvantageSettings("group_mean", std, 0, WEIGHTS, combine, kl_reward=0.7)
    ours = step_advantages(setting, REWARDS, kl, GROUPS, 5)
    if combine == "rewards":
        expected = genrl_update(GROUPS, (REWARDS @ WEIGHTS)[:, None] - 0.7 * kl, std)
    else:
        columns = [np.repeat(column[:, None], 4, axis=1) for column in REWARDS.T]
        each = [genrl_update(GROUPS, column, std) for column in columns]
        expected = sum(w * one for w, one in zip(WEIGHTS, each, strict=True))
        expected = expected + 0.7 * genrl_update(GROUPS, -kl, std)
    assert_close(ours, expected)
    assert np.abs(ours - advantages(setting, REWARDS, GROUPS, 5)[:, None]).max() > 0.1
    one = dataclasses.replace(setting, reward_weights=(1.0,))
    one.check(4)
    broken = np.where(np.arange(10) == 3, np.nan, REWARDS[:, 0])[:, None]
    with pytest.raises(ValueError, match="image 3"):
        step_advantages(one, broken, kl, GROUPS, 5)


@pytest.mark.parametrize("std", ["group", "global"])
def test_the_golden_numbers_come_out_of_the_settings_too(std):
    setting = AdvantageSettings(std=std)
    rewards, groups = GOLDEN["adv_rewards"], GOLDEN["adv_group"]
    expected = GOLDEN[f"adv_flow_grpo_{std}_std"]
    assert_close(advantages(setting, rewards, groups, 3), expected)
    assert_close(advantages(setting, rewards[:, None], groups, 3), expected)
    # a sum of rewards, of which one is constant
    two = np.stack([rewards, np.ones_like(rewards)], axis=1)
    setting = dataclasses.replace(setting, reward_weights=(1.0, 3.0))
    assert_close(advantages(setting, two, groups, 3), expected)


@pytest.mark.parametrize("setting", MODES, ids=label)
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(setting):
    rewards = np.where((GROUPS == 2)[:, None], np.float32(0.1), REWARDS)
    ours = advantages(setting, rewards, GROUPS, 5)
    np.testing.assert_array_equal(ours == 0, GROUPS == 2)
    everywhere = np.full((10, 3), 0.1)
    np.testing.assert_array_equal(advantages(setting, everywhere, GROUPS, 5), np.zeros(10))


def test_a_sample_std_of_a_lone_image_is_0():
    rewards, groups = np.array([0.3, 1.0, 3.0]), np.array([1, 0, 0])
    ours = advantages(AdvantageSettings(std="group", ddof=1), rewards, groups, 2)
    np.testing.assert_allclose(ours, [0, -(0.5**0.5), 0.5**0.5], rtol=1e-4)
    alone = advantages(AdvantageSettings(ddof=1), np.array([5.0]), np.array([0]), 1)
    np.testing.assert_array_equal(alone, [0])


def test_dropped_are_groups_whose_rewards_are_all_equal():
    groups = np.array([0, 1, 0, 1, 2, 2, 3, 3])
    rewards = np.array([[1, 5], [1, 5], [1, 6], [1, 5], [0, 1], [1, 0], [2, 3], [2, 3]], np.float64)
    np.testing.assert_array_equal(zero_std_groups(rewards, groups, 5), [0, 1, 0, 1, 0])
    keep = AdvantageSettings(reward_weights=(1.0, 1.0))
    assert trained_images(keep, rewards, groups, 4).all()
    drop = dataclasses.replace(keep, drop_zero_std=True)
    # the sum of group 2 is always 1, though its rewards differ
    np.testing.assert_array_equal(trained_images(drop, rewards, groups, 4), groups == 0)
    each = dataclasses.replace(drop, combine="advantages")
    trained = trained_images(each, rewards, groups, 4)
    np.testing.assert_array_equal(trained, (groups == 0) | (groups == 2))
    # a reward of weight 0 has no effect
    first = dataclasses.replace(each, reward_weights=(1.0, 0.0))
    np.testing.assert_array_equal(trained_images(first, rewards, groups, 4), groups == 2)
    # and one that does not apply neither
    nan, groups = np.nan, np.array([0, 0, 1, 1, 2, 2, 3, 3])
    rewards = np.array([[1, 1, 2, 3, nan, nan, 4, 4], [nan] * 4 + [5, 5, 6, 7]]).T
    np.testing.assert_array_equal(zero_std_groups(rewards, groups, 5), [1, 0, 1, 0, 0])
    for setting in (drop, each):
        expected = (groups == 1) | (groups == 3)
        np.testing.assert_array_equal(trained_images(setting, rewards, groups, 4), expected)
    np.testing.assert_array_equal(trained_images(first, rewards, groups, 4), groups == 1)


def test_best_and_worst_rank_by_the_advantages_of_the_whole_group():
    groups = np.array([0, 1, 0, 1, 0, 1, 0, 1])
    first = np.array([0.0, 1.0, 1.0, 1.0, 2.0, 1.0, 3.0, 1.0])
    second = np.array([9.0, 0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0])
    rewards = np.stack([first, second], axis=1)
    setting = AdvantageSettings("group_mean", "group", 0, (1.0, 1.0), "rewards", 1)
    # sums of group 0: 9 1 2 3, of group 1: 1 2 3 4
    trained = trained_images(setting, rewards, groups, 2)
    np.testing.assert_array_equal(np.flatnonzero(trained), [0, 1, 2, 7])
    # z-scores of the first reward outweigh one image's second: 0.39 -1.02 -0.13 0.76
    each = dataclasses.replace(setting, combine="advantages")
    trained = trained_images(each, rewards, groups, 2)
    np.testing.assert_array_equal(np.flatnonzero(trained), [1, 2, 6, 7])
    gdpo = dataclasses.replace(setting, combine="gdpo")
    np.testing.assert_array_equal(trained_images(gdpo, rewards, groups, 2), trained)
    # the others are only left out of training
    np.testing.assert_array_equal(
        advantages(each, rewards, groups, 2),
        advantages(dataclasses.replace(each, best_and_worst=0), rewards, groups, 2),
    )
    both = dataclasses.replace(each, drop_zero_std=True)
    rewards[1::2] = 0.7
    np.testing.assert_array_equal(np.flatnonzero(trained_images(both, rewards, groups, 2)), [2, 6])


@pytest.mark.parametrize("setting", MODES, ids=label)
def test_needs_is_what_an_advantage_depends_on(setting):
    plain = advantages(setting, REWARDS, GROUPS, 5)
    mine = GROUPS == 2
    within, elsewhere = REWARDS.copy(), REWARDS.copy()
    within[0] += 5.0
    elsewhere[1] += 5.0
    assert (advantages(setting, within, GROUPS, 5)[mine] != plain[mine]).all()
    changed = (advantages(setting, elsewhere, GROUPS, 5)[mine] != plain[mine]).any()
    assert setting.needs == ("step" if changed else "group")


@pytest.mark.parametrize("setting", MODES, ids=label)
def test_a_ranking_orders_each_group_as_the_advantages_do(setting):
    expected, mine = advantages(setting, REWARDS, GROUPS, 5), GROUPS == 2
    found = ranking(setting, REWARDS, GROUPS, 5)
    for group in np.unique(GROUPS):
        one = group == GROUPS
        np.testing.assert_array_equal(np.argsort(found[one]), np.argsort(expected[one]))
    if setting.ranking_needs == "group":
        np.testing.assert_array_equal(ranking(setting, REWARDS[mine], GROUPS[mine], 5), found[mine])
    else:
        assert setting.combine == "advantages" and setting.std in ("global", "max_group")


@pytest.mark.parametrize("combine", ["rewards", "advantages", "gdpo"])
def test_rewards_that_cancel_out_rank_nothing(combine):
    """Not even by rounding errors, which the last advantages have."""
    rewards = np.array([[1, 0], [0, 1], [0, 1], [2, 1]], np.float64)
    setting = AdvantageSettings(std="group", reward_weights=(1.0, 1.0), combine=combine)
    first, *others = ranking(setting, rewards, np.array([0, 0, 0, 1]), 2)[:3]
    assert others == [first, first]
    np.testing.assert_allclose(
        advantages(setting, rewards, np.array([0, 0, 0, 1]), 2)[:3], 0, atol=1e-6
    )


@pytest.mark.parametrize("use", [advantages, trained_images, zero_std_groups])
@pytest.mark.parametrize(
    ("weights", "rewards", "groups", "wrong"),
    [
        ((1.0,), [0.0, np.nan], [0, 0], "reward of image 1 is nan"),
        ((1.0,), [np.inf, 0.0], [0, 0], "reward of image 0 is inf"),
        ((1.0,), [0.0, 1.0], [-1, 0], "image 0 has group id -1"),
        ((1.0, 1.0), [[0.0, 1.0], [0.0, np.inf]], [0, 0], "reward 1 of image 1 is inf"),
        ((1.0, 1.0), [[0.0, 1.0], [0.0, 1.0]], [0, 2], "image 1 has group id 2"),
        ((1.0, 1.0), [[1, np.nan], [1, 2], [1, 2]], [0, 0, 1], "reward 1 of image 0 is nan"),
        ((1.0, 1.0), [[np.nan] * 2, [np.nan] * 2, [1, 2]], [0, 0, 1], "reward 0 of image 0 is nan"),
        ((1.0, 1.0), [[np.nan, 1], [np.nan, np.inf], [1, 2]], [0, 0, 1], "reward 1 of image 1 is"),
        ((1.0, 1.0), [0.0, 1.0], [0, 0], "reward_weights"),
        ((1.0,), [[0.0, 1.0], [0.0, 1.0]], [0, 0], "reward_weights"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(use, weights, rewards, groups, wrong):
    arrays, setting = (
        (np.array(rewards), np.array(groups), 2),
        AdvantageSettings(reward_weights=weights),
    )
    if use is zero_std_groups:
        if wrong == "reward_weights":
            return
        with pytest.raises(ValueError, match=wrong):
            use(*arrays)
    else:
        with pytest.raises(ValueError, match=wrong):
            use(setting, *arrays)


def test_a_lone_image_has_no_leave_one_out_baseline():
    setting = AdvantageSettings("leave_one_out", "none")
    with pytest.raises(ValueError, match="image 1 is alone in its group"):
        advantages(setting, np.array([0.0, 1.0, 2.0]), np.array([1, 0, 1]), 2)


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
        with pytest.raises(ValueError, match=r"^group "):
            best_and_worst(scores, ids, count)
    else:
        assert set(np.flatnonzero(best_and_worst(scores, ids, count))) == expected


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(ValueError, match=r"image 1 "):
        best_and_worst(np.array([0.0, np.nan]), np.array([0, 0]), 1)
    with pytest.raises(ValueError, match=r"^group 3 "):
        best_and_worst(np.arange(7.0), np.array([1, 1, 1, 1, 3, 3, 3]), 2)
