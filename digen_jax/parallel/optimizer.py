"""The config's section `trainer`: batches, optimizer, the average of the weights; and checks of a step's numbers."""

import dataclasses
from typing import Annotated

import optax
from jaxtyping import Array, Int

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.algorithms.decay import EmaDecay, EmaUnit
from digen_jax.algorithms.old_log_probs import SPREAD_SHARE
from digen_jax.errors import ConfigError
from digen_jax.parallel.objectives import Metrics
from digen_jax.ranges import Decay, NonNegativeFloat, PositiveFloat, PositiveInt, Range


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """How a step's images become updates."""

    micro_batch: PositiveInt = 144  # images in one forward and backward pass
    pack: PositiveInt = 1  # denoising steps of each image in one pass
    updates: PositiveInt = 1  # optimizer updates a step, each of its own groups
    learning_rate: PositiveFloat = 1e-4  # AdamW's learning rate after the warm-up
    # updates in which the learning rate rises linearly
    warmup: Annotated[int, Range(0, 10**9)] = 0
    # updates after the warm-up in which the rate falls linearly to 0; 0: it stays
    decay: Annotated[int, Range(0, 10**9)] = 0
    b1: Decay = 0.9  # AdamW's decay of the gradient's average
    b2: Decay = 0.999  # AdamW's decay of the squared gradient's average
    eps: PositiveFloat = 1e-8  # AdamW's epsilon
    weight_decay: NonNegativeFloat = 0.0  # AdamW's weight decay
    # gradients are clipped to this global norm; inf: never
    clip_norm: Annotated[float, Range(0, excluded="least", infinite=True)] = 1.0
    # decay of the weights' moving average, which is evaluated and exported; 0: no average
    ema: Decay = 0.0
    # what the next two fields count: "update", the updates so far (Flow-GRPO, DiffusionNFT), or "step", the training
    # steps before this one, at whose end the average is mixed (DanceGRPO, Flow-Factory, AWM)
    ema_unit: EmaUnit = "update"
    ema_warm_up: bool = False  # a smaller decay at first: (1 + n) / (10 + n) at number n
    ema_every: PositiveInt = 1  # the average is mixed where n + 1 is a multiple of this
    # mixings each time, to follow code that mixes at every micro-batch
    ema_repeats: PositiveInt = 1

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


def check_spread(algorithm: Algorithm, sums: Metrics) -> None:
    """Checks how far rounding moves the ratios of a step's first update, if the algorithm has any.

    For "divergence" these are the KLs to the policy that sampled, which should be 0.

    Args:
      algorithm: of the trainer.
      sums: over chunks that were all sampled with the parameters with which they are compared.

    Raises:
      ConfigError: more than a hundredth of them are further from 1 than the config's share of their bound.
    """
    bound = algorithm.ratio_bound
    if bound is None:
        return
    weight = max(float(sums["weight"]), 1.0)
    mean, over = (float(sums[name]) / weight for name in ("ratio_spread", "over_spread_limit"))
    limit = algorithm.spread_limit * bound
    if over <= SPREAD_SHARE:
        return
    raise ConfigError(
        f"before the first update, where all ratios should be 1, rounding moves them by {mean:.1e} in the mean, "
        f"and {over:.1%} of them by more than {limit:.1e}, which is config.algorithm.spread_limit = "
        f"{algorithm.spread_limit:g} of their bound {bound:g}: set config.algorithm.old_log_probs, which is "
        f"{algorithm.old_log_probs!r}, to 'current' for one update a step of fresh samples or to 'recomputed' for "
        "several, or config.precision.arithmetic and config.precision.published to 'float32', or raise "
        "config.algorithm.spread_limit"
    )
