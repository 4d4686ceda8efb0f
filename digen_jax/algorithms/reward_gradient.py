"""Gradients of differentiable rewards, through sampling steps and the decoder.

An image is sampled without noise and without a gradient. The trainer computes velocities of some of its steps again
from the stored latents with the current parameters, decodes the result, and differentiates the rewards. There are no
advantages, ratios or log-probabilities. The algorithms differ in the steps and in how their gradients are connected:

- DRaFT-K (arXiv 2309.17400) repeats the last K steps. Tencent-Hunyuan/UniRL has the same loss
  (unirl/models/draft.py, unirl/train/refl/policy.py, 2b72035) and its KL (experimental/refl/models/sd3.py, 5852cb4),
  both without guidance.
- ReFL (arXiv 2304.05977) predicts the image by one step, as in RuoyuWang-2077/FlowBP
  (flowbp/trainers/sd35/refl.py, 93b220a), where all images of a batch have the same step; here each draws its own.
- LeapAlign and FlowBP: see `flowbp`.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from digen_jax.algorithms.algorithm import Algorithm
from digen_jax.diffusion.noising import FirstLevel, times_keys
from digen_jax.errors import NonNegativeFloat, PositiveInt

Evaluate = Callable[
    [Float[Array, "n ..."], Float[Array, "n"]], tuple[Float[Array, "n ..."], Float[Array, "n"]]
]


class Final(NamedTuple):
    """Latents that are decoded for n images, the KL at their steps, and the weight of each image in the loss."""

    latents: Float[Array, "n ..."]
    kl: Float[Array, "n"]
    weight: Float[Array, "n"] | None = None  # None means 1


@dataclasses.dataclass(frozen=True)
class RewardAlgorithm(Algorithm):
    """What these algorithms have in common."""

    objective: ClassVar = "matching"
    differentiates_rewards: ClassVar[bool] = True
    times: ClassVar = FirstLevel()  # type: ignore[misc]

    # weight of the KL to the initial model, the mean over the steps with a gradient; 0 means no KL
    kl_coefficient: NonNegativeFloat = 0.0
    # whether the unconditional pass of the guidance has no gradient
    detach_unconditional: bool = False

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
                f"name is {self.name!r}, which repeats sampling steps by Euler's method, but "
                f"config.sampler.kind is {kind!r}: set that to 'ode'"
            )

    def stored_latents(self, steps: int) -> range:
        """All latents of the trajectory."""
        return range(steps + 1)

    def final(
        self,
        evaluate: Evaluate,
        states: Float[Array, "n t ..."],
        sigmas: Float[Array, "t"],
        keys: Key[Array, "n"],
    ) -> Final:
        """Returns the latents that are decoded, as a function of the velocity.

        Args:
          evaluate: `(x, sigma) -> (velocity, KL)` of each image.
          states: The stored latents of each image.
          sigmas: Noise levels of the schedule.
          keys: One key for each image, which draws its steps.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RewardGradient(RewardAlgorithm):
    """DRaFT-K. With a policy lag, an older version has sampled the steps before the last ones."""

    name: ClassVar[str] = "reward_gradient"

    # last sampling steps that have a gradient: K of DRaFT-K
    gradient_steps: PositiveInt = 1

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if the sampler has fewer steps."""
        check_at_most("gradient_steps", self.gradient_steps, steps)

    def stored_latents(self, steps: int) -> range:
        """The latents before the last steps."""
        return range(steps - self.gradient_steps, steps - self.gradient_steps + 1)

    def final(
        self,
        evaluate: Evaluate,
        states: Float[Array, "n 1 ..."],
        sigmas: Float[Array, "t"],
        keys: Key[Array, "n"],
    ) -> Final:
        """Repeats the last steps."""

        def step(x, pair):
            sigma, following = pair
            v, kl = evaluate(x, jnp.full(len(x), sigma))
            return x + (following - sigma) * v, kl

        last = sigmas[-1 - self.gradient_steps :]
        x, kl = jax.lax.scan(step, states[:, 0], (last[:-1], last[1:]))
        return Final(x, jnp.mean(kl, axis=0))


@dataclasses.dataclass(frozen=True)
class Refl(RewardAlgorithm):
    """ReFL: decodes the image x - sigma v that is predicted at one of the last steps."""

    name: ClassVar[str] = "refl"

    # one of this number of last steps has the gradient
    last_steps: PositiveInt = 11

    def check_steps(self, steps: int) -> None:
        """Raises ValueError if the sampler has fewer steps."""
        check_at_most("last_steps", self.last_steps, steps)

    def final(
        self,
        evaluate: Evaluate,
        states: Float[Array, "n t ..."],
        sigmas: Float[Array, "t"],
        keys: Key[Array, "n"],
    ) -> Final:
        """Draws one step of each image and predicts the image."""
        steps = len(sigmas) - 1
        at = self.drawn(keys, steps)
        x = states[jnp.arange(len(keys)), at]
        v, kl = evaluate(x, sigmas[at])
        return Final(x + expand(sigmas[-1] - sigmas[at], x) * v, kl)

    def drawn(self, keys: Key[Array, "n"], steps: int) -> Int[Array, "n"]:
        """Returns the step of each image."""
        first = steps - self.last_steps
        return jax.vmap(lambda key: jax.random.randint(key, (), first, steps))(times_keys(keys))


def expand(weight: Array, like: Array) -> Array:
    """Adds axes of length 1 at the end."""
    return weight.reshape(*weight.shape, *(1,) * (like.ndim - weight.ndim))


def check_at_most(field: str, value: int, steps: int) -> None:
    """Raises ValueError if a field is greater than the number of sampling steps."""
    if value > steps:
        raise ValueError(
            f"{field} = {value} is more than the config.sampler.steps = {steps}: set it to {steps} or less"
        )
