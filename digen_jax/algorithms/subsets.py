"""Which part of what was sampled trains: images of a group, denoising steps of a trajectory.

On the host, in numpy. Nothing here depends on how images are packed into fragments or batches.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int


def best_and_worst(
    scores: Float[np.ndarray, "n"], group_ids: Int[np.ndarray, "n"], count: int
) -> Bool[np.ndarray, "n"]:
    """The `count` best and the `count` worst images of each group (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code for HunyuanVideo, whose `bestofn` is both halves together (8 of 24 images), takes
    the advantages over the whole group first and then ranks the images by them, before clipping; so does
    `advantages.trained_images`. It breaks ties as its sort happens to, and of an odd `bestofn` takes one
    more from the best; here equal images rank by their index, the lower one as the worse, and
    both halves are equally large.

    Args:
      scores: what ranks the images, the higher the better.
      group_ids: each image's group. Images must come in the order of their index, not of their arrival.
      count: images a half, at most half of the smallest group.

    Raises:
      ValueError: a score that is not a number, or a group too small for both halves.
    """
    broken = np.flatnonzero(np.isnan(scores))
    if broken.size:
        raise ValueError(f"the score of image {broken[0]} is not a number; it cannot be ranked")
    groups, group, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    small = np.flatnonzero(sizes < 2 * count)
    if small.size:
        raise ValueError(
            f"group {groups[small[0]]} has {sizes[small[0]]} images, of which the {count} best and the "
            f"{count} worst cannot be different ones; give it {2 * count} or more"
        )
    order = np.lexsort((scores, group))  # stable, so that equal scores stay in order of index
    rank = np.empty(len(scores), np.int64)
    rank[order] = np.arange(len(scores)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (rank < count) | (rank >= sizes[group] - count)


def random_timesteps(
    seed: int | Sequence[int], steps: int, fraction: float
) -> Int[np.ndarray, "k"]:
    """A random share of the denoising steps, in ascending order (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code draws such a share for every image of its own, trains it in the order drawn, and never
    the last step of the schedule. The order changes nothing where gradients are summed, so that it is
    ascending here. What is drawn depends on the seed alone: (seed, training step) gives all images of a
    step the same share, and (seed, group serial, image) each its own, in whatever batch it is. Not to be
    confused with the `timestep_fraction` of Flow-GRPO's code, which is the first steps, not random ones.

    Args:
      seed: one integer or several, none negative.
      steps: denoising steps to draw from, without those that are never trained.
      fraction: of the steps, in (0, 1]; a part of a step is not trained, as in DanceGRPO's code.

    Returns:
      floor(fraction * steps) different indices in [0, steps).

    Raises:
      ValueError: a fraction out of range, or under one step.
    """
    count = share_of_timesteps(steps, fraction)
    # numpy promises that a bit generator's raw stream stays the same, but not what is drawn from it
    drawn = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(steps)
    return np.sort(np.argsort(drawn, kind="stable")[:count])


def share_of_timesteps(steps: int, fraction: float) -> int:
    """How many of so many denoising steps `random_timesteps` draws, with its errors."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it must lie in (0, 1]")
    count = math.floor(fraction * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if count < 1:
        raise ValueError(
            f"fraction is {fraction}, which of {steps} denoising steps leaves none; raise it"
        )
    return count
