import pathlib

import numpy as np
import pytest

from digen_jax.algorithms.advantages import group_advantages, zero_std_groups

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "flow_rl.npz")


@pytest.mark.parametrize("std", ["group", "global"])
def test_golden(std):
    ours = group_advantages(GOLDEN["adv_rewards"], GOLDEN["adv_group"], 3, std)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, GOLDEN[f"adv_flow_grpo_{std}_std"], rtol=1e-6)


@pytest.mark.parametrize("std", ["group", "global"])
def test_equals_the_definition_for_interleaved_uneven_groups(std):
    rng = np.random.default_rng(0)
    groups = np.array([2, 0, 2, 2, 0, 3, 2, 0, 3])
    rewards = rng.normal(size=9).astype(np.float32) + 1000
    ours = group_advantages(rewards, groups, 5, std, eps=1e-2)
    values = [float(reward) for reward in rewards]
    for i, group in enumerate(groups):
        mine = [value for value, other in zip(values, groups, strict=True) if other == group]
        scope = mine if std == "group" else values
        centre = sum(scope) / len(scope)
        deviation = (sum((value - centre) ** 2 for value in scope) / len(scope)) ** 0.5
        expected = (values[i] - sum(mine) / len(mine)) / (deviation + 1e-2)
        assert ours[i] == pytest.approx(expected, rel=1e-5)


def test_a_single_image_or_equal_rewards_teach_nothing():
    rewards, groups = np.array([0.1, 0.1, 0.1, 0.7, 1.0, 0.0]), np.array([0, 0, 0, 1, 2, 2])
    ours = group_advantages(rewards, groups, 3, "group")
    np.testing.assert_allclose(ours[:4], 0, atol=1e-9)
    np.testing.assert_allclose(ours[4:], [1, -1], rtol=1e-3)
    np.testing.assert_array_equal(zero_std_groups(rewards, groups, 4), [True, True, False, False])


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([0.0, np.nan], [0, 0], "reward of image 1 is nan"),
        ([np.inf, 0.0], [0, 0], "reward of image 0 is inf"),
        ([0.0, 1.0], [0, 2], "image 1 has group id 2"),
        ([0.0, 1.0], [-1, 0], "image 0 has group id -1"),
    ],
)
def test_refused(rewards, groups, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(np.array(rewards), np.array(groups), 2, "group")
    with pytest.raises(ValueError, match=message):
        zero_std_groups(np.array(rewards), np.array(groups), 2)
