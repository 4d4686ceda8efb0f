"""Gradients of differentiable rewards, through the last sampling steps and the decoder (DRaFT-K, arXiv 2309.17400).

An image is sampled without noise and without a gradient up to its last K steps. The trainer repeats these steps from
the stored latents with the current parameters, decodes the result, and differentiates the rewards. There are no
advantages, ratios or log-probabilities.

Tencent-Hunyuan/UniRL has the same loss (unirl/models/draft.py, unirl/train/refl/policy.py, 2b72035) and its KL
(experimental/refl/models/sd3.py, 5852cb4), both without guidance.
"""

import dataclasses
from typing import ClassVar

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.diffusion.noising import LastSteps
from digen_jax.errors import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class RewardGradient(Algorithm):
    """Settings. With a policy lag, an older version has sampled the steps before the last ones."""

    name: ClassVar[str] = "reward_gradient"
    objective: ClassVar = "matching"
    differentiates_rewards: ClassVar[bool] = True

    # last sampling steps that have a gradient: K of DRaFT-K
    gradient_steps: PositiveInt = 1
    # weight of the KL to the initial model, the mean over these steps; 0 means no KL
    kl_coefficient: NonNegativeFloat = 0.0

    @property
    def replayed_steps(self) -> int:
        """Number of sampling steps that the trainer repeats."""
        return self.gradient_steps

    @property
    def times(self) -> LastSteps:  # type: ignore[override]
        """Noise level of the stored latents."""
        return LastSteps(self.gradient_steps)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms."""
        return ("loss", "trained_reward", *(("kl",) if self.kl_coefficient else ()))

    @property
    def reads_reference(self) -> bool:
        """Whether there is a KL to the initial policy."""
        return self.kl_coefficient > 0

    def check_kind(self, kind: str) -> None:
        """Raises ValueError for a solver other than Euler's, whose steps depend on earlier ones."""
        if kind != "ode":
            raise ValueError(
                f"name is {self.name!r}, which repeats the last sampling steps by Euler's method, but "
                f"config.sampler.kind is {kind!r}: set that to 'ode'"
            )
