"""Advantages of a step's images from their rewards: on the host, between rollout and training.

numpy in float64 inside, so that a baseline subtracted from nearly equal rewards loses nothing;
float32 comes out. Standard deviations are those of the population (ddof = 0), as in Flow-GRPO's
public code. Groups are given by integer ids; a repeated prompt is another group.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

# Added to a std before it is divided by, in units of the reward.
STD_EPS = 1e-4


def group_advantages(
    rewards: Float[np.ndarray, "b"],
    group_ids: Int[np.ndarray, "b"],
    num_groups: int,
    std: Literal["group", "global"],
    eps: float = STD_EPS,
) -> Float32[np.ndarray, "b"]:
    """(reward - mean of its group) / (std + eps), as in Flow-GRPO (arXiv 2505.05470).

    Args:
      rewards: one number an image.
      group_ids: each image's group, in [0, num_groups).
      num_groups: groups in the batch.
      std: "group": of the rewards of the image's group. "global": of all rewards given, which must
        then be the whole step's.
      eps: added to the std, in units of the reward.

    Raises:
      ValueError: a reward that is not finite, or a group id out of range.
    """
    rewards = _checked(rewards, group_ids, num_groups)
    mean = _group_mean(rewards, group_ids, num_groups)[group_ids]
    centred = rewards - mean
    group_std = np.sqrt(_group_mean(centred**2, group_ids, num_groups))[group_ids]
    scale = group_std if std == "group" else rewards.std()
    return (centred / (scale + eps)).astype(np.float32)


def zero_std_groups(
    rewards: Float[np.ndarray, "b"], group_ids: Int[np.ndarray, "b"], num_groups: int
) -> Bool[np.ndarray, "groups"]:
    """Groups whose rewards are all equal, from which nothing is learnt; an absent group is not one.

    Raises:
      ValueError: a reward that is not finite, or a group id out of range.
    """
    rewards = _checked(rewards, group_ids, num_groups)
    highest, lowest = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(highest, group_ids, rewards)
    np.minimum.at(lowest, group_ids, rewards)
    return highest == lowest


def _group_mean(values: np.ndarray, group_ids: np.ndarray, num_groups: int) -> np.ndarray:
    sums = np.bincount(group_ids, values, num_groups)
    return sums / np.maximum(np.bincount(group_ids, minlength=num_groups), 1)


def _checked(rewards: np.ndarray, group_ids: np.ndarray, num_groups: int) -> np.ndarray:
    """The rewards in float64, once rewards and ids are found usable."""
    broken = np.flatnonzero(~np.isfinite(rewards))
    if broken.size:
        raise ValueError(
            f"the reward of image {broken[0]} is {rewards[broken[0]]}; it must be finite"
        )
    outside = np.flatnonzero((group_ids < 0) | (group_ids >= num_groups))
    if outside.size:
        raise ValueError(
            f"image {outside[0]} has group id {group_ids[outside[0]]}; "
            f"ids must lie in [0, {num_groups})"
        )
    return rewards.astype(np.float64)
