"""Windows: the steps of the schedule that are noisy and trained in a training step, which may move.

All images of a training step share one window. It is a pure function of the settings and the training
step's number, so that every host and a resumed run compute the same window.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int

from digen_jax.diffusion.sampling import check_window
from digen_jax.diffusion.steps import ReverseStep
from digen_jax.ranges import Count, PositiveInt, Range

Mode = Literal["fixed", "random", "progressive"]


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of `length` steps that is fixed, or that moves within the steps [first, end) of the schedule.

    "fixed": it starts at `first`. MixGRPO's paper calls it frozen.

    "random": each position is equally likely, sampled every `interval` training steps. With interval 1 it is
    Flow-GRPO-Fast (arXiv 2505.05470; `sde_window_size` is `length` and `sde_window_range` is (first, end))
    and MixGRPO's "random" strategy. Implementations differ in which images share a position. Flow-GRPO-Fast's
    paper samples one per prompt. Its public code samples one per call of the sampler, shared by all images of
    the call: for SD3 and FLUX anew each time, from a generator that is seeded once per process
    (flow_grpo/diffusers_patch/sd3_pipeline_with_logprob_fast.py, 3d02fd9); for Qwen-Image and BAGEL it seeds
    with the process's number each time, so that a device keeps its position
    (qwenimage_pipeline_with_logprob.py, 4b13ec7). MixGRPO's code samples once per training step and process,
    without a seed. verl-omni's Flow-GRPO samples one per image (verl_omni/pipelines/request_batch.py,
    a1139ba), its MixGRPO one per training step, by a seed, as here.

    "progressive": from `first`, `stride` steps towards the data every `interval` training steps
    (MixGRPO, arXiv 2507.21802: `group_size` is `length`, `iters_per_group` is `interval`). With a
    stride below the length, positions overlap (its `prog_overlap_step`); without `prog_overlap` its
    stride is the length. The last position ends at `end`, even if the stride would lead further, as in
    the paper. MixGRPO's public code lets the window pass the end, where it has fewer steps, down to
    none for one interval. After the last position the window starts again (`roll_back`, which the
    public script sets) or stays (as in the paper). Intervals that shrink along the way (the strategies
    "decay" and "exp_decay") are not implemented.
    """

    mode: Mode = "fixed"  # how the window moves between training steps
    # steps in the window; 0: sampling without noise, for algorithms that train final images
    length: Count = 4
    first: Count = 0  # first step of the window; the first place of one that moves
    # a window that moves stays before this step (MixGRPO: 2 steps before the schedule's end); 0 for a fixed window
    end: Count = 0
    interval: PositiveInt = 1  # training steps that the window stays at one place
    stride: PositiveInt = 1  # steps that a "progressive" window moves each time
    # a "progressive" window starts again after its last place; False: it stays there
    roll_back: bool = True
    # share of the window's steps that each image trains, at random (DanceGRPO)
    timestep_fraction: Annotated[float, Range(0, 1, "least")] = 1.0

    def check(self, steps: int) -> None:
        """Raises ValueError if the window does not fit into a schedule of `steps` steps.

        `check_noise` checks whether its steps have noise, which depends on their kind and the sigmas.
        """
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1")
        if (self.mode == "fixed") != (self.end == 0):
            raise ValueError(
                f"end is {self.end} in mode {self.mode!r}; a window that moves needs the step before which it "
                "stops, a fixed one has none, which is 0"
            )
        end = self.end or self.first + self.length
        if not 0 <= self.first <= end - self.length or end > steps:
            raise ValueError(
                f"length is {self.length}, first is {self.first} and end is {self.end}: the window "
                f"must fit between them, within the schedule's {steps} steps"
            )

    def check_noise(self, step: ReverseStep, sigmas: Float[np.ndarray, "sigmas"]) -> None:
        """Raises ValueError if the window can reach a step that cannot be trained by its density."""
        for start in self.places:
            check_window(step, sigmas, start, self.length)

    @property
    def places(self) -> tuple[int, ...]:
        """Steps at which the window can start, in the order of the schedule."""
        if self.mode == "fixed":
            return (self.first,)
        last = self.end - self.length
        stride = self.stride if self.mode == "progressive" else 1
        return (*range(self.first, last, stride), last)

    def start(self, k: int, seed: int = 0) -> int:
        """Returns the first noisy step in training step k, counted from 0; mode "random" uses `seed`."""
        places, turn = self.places, k // self.interval
        if self.mode == "random":
            return places[np.random.default_rng((seed, turn)).integers(len(places))]
        if self.mode == "progressive" and not self.roll_back:
            return places[min(turn, len(places) - 1)]
        return places[turn % len(places)]


def random_timesteps(
    seed: int | Sequence[int], steps: int, fraction: float
) -> Int[np.ndarray, "k"]:
    """Samples a random share of the denoising steps, in ascending order (DanceGRPO, arXiv 2505.07818).

    DanceGRPO's code samples a separate share for every image, trains it in the sampled order, and never trains
    the last step of the schedule. The order does not matter if gradients are summed, so it is ascending here.
    The share depends only on the seed: (seed, training step) gives all images of a step the same share, and
    (seed, group serial, image) gives each image a separate one, in any batch. The `timestep_fraction` of
    Flow-GRPO's code is different: it takes the first steps, not random ones.

    Args:
      seed: One integer or several, none of them negative.
      steps: Number of denoising steps to choose from, without those that are never trained.
      fraction: Share of the steps, in (0, 1]; rounded down, as in DanceGRPO's code.

    Returns:
      floor(fraction * steps) different indices in [0, steps).

    Raises:
      ValueError: the fraction gives less than one step.
    """
    count = share_of_timesteps(steps, fraction)
    # numpy guarantees that a bit generator's raw stream stays the same, but not the samples from it
    drawn = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(steps)
    return np.sort(np.argsort(drawn, kind="stable")[:count])


def share_of_timesteps(steps: int, fraction: float) -> int:
    """Returns the number of the `steps` denoising steps that `random_timesteps` selects; raises the same error."""
    count = math.floor(fraction * steps + 1e-9)  # 0.29 * 100 is 28.999999999999996
    if count < 1:
        raise ValueError(
            f"timestep_fraction is {fraction}, which selects none of {steps} denoising steps; raise it"
        )
    return count
