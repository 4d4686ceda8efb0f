"""Slow copies of the trained parameters: DiffusionNFT's old policy, and averages for evaluation.

A copy follows by copy <- decay copy + (1 - decay) current, with a decay that depends on the number of
optimizer updates.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from digen_jax.ranges import Count, Decay, NonNegativeFloat

EmaUnit = Literal["update", "step"]


@dataclasses.dataclass(frozen=True)
class LinearDecay:
    """Decay that is 0 for `start` updates, then rises by `slope` per update, up to `largest`."""

    start: Count  # updates before the decay begins to rise
    slope: NonNegativeFloat  # rise of the decay an update
    largest: Decay  # largest decay; below 1

    def at(self, updates: int) -> float:
        """Returns the decay after `updates` updates, including those of the current step."""
        return min(max(updates - self.start, 0) * self.slope, self.largest)


# DiffusionNFT's `decay_type` (arXiv 2509.16117, eta; values of its public code). 0 is on-policy: the old
# policy is the trained one at the end of the step. Applied once per step, after all its updates.
OLD_POLICY_DECAYS = {
    0: LinearDecay(start=0, slope=0.0, largest=0.0),
    1: LinearDecay(start=0, slope=0.001, largest=0.5),
    2: LinearDecay(start=75, slope=0.0075, largest=0.999),
}


@dataclasses.dataclass(frozen=True)
class EmaDecay:
    """Decay of an average: constant, or with a warm-up during which it averages all parameters so far.

    The average is mixed when n + 1 is a multiple of `every`. With warm-up the decay is min(decay, (1 + n) / (10 + n)).
    n is the argument of `step` in the code that Flow-GRPO, DiffusionNFT, AWM and Flow-Factory share:

    - unit "update": the number of updates so far, including the last one, so that with `every` 8 the average is mixed
      after updates 7, 15, ... Flow-GRPO's scripts (yifan123/flow_grpo, scripts/train_sd3.py, ac4c86e) mix after every
      micro-batch, so that each mixing is repeated once per micro-batch of an update: `repeats`.
      DiffusionNFT's (NVlabs/DiffusionNFT, scripts/train_nft_sd3.py, 24af555) mixes once per update.
    - unit "step": the number of training steps before this one, at whose end the average is mixed, so that with `every`
      4 and two updates per step it is mixed after updates 8, 16, ... As in Flow-Factory (X-GenGroup/Flow-Factory,
      src/flow_factory/trainers, 3e615ee), AWM (scxue/advantage_weighted_matching, scripts/train_sd3_awm.py, be51372)
      and, without a warm-up, DanceGRPO (XueZeyue/DanceGRPO, fastvideo/train_grpo_flux.py, 15cc71d).
    """

    decay: float
    warm_up: bool = False
    every: int = 1  # units between two mixings
    repeats: int = 1  # applications at each mixing, which raises the decay to this power
    unit: EmaUnit = "update"
    step_updates: int = 1  # optimizer updates of a training step

    def at(self, updates: Int[ArrayLike, ""]) -> float | Float[Array, ""]:
        """Returns the decay after `updates` updates; between two mixings 1, which leaves the average unchanged."""
        parts = self.step_updates if self.unit == "step" else 1
        n = updates // parts - 1 if self.unit == "step" else updates
        decay = self.decay
        if self.warm_up:
            decay = jnp.minimum(decay, (1 + n) / (10 + n))
        decay = decay**self.repeats
        if self.every * parts > 1:
            mixed = ((n + 1) % self.every == 0) & (updates % parts == 0)
            decay = jnp.where(mixed, decay, 1.0)
        return decay

    @property
    def first_step(self) -> int:
        """First training step, counted from 1, that mixes the average."""
        if self.unit == "step":
            return self.every
        return -(-max(self.every - 1, 1) // self.step_updates)


def update_average(copy: Any, current: Any, decay: Float[ArrayLike, ""]) -> Any:
    """Mixes every leaf of two equal trees: decay copy + (1 - decay) current, in the copy's dtype.

    The computation is float32. Decay 0 gives exactly `current`, and 1 gives `copy`.
    """
    decay = jnp.asarray(decay, jnp.float32)

    def leaf(old, new):
        mixed = decay * old.astype(jnp.float32) + (1 - decay) * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(leaf, copy, current)
