"""One reverse step x -> x_next: the distribution of x_next, and its log-probability.

Sampling and replay call the same `mean_std` and `log_prob`. All arithmetic is float32, whatever
comes in. `sigma`, `sigma_next` and `sigma_max` are scalars, or `[b]` where the samples of a batch
stand at different steps. `sigma_max` is sigmas[1] of the schedule: only `FlowSde` reads it, in
place of a sigma of 1.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

Sigma = Float[ArrayLike, ""] | Float[ArrayLike, "b"]
Sample = Float[Array, "b ..."]
Mean = Float32[Array, "b ..."]
Std = Float32[Array, ""] | Float32[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Ode:
    """Euler step of the probability-flow ODE: x + v dt, without noise."""

    def mean_std(
        self, x: Sample, v: Sample, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> tuple[Mean, Std]:
        """Mean `[b ...]` of x_next and its std, which is 0."""
        x, v, sigma, sigma_next = _float32(x, v, sigma, sigma_next)
        dt = sigma_next - sigma
        return x + v * _columns(dt, x), jnp.zeros_like(dt)

    def log_prob(self, x_next: Sample, mean: Mean, std: Std) -> Float32[Array, "b"]:
        """Raises ValueError: a step without noise has no density."""
        raise ValueError("an ode step has no log_prob; choose flow, dance or cps for trained steps")


@dataclasses.dataclass(frozen=True)
class ReverseSde:
    """Euler-Maruyama step of the reverse SDE whose marginals are the ODE's, for any diffusion g.

    x (1 + c dt) + v (1 + c (1 - sigma)) dt + g sqrt(-dt) noise, with c = g^2 / (2 sigma).
    """

    noise_level: float

    def __post_init__(self):
        _check_positive(self)

    def mean_std(
        self, x: Sample, v: Sample, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> tuple[Mean, Std]:
        """Mean `[b ...]` and std (shaped like sigma) of x_next."""
        g = self.diffusion(sigma, sigma_next, sigma_max)
        x, v, sigma, sigma_next = _float32(x, v, sigma, sigma_next)
        dt = sigma_next - sigma
        c = g**2 / (2 * jnp.where(sigma > 0, sigma, 1.0))
        of_x, of_v = 1 + c * dt, (1 + c * (1 - sigma)) * dt
        return x * _columns(of_x, x) + v * _columns(of_v, x), g * _sqrt(-dt)

    def log_prob(self, x_next: Sample, mean: Mean, std: Std) -> Float32[Array, "b"]:
        """Gaussian log-density with its normaliser, averaged over all axes but the first.

        Where std = 0 (padding, which has no weight) it is finite: that of std 1.
        """
        std = jnp.where(std > 0, std, 1.0)
        normaliser = jnp.log(std) + 0.5 * math.log(2 * math.pi)
        return -_mean_square(x_next, mean) / (2 * std**2) - normaliser


@dataclasses.dataclass(frozen=True)
class FlowSde(ReverseSde):
    """Flow-GRPO (arXiv 2505.05470): diffusion g = a sqrt(sigma / (1 - sigma)).

    Where sigma = 1, the first step, 1 - sigma is replaced by 1 - sigma_max as in its public code.
    """

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """g: the std of the step without its factor sqrt(-dt)."""
        sigma, sigma_max = _float32(sigma, sigma_max)
        return self.noise_level * _sqrt(sigma / (1 - jnp.where(sigma == 1, sigma_max, sigma)))


@dataclasses.dataclass(frozen=True)
class DanceSde(ReverseSde):
    """DanceGRPO (arXiv 2505.07818): a constant diffusion g = a."""

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """g: the std of the step without its factor sqrt(-dt)."""
        return jnp.full_like(jnp.asarray(sigma, jnp.float32), self.noise_level)


@dataclasses.dataclass(frozen=True)
class Cps:
    """Coefficients-preserving sampling (arXiv 2509.05952): part of the predicted noise is redrawn.

    The share of fresh noise, sin(a pi/2), is the same in every step and does not shrink with the
    step. At the last step, sigma_next = 0, nothing is random: that step cannot be trained.
    """

    noise_level: float

    def __post_init__(self):
        _check_positive(self)
        if self.noise_level > 1:
            raise ValueError(f"noise_level of cps is {self.noise_level}; it must be at most 1")

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """The step's std itself, which has no factor sqrt(-dt)."""
        sigma_next = jnp.asarray(sigma_next, jnp.float32)
        return sigma_next * math.sin(self.noise_level * math.pi / 2)

    def mean_std(
        self, x: Sample, v: Sample, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> tuple[Mean, Std]:
        """Mean `[b ...]` and std (shaped like sigma) of x_next."""
        std = self.diffusion(sigma, sigma_next, sigma_max)
        x, v, sigma, sigma_next = _float32(x, v, sigma, sigma_next)
        x0 = x - _columns(sigma, x) * v
        eps = x + _columns(1 - sigma, x) * v
        # sqrt(sigma_next^2 - std^2), without the square root whose slope is infinite at 0
        kept = sigma_next * math.cos(self.noise_level * math.pi / 2)
        return _columns(1 - sigma_next, x) * x0 + _columns(kept, x) * eps, std

    def log_prob(self, x_next: Sample, mean: Mean, std: Std) -> Float32[Array, "b"]:
        """-(x_next - mean)^2 averaged over all axes but the first: no 1/2 std^2, no normaliser."""
        return -_mean_square(x_next, mean)


Step = Ode | FlowSde | DanceSde | Cps
KINDS = {"ode": Ode, "flow": FlowSde, "dance": DanceSde, "cps": Cps}


def make_step(kind: str, noise_level: int | float) -> Step:
    """The step that a config names, e.g. `make_step("cps", 0.8)`; ode takes noise level 0.

    Raises:
      ValueError: unknown kind, or a noise level that the kind cannot have.
    """
    if kind not in KINDS:
        raise ValueError(f"step kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if kind != "ode":
        return KINDS[kind](float(noise_level))
    if noise_level != 0:
        raise ValueError(f"noise_level of ode is {noise_level}; set it to 0 or choose an sde kind")
    return Ode()


def _check_positive(step: ReverseSde | Cps) -> None:
    if not 0 < step.noise_level < math.inf:
        raise ValueError(
            f"noise_level of {type(step).__name__} is {step.noise_level}; it must be positive, "
            "or choose the step kind ode"
        )


def _float32(*arrays: ArrayLike) -> list[Array]:
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def _columns(a: Array, x: Array) -> Array:
    """A scalar or `[b]` made to broadcast against x `[b ...]`."""
    return a.reshape(a.shape + (1,) * (x.ndim - 1)) if a.ndim else a


def _sqrt(a: Array) -> Array:
    """Square root whose value and gradient are 0 where a is 0."""
    positive = a > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, a, 1.0)), 0.0)


def _mean_square(a: Array, b: Array) -> Float32[Array, "b"]:
    a, b = _float32(a, b)
    return jnp.mean((a - b) ** 2, axis=tuple(range(1, a.ndim)))
