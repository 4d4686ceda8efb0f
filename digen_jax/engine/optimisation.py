"""Optimisation settings of the trainer: batches and optimizer."""

import dataclasses

import optax
from jaxtyping import Array, Int

from digen_jax.algorithms.decay import EmaDecay, EmaUnit


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """Optimisation, apart from the algorithm's own settings.

    A forward and backward pass takes `pack` denoising steps of `micro_batch` images each.
    """

    micro_batch: int
    learning_rate: float
    warmup: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    ema: float  # 0: no average
    ema_unit: EmaUnit = "update"
    ema_warm_up: bool = False
    ema_every: int = 1
    ema_repeats: int = 1
    pack: int = 1
    updates: int = 1  # optimizer updates of a training step
    decay: int = 0  # updates after the warm-up in which the rate falls to 0; 0: constant

    @property
    def average(self) -> EmaDecay:
        """The decay of the parameters' average."""
        warm_up, every, repeats = self.ema_warm_up, self.ema_every, self.ema_repeats
        return EmaDecay(self.ema, warm_up, every, repeats, self.ema_unit, self.updates)

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after clipping by the global norm; the rate has a linear warm-up and an optional linear decay."""
        rate = optax.linear_schedule(
            self.learning_rate / (self.warmup + 1), self.learning_rate, self.warmup
        )
        if self.decay:
            fall = optax.linear_schedule(self.learning_rate, 0.0, self.decay)
            rate = optax.join_schedules([rate, fall], [self.warmup])
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay),
        )


def updates_made(state: optax.OptState) -> Int[Array, ""]:
    """The number of updates of an optimizer of `TrainerSettings`; all counts in its state are equal."""
    return optax.tree_utils.tree_get_all_with_path(state, "count")[0][1]
