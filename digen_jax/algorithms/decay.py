"""Slow copies of the trained parameters: DiffusionNFT's old policy, and averages for evaluation.

A copy follows by copy <- decay copy + (1 - decay) current, with a decay that depends on the number of
optimizer updates.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class LinearDecay:
    """A decay of 0 until `start` updates, then rising by `slope` an update up to `largest`."""

    start: int  # updates before the decay begins to rise
    slope: float  # rise of the decay an update
    largest: float  # largest decay; below 1

    def check(self) -> None:
        """Raises ValueError for a setting that cannot work; the message says what to change."""
        if not (self.start >= 0 and self.slope >= 0):
            raise ValueError(
                f"start is {self.start} and slope {self.slope}; neither may be negative"
            )
        if not 0 <= self.largest < 1:
            raise ValueError(f"largest is {self.largest}; it must lie in [0, 1)")

    def at(self, updates: int) -> float:
        """The decay after `updates` updates, including those of the step that ends."""
        return min(max(updates - self.start, 0) * self.slope, self.largest)


# For DiffusionNFT's `decay_type` (arXiv 2509.16117, eta; numbers of its public code). 0 is on-policy:
# the old policy is the trained one at the step's end. Applied once a step, after all its updates.
OLD_POLICY_DECAYS = {
    0: LinearDecay(start=0, slope=0.0, largest=0.0),
    1: LinearDecay(start=0, slope=0.001, largest=0.5),
    2: LinearDecay(start=75, slope=0.0075, largest=0.999),
}


@dataclasses.dataclass(frozen=True)
class EmaDecay:
    """An average's decay: constant, or with a warm-up in which it averages all parameters so far.

    With warm-up it is min(decay, (1 + n) / (10 + n)) after n updates, including the last one, as in
    the code that Flow-GRPO, DiffusionNFT and AWM share (n is one lower in diffusers' EMAModel).

    Flow-GRPO's scripts (yifan123/flow_grpo, scripts/train_sd3.py, ac4c86e) call it after every
    micro-batch with the number of updates so far, so that each turn is applied once for each of the
    micro-batches of an update: `repeats`. DiffusionNFT's (NVlabs/DiffusionNFT,
    scripts/train_nft_sd3.py, 24af555) calls it once an update, AWM's
    (scxue/advantage_weighted_matching, scripts/train_sd3_awm.py, be51372) once an epoch.
    """

    decay: float
    warm_up: bool = False
    every: int = 1  # updates between two turns of the average (8 in Flow-GRPO, 1 in DiffusionNFT)
    repeats: int = 1  # applications at each turn, which raises the decay to this power

    def at(self, updates: Int[ArrayLike, ""]) -> float | Float[Array, ""]:
        """The decay after `updates` updates; 1, which leaves the average unchanged, between two turns.

        As in the public code, there is a turn when (updates + 1) is a multiple of `every`.
        """
        decay = self.decay
        if self.warm_up:
            decay = jnp.minimum(decay, (1 + updates) / (10 + updates))
        decay = decay**self.repeats
        if self.every > 1:
            decay = jnp.where((updates + 1) % self.every == 0, decay, 1.0)
        return decay


def decayed(copy: Any, current: Any, decay: Float[ArrayLike, ""]) -> Any:
    """Mixes every leaf of two equal trees: decay copy + (1 - decay) current, in the copy's dtype.

    Computed in float32. A decay of 0 gives `current` exactly, and 1 gives `copy`.
    """
    decay = jnp.asarray(decay, jnp.float32)

    def leaf(old, new):
        mixed = decay * old.astype(jnp.float32) + (1 - decay) * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(leaf, copy, current)
