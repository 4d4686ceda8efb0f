"""How the trainer cuts its batches and makes an update of a gradient."""

import dataclasses

import optax


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
    ema: float
    pack: int = 1

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after clipping by the global norm, its rate warmed up linearly."""
        rate = optax.linear_schedule(
            self.learning_rate / (self.warmup + 1), self.learning_rate, self.warmup
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay),
        )
