"""The trained part of the samples: images of a group, denoising steps of a trajectory.

On the host, in numpy. Nothing here depends on how images are packed into chunks or batches.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int


def best_and_worst(
    scores: Float[np.ndarray, "n"], group_ids: Int[np.ndarray, "n"], count: int
) -> Bool[np.ndarray, "n"]:
    """The `count` best and the `count` worst images of each group (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code for HunyuanVideo, whose `bestofn` is both halves together (8 of 24 images), computes
    the advantages over the whole group first and then ranks the images by them, before clipping; so does
    `advantages.trained_images`. The order of ties depends on its sort, and for an odd `bestofn` it takes one
    more of the best; here equal images are ranked by their index, the lower one as the worse, and both
    halves are equally large.

    Args:
      scores: the numbers by which images are ranked; higher is better.
      group_ids: each image's group. Images must be in the order of their index, not of their arrival.
      count: images in a half, at most half of the smallest group.

    Raises:
      ValueError: a score is not a number, or a group is too small for both halves.
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
    order = np.lexsort((scores, group))  # stable, so that equal scores stay in order of index
    rank = np.empty(len(scores), np.int64)
    rank[order] = np.arange(len(scores)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (rank < count) | (rank >= sizes[group] - count)


def random_timesteps(
    seed: int | Sequence[int], steps: int, fraction: float
) -> Int[np.ndarray, "k"]:
    """A random share of the denoising steps, in ascending order (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code draws a separate share for every image, trains it in the order of the draw, and never
    the last step of the schedule. The order changes nothing when gradients are summed, so it is ascending
    here. The draw depends only on the seed: (seed, training step) gives all images of a step the same share,
    and (seed, group serial, image) each its own, in any batch. The `timestep_fraction` of Flow-GRPO's code is
    different: it takes the first steps, not random ones.

    Args:
      seed: one integer or several, none of them negative.
      steps: number of denoising steps to draw from, without those that are never trained.
      fraction: of the steps, in (0, 1]; a part of a step is not trained, as in DanceGRPO's code.

    Returns:
      floor(fraction * steps) different indices in [0, steps).

    Raises:
      ValueError: the fraction is out of range, or gives less than one step.
    """
    count = share_of_timesteps(steps, fraction)
    # numpy guarantees that a bit generator's raw stream stays the same, but not the draws from it
    drawn = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(steps)
    return np.sort(np.argsort(drawn, kind="stable")[:count])


def share_of_timesteps(steps: int, fraction: float) -> int:
    """How many of `steps` denoising steps `random_timesteps` draws; raises the same errors."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it must lie in (0, 1]")
    count = math.floor(fraction * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if count < 1:
        raise ValueError(
            f"fraction is {fraction}, which selects none of {steps} denoising steps; raise it"
        )
    return count
