"""Advantages of a step's images from their rewards, on the host.

They are computed in numpy with float64, so that differences of nearly equal rewards keep their precision, and returned
as float32. Groups are given by integer ids; a repeated prompt is another group. The loss, not this module, clips the
advantages (`adv_clip`).

Public code differs in the std: population (ddof 0) in Flow-GRPO, DiffusionNFT, GenRL and Flow-Factory;
sample (ddof 1) in DanceGRPO, MixGRPO, verl-omni and GDPO; in UniRL population for a group, but sample
for the step. It also differs in the guard against a std of 0: Flow-GRPO, DiffusionNFT, GenRL, verl-omni
and GDPO's TRL code add 1e-4, as here; DanceGRPO and MixGRPO add 1e-8, with which float32 rounding of
equal rewards may give advantages of order 1; Flow-Factory divides by max(std, 1e-6).

The defaults are Flow-GRPO's (arXiv 2505.05470). RLOO (arXiv 2402.14740) is baseline
"leave_one_out" with std "none", Dr. GRPO (arXiv 2503.20783) "group_mean" with std "none".

With several rewards, `combine` selects how they become one advantage:

- "rewards": the reward is their weighted sum, as in Flow-GRPO's code.
- "advantages": the weighted sum of the advantages of each reward, as in MixGRPO's code
  ("advantage_aggr") and GenRL's (`weight_advantages`). `reward_clips` bounds each reward's advantages
  before they are weighted, as in DanceGRPO's code for HunyuanVideo.
- "gdpo": the same with each reward standardised in its group, then divided by the std of the
    result over the step (GDPO, arXiv 2601.05242). The mean of this batch normalization
    is 0, because every group's mean is 0, and is not subtracted.

  A reward may apply to some prompts only. Its scores within a group are then all present or all missing (NaN),
  and every image has at least one. With A_i the rewards that apply to image i, and w_j their weights:

  - "rewards": image i's reward is the sum of w_j r_ij over j in A_i. Baseline and std are those of these sums;
    the global std is over all images of the step.
  - "advantages": reward j's advantages are defined on the images that it applies to, and its global std
    is over these. Image i's advantage is the sum of w_j times its clipped advantage of j over j in A_i.
  - "gdpo": the same sum without clipping; the std over the step is over all images.

  A group therefore does not count in the statistics of a reward that does not apply to it. With "advantages", groups
  with different rewards have equal weight for any reward scales; with "rewards", scales matter.

With `kl_reward`, the KL to the initial model is one more reward, of weight -kl_reward, and differs between the
denoising steps of an image, so that each step has its own advantage (`step_advantages`).
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from digen_jax.errors import DERIVED, Count, NonNegativeFloat

# Added to a std before dividing by it, in units of the reward.
STD_EPS = 1e-4

# The value subtracted from a reward. "group_mean": the mean of its group, including itself.
# "leave_one_out": the mean of the other rewards of its group.
Baseline = Literal["group_mean", "leave_one_out"]

# The divisor. "group": the std of the image's group. "global": that of the step. "max_group": the largest of the step's
# groups, as in LongCat-Video (arXiv 2510.22200) and GenRL (`max_group_std`, genrl/stat_tracking.py, 82a867e).
Std = Literal["group", "global", "max_group", "none"]

DDof = Literal[0, 1]  # 0: the std of a population. 1: of a sample.
Combine = Literal["rewards", "advantages", "gdpo"]  # see AdvantageSettings


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
    """Computation of advantages from rewards, and selection of the images that train."""

    # value that is subtracted from rewards; "leave_one_out" as in RLOO
    baseline: Baseline = "group_mean"
    # standard deviation that normalizes: of the group, of the step ("global"), the largest of the step's groups
    # ("max_group"), or "none" (Dr. GRPO)
    std: Std = "global"
    ddof: DDof = 0  # 0 for the population standard deviation, 1 for the sample standard deviation
    # Of the config's rewards: a weight for each.
    reward_weights: tuple[float, ...] = dataclasses.field(default=(1.0,), metadata=DERIVED)
    # combination of several rewards: "rewards" sums weighted rewards, "advantages" sums weighted advantages, "gdpo"
    # also divides this sum by its standard deviation over the step
    combine: Combine = "rewards"
    # number of the best images, and of the worst images, of a group that train; 0 means all
    best_and_worst: Count = 0
    # whether groups of equal rewards are excluded from the loss, the KL and the means
    drop_zero_std: bool = False
    # weight of the KL to the initial model, which is subtracted from the reward of each denoising step before
    # advantages are computed, as in GenRL's code; only for policy_gradient; 0 means no KL
    kl_reward: NonNegativeFloat = 0.0
    # Of the config's rewards: bounds of each reward's own advantages, 0: none; empty: all are 0.
    reward_clips: tuple[float, ...] = dataclasses.field(default=(), metadata=DERIVED)

    @property
    def needs(self) -> Literal["group", "step"]:
        """Unit that must be scored before any part of it can train."""
        return "step" if self._shared_std or self.combine == "gdpo" else "group"

    @property
    def ranking_needs(self) -> Literal["group", "step"]:
        """Unit that must be scored before `ranking` is known: a std shared by all rewards does not change the order."""
        return "step" if self._shared_std and self.combine == "advantages" else "group"

    @property
    def _shared_std(self) -> bool:
        return self.std in ("global", "max_group")

    def kept(self, chunk: int, images: int) -> int:
        """Returns the number of images of a chunk that train, for groups of `images` images."""
        return chunk // images * 2 * self.best_and_worst or chunk

    def check(self, images: int) -> None:
        """Raises ValueError for settings that are incompatible, or do not allow groups of `images` images."""
        if self.std == "none" and self.ddof:
            raise ValueError(
                f"ddof is {self.ddof}, but std is 'none'; set ddof to 0 or std to 'group', 'global' or 'max_group'"
            )
        if 2 * self.best_and_worst > images:
            raise ValueError(
                f"best_and_worst is {self.best_and_worst}; it must be at most {images // 2}, "
                f"half of the {images} images of a group"
            )
        if self.combine != "rewards" and len(self.reward_weights) == 1 and not self.kl_reward:
            raise ValueError(
                f"combine is {self.combine!r}, but reward_weights has a single weight; set combine to "
                "'rewards', or give each of several rewards, or kl_reward, a weight"
            )
        if any(self.reward_clips) and self.combine != "advantages":
            raise ValueError(
                f"combine is {self.combine!r}, which bounds no reward's own advantages, but a reward has a clip of "
                f"{max(self.reward_clips):g}; set that to 0, or combine to 'advantages'"
            )
        if self.combine == "gdpo" and (self.std, self.baseline) != ("group", "group_mean"):
            raise ValueError(
                f"combine is 'gdpo', which standardises each reward in its group, but std is {self.std!r} "
                f"and baseline {self.baseline!r}; set std to 'group' and baseline to 'group_mean', or "
                "combine to 'advantages'"
            )

    def check_early_training(self) -> None:
        """Raises ValueError unless advantages are (reward - group mean) / std, and all images train.

        Otherwise training before a group is complete is not exact. Without a std it would also be exact, but
        such advantages are unbounded, so whether they are clipped is not known in advance.
        """
        for name, allowed in (
            ("baseline", ("group_mean",)),
            ("std", ("group", "global")),
            ("ddof", (0,)),
            ("best_and_worst", (0,)),
            ("drop_zero_std", (False,)),
            ("kl_reward", (0.0,)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} is {value!r}; to train before a group is complete set it to "
                    f"{' or '.join(map(repr, allowed))}"
                )


def advantages(
    settings: AdvantageSettings,
    rewards: Float[np.ndarray, "n"] | Float[np.ndarray, "n k"],
    group_ids: Int[np.ndarray, "n"],
    num_groups: int,
) -> Float32[np.ndarray, "n"]:
    """Computes each image's advantage, before clipping, from all rewards of a group or step (`settings.needs`).

    Images that do not train (`trained_images`) also have an advantage, and count in every mean and std.

    Args:
      settings: Validated settings.
      rewards: One number per image, or k numbers for k reward_weights; NaN if a reward does not apply to the
        image's group.
      group_ids: Group of each image, in [0, num_groups).
      num_groups: Number of groups in the batch.

    Raises:
      ValueError: a reward is infinite, or missing for an image but not for its full group, or an image has no
        reward; the numbers of rewards and weights differ, a group id is out of range, or an image is alone in its
        group and the baseline is "leave_one_out".
    """
    rewards = _columns(settings, rewards, group_ids, num_groups)
    found = _combined(settings, rewards, group_ids, num_groups)
    if settings.combine == "gdpo":
        found = found / (_global_std(found, settings.ddof) + STD_EPS)
    return found.astype(np.float32)


def with_kl(
    settings: AdvantageSettings, rewards: Float[np.ndarray, "n k"], kl: Float[np.ndarray, "n"]
) -> tuple[AdvantageSettings, Float[np.ndarray, "n k+1"]]:
    """Returns (settings, rewards) with the KL as one more reward, whose advantages are not bounded."""
    weights = *settings.reward_weights, -settings.kl_reward
    clips = (*settings.reward_clips, 0.0) if settings.reward_clips else ()
    changed = dataclasses.replace(settings, reward_weights=weights, reward_clips=clips)
    return changed, np.column_stack([rewards, kl])


def step_advantages(
    settings: AdvantageSettings,
    rewards: Float[np.ndarray, "n k"],
    kl: Float[np.ndarray, "n s"],
    group_ids: Int[np.ndarray, "n"],
    num_groups: int,
) -> Float32[np.ndarray, "n s"]:
    """Computes the advantages of each image's s denoising steps, whose reward contains -kl_reward times their KL.

    A step is compared with the same step of the group's other images. A KL lowers the reward of its own step only. As
    in GenRL (ModelTC/GenRL, 82a867e): genrl/trainer/wan_trainer.py subtracts the KL from the weighted rewards before
    genrl/stat_tracking.py computes the advantages ("rewards"), or genrl/advantages.py, with `weight_advantages`, adds
    kl_reward times the advantages of -KL ("advantages"). The global std is that of each denoising step, "max_group"
    the largest of all groups and steps.

    Raises:
      ValueError: as for `advantages`.
    """
    _columns(settings, rewards, group_ids, num_groups)
    count, steps = kl.shape
    if settings.std == "global":
        each = [advantages(*with_kl(settings, rewards, one), group_ids, num_groups) for one in kl.T]
        return np.stack(each, axis=1)
    rewards = np.repeat(rewards, steps, axis=0)
    ids = (group_ids[:, None] * steps + np.arange(steps)).ravel()
    found = advantages(*with_kl(settings, rewards, kl.ravel()), ids, num_groups * steps)
    return found.reshape(count, steps)


def trained_images(
    settings: AdvantageSettings,
    rewards: Float[np.ndarray, "n"] | Float[np.ndarray, "n k"],
    group_ids: Int[np.ndarray, "n"],
    num_groups: int,
) -> Bool[np.ndarray, "n"]:
    """Returns whether each image trains; other images get weight 0 and do not count in the loss's denominator.

    Takes the arguments of `advantages`: complete groups, with images in index order. Only complete groups are
    dropped, if all rewards that `combine` combines are equal. The code of Flow-GRPO and GenRL drops each image whose
    advantage is 0, even if others of its group are not 0, but keeps some at random to fill batches.

    Raises:
      ValueError: as for `advantages`; or a group is too small for `best_and_worst`.
    """
    rewards = _columns(settings, rewards, group_ids, num_groups)
    scores = signal = ranking(settings, rewards, group_ids, num_groups)
    if settings.combine != "rewards":
        signal = _zero_where_missing(rewards[:, np.asarray(settings.reward_weights) != 0])
    trained = np.ones(len(rewards), bool)
    if settings.drop_zero_std:
        trained &= ~zero_std_groups(signal, group_ids, num_groups)[group_ids]
    if settings.best_and_worst:
        trained &= best_and_worst(scores, group_ids, settings.best_and_worst)
    return trained


def ranking(
    settings: AdvantageSettings,
    rewards: Float[np.ndarray, "n"] | Float[np.ndarray, "n k"],
    group_ids: Int[np.ndarray, "n"],
    num_groups: int,
) -> Float[np.ndarray, "n"]:
    """Returns numbers that order the images of each group like their advantages, with the same ties.

    Takes the arguments of `advantages`: all rewards of a group or step (`settings.ranking_needs`).

    Raises:
      ValueError: as for `advantages`.
    """
    rewards = _columns(settings, rewards, group_ids, num_groups)
    plain = settings.std == "none" and not any(settings.reward_clips)
    if settings.combine == "rewards" or plain:
        return _weighted_sum(settings, rewards)  # no difference is lost to rounding
    # With advantages, rounding errors would order images whose rewards cancel.
    combined = _combined(settings, rewards, group_ids, num_groups)
    return np.round(combined / np.abs(settings.reward_weights).sum(), 12)


def zero_std_groups(
    rewards: Float[np.ndarray, "b"] | Float[np.ndarray, "b k"],
    group_ids: Int[np.ndarray, "b"],
    num_groups: int,
) -> Bool[np.ndarray, "groups"]:
    """Returns whether the rewards of each group are all equal, which gives no signal; False for missing groups.

    With several rewards, each reward that applies must be equal for all images of the group.

    Raises:
      ValueError: a reward is not finite where it applies, or a group id is out of range.
    """
    rewards = _zero_where_missing(_checked(rewards, group_ids, num_groups))
    highest = np.full((num_groups, *rewards.shape[1:]), -np.inf)
    np.maximum.at(highest, group_ids, rewards)
    equal = highest == _group_lowest(rewards, group_ids, num_groups)
    return equal.all(axis=tuple(range(1, rewards.ndim)))


def best_and_worst(
    scores: Float[np.ndarray, "n"], group_ids: Int[np.ndarray, "n"], count: int
) -> Bool[np.ndarray, "n"]:
    """Returns the `count` best and the `count` worst images of each group (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code for HunyuanVideo, whose `bestofn` counts both halves (8 of 24 images), computes the
    advantages over the complete group and then ranks the images by them, before clipping; so does
    `advantages.trained_images`. Its order of ties depends on its sort, and an odd `bestofn` takes one more
    of the best. Here ties are ranked by index, the lower one as worse, and both halves have the same size.

    Args:
      scores: Ranking scores; higher is better.
      group_ids: Group of each image. Images must be in index order, not in order of arrival.
      count: Images per half, at most half of the smallest group.

    Raises:
      ValueError: a score is NaN, or a group is too small for both halves.
    """
    broken = np.flatnonzero(np.isnan(scores))
    if broken.size:
        raise ValueError(f"the score of image {broken[0]} is not a number; it cannot be ranked")
    groups, group, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    small = np.flatnonzero(sizes < 2 * count)
    if small.size:
        raise ValueError(
            f"group {groups[small[0]]} has {sizes[small[0]]} images, too few for {count} best and "
            f"{count} other worst ones; give it {2 * count} or more"
        )
    order = np.lexsort((scores, group))  # stable: equal scores stay in index order
    rank = np.empty(len(scores), np.int64)
    rank[order] = np.arange(len(scores)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (rank < count) | (rank >= sizes[group] - count)


def _columns(
    settings: AdvantageSettings, rewards: np.ndarray, group_ids: np.ndarray, num_groups: int
) -> np.ndarray:
    """Returns the rewards in float64, one column per weight."""
    rewards = _checked(rewards, group_ids, num_groups)
    columns = rewards[:, None] if rewards.ndim == 1 else rewards
    if columns.shape[1] != len(settings.reward_weights):
        raise ValueError(
            f"each image has {columns.shape[1]} rewards, but reward_weights is "
            f"{settings.reward_weights}; give each reward a weight"
        )
    return columns


def _weighted_sum(settings: AdvantageSettings, columns: np.ndarray) -> np.ndarray:
    # No matrix product: it may sum the rows of equal images in different orders.
    return _zero_where_missing(columns * np.asarray(settings.reward_weights)).sum(axis=1)


def _zero_where_missing(columns: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(columns), 0.0, columns)


def _combined(
    settings: AdvantageSettings, columns: np.ndarray, group_ids: np.ndarray, num_groups: int
) -> np.ndarray:
    """Returns the advantages in float64; for "gdpo" before the last normalization."""
    how = settings.baseline, settings.std, settings.ddof
    if settings.combine == "rewards":
        return _standardised(_weighted_sum(settings, columns), group_ids, num_groups, *how)
    each = np.full(columns.shape, np.nan)
    for number, clip in enumerate(settings.reward_clips or (0.0,) * columns.shape[1]):
        applies = ~np.isnan(columns[:, number])
        own = _standardised(columns[applies, number], group_ids[applies], num_groups, *how)
        each[applies, number] = np.clip(own, -clip, clip) if clip else own
    return _weighted_sum(settings, each)


def _standardised(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    num_groups: int,
    baseline: Baseline,
    std: Std,
    ddof: DDof,
) -> np.ndarray:
    sizes = np.bincount(group_ids, minlength=num_groups)[group_ids]
    # Subtract the group's minimum first: then equal rewards have advantages of exactly 0.
    above = rewards - _group_lowest(rewards, group_ids, num_groups)[group_ids]
    centred = above - np.bincount(group_ids, above, num_groups)[group_ids] / sizes
    if std == "none":
        scale: np.ndarray | float = 1.0
    elif std == "global":
        scale = _global_std(rewards, ddof) + STD_EPS
    else:
        squares = np.bincount(group_ids, centred**2, num_groups)[group_ids]
        of_group = np.sqrt(squares / np.maximum(sizes - ddof, 1))
        scale = (of_group.max(initial=0.0) if std == "max_group" else of_group) + STD_EPS
    if baseline == "leave_one_out":
        alone = np.flatnonzero(sizes == 1)
        if alone.size:
            raise ValueError(
                f"image {alone[0]} is alone in its group, but baseline is 'leave_one_out'; give it others"
            )
        centred = centred * sizes / (sizes - 1)
    return centred / scale


def _global_std(values: np.ndarray, ddof: DDof) -> float:
    """Returns the std; 0 for a reward that applies to no image."""
    if not len(values):
        return 0.0
    return float(values.std(ddof=min(ddof, len(values) - 1)))


def _group_lowest(rewards: np.ndarray, group_ids: np.ndarray, num_groups: int) -> np.ndarray:
    lowest = np.full((num_groups, *rewards.shape[1:]), np.inf)
    np.minimum.at(lowest, group_ids, rewards)
    return lowest


def _checked(rewards: np.ndarray, group_ids: np.ndarray, num_groups: int) -> np.ndarray:
    """Checks rewards and ids, and returns the rewards in float64."""
    outside = np.flatnonzero((group_ids < 0) | (group_ids >= num_groups))
    if outside.size:
        raise ValueError(
            f"image {outside[0]} has group id {group_ids[outside[0]]}; ids must be in [0, {num_groups})"
        )
    missing = np.isnan(rewards)
    broken = ~np.isfinite(rewards)
    if rewards.ndim == 2 and missing.any():
        # A score may be missing if its reward applies to no image of the group and each image has another score.
        known = np.zeros((num_groups, rewards.shape[1]), bool)
        np.logical_or.at(known, group_ids, ~missing)
        broken &= ~(missing & ~known[group_ids] & ~missing.all(axis=1, keepdims=True))
    if broken.any():
        image, *column = place = tuple(np.argwhere(broken)[0])
        which = f"reward {column[0]}" if column else "the reward"
        raise ValueError(f"{which} of image {image} is {rewards[place]}; it must be finite")
    return rewards.astype(np.float64)
