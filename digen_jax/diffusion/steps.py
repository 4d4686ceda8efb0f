"""Reverse steps x -> x_next: the distribution of x_next, and its log-probability.

Sigma is 1 for noise and 0 for data: x_sigma = (1 - sigma) x0 + sigma eps, the network predicts
v = eps - x0, and a reverse step goes from sigma to sigma_next < sigma.

Sampling and replay call the same `mean_std` and `log_prob`. All arithmetic is float32, for inputs of
any dtype. `sigma`, `sigma_next` and `sigma_max` are scalars, or `[b]` if the samples of a batch
are at different steps. `sigma_max` is sigmas[1] of the schedule; only `FlowSde` reads it, instead of
a sigma of 1 or nearly 1, and `LinearSde`.

ODE solvers also `advance` along a schedule, and may keep values of the last step.
"""

import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int

MAX_STD = 0.45  # maximum std of a step of `CappedFlowSde`
NEARLY_ONE = 1 - 1e-5  # least sigma of a first step; UniPC's schedules start at 1 - 1e-6

Sigma = Float[ArrayLike, ""] | Float[ArrayLike, "b"]
Sigmas = Float[Array, "sigmas"] | Float[np.ndarray, "sigmas"]
Sample = Float[Array, "b ..."]
Mean = Float32[Array, "b ..."]
Std = Float32[Array, ""] | Float32[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Ode:
    """Euler step of the probability-flow ODE: x + v dt, without noise."""

    def mean_std(
        self, x: Sample, v: Sample, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> tuple[Mean, Std]:
        """Returns mean `[b ...]` of x_next and its std, which is 0."""
        x, v, sigma, sigma_next = _float32(x, v, sigma, sigma_next)
        dt = sigma_next - sigma
        return x + v * _columns(dt, x), jnp.zeros_like(dt)

    def log_prob(self, x_next: Sample, mean: Mean, std: Std) -> Float32[Array, "b"]:
        """Raises ValueError because a step without noise has no density."""
        raise ValueError("an ode step has no log_prob; choose flow, dance or cps for trained steps")

    def init_last(self, x: Sample) -> Mean | None:
        """Returns None, the `last` of the first step, because this solver keeps no values."""

    def advance(
        self, x: Sample, v: Sample, sigmas: Sigmas, i: int | Int[Array, ""], last: Any
    ) -> tuple[Mean, Mean | None]:
        """Takes step i of a schedule; returns x at sigmas[i + 1], and `last` for the next step."""
        mean, _ = self.mean_std(x, v, sigmas[i], sigmas[i + 1], sigmas[1])
        return mean, None


@dataclasses.dataclass(frozen=True)
class Dpm2(Ode):
    """DPM-Solver++(2M) (arXiv 2211.01095, algorithm 2) for flow matching: second order in the step.

    With lambda = log((1 - sigma) / sigma), h_i its increase over step i and x0 = x - sigma v:
    x + v dt + (1 - sigma_next / sigma) (x0 - last x0) h_i / (2 h_(i-1)). It adds the last term to the
    Euler step, which equals DPM-Solver++(1) for flow matching.

    The first step has no last x0, and the last step, to sigma 0, has an infinite h: both are Euler steps.
    If sigmas[0] = 1, the second step is also an Euler step, because the first h is infinite.

    Implementations: diffusers' DPMSolverMultistepScheduler (dpmsolver++, solver_order 2, midpoint,
    use_flow_sigmas, flow_prediction) takes the same steps. Its `lower_order_final` makes no
    difference: the last step to sigma 0 is first-order in any case, and the step before it has a
    lower order only in a solver of order 3. Its schedule starts at 1 - 1/1000 before the shift,
    so its second step is second-order. DiffusionNFT's solver ("dpm2") takes these steps on
    FlowMatchEuler's sigmas, which start at 1; its last step is written as DDIM without noise, which equals
    the Euler step. This code follows it, with coefficients in float32 instead of float64, and with
    sigma itself as the network input, where both others truncate 1000 sigma to an integer.
    """

    def init_last(self, x: Sample) -> Mean:
        """Returns the `last` of the first step, which does not read it."""
        return jnp.zeros(x.shape, jnp.float32)

    def advance(
        self, x: Sample, v: Sample, sigmas: Sigmas, i: int | Int[Array, ""], last: Mean
    ) -> tuple[Mean, Mean]:
        """Takes step i of a schedule; returns x at sigmas[i + 1], and the x0 that this step predicted."""
        mean, _ = self.mean_std(x, v, sigmas[i], sigmas[i + 1], sigmas[1])
        x, v, sigmas = _float32(x, v, sigmas)
        x0 = x - sigmas[i] * v
        before = sigmas[jnp.maximum(i - 1, 0)]
        h = _log_snr(sigmas[i + 1]) - _log_snr(sigmas[i])
        h_last = _log_snr(sigmas[i]) - _log_snr(before)
        second_order = (i > 0) & (sigmas[i + 1] > 0) & (before < 1)
        gain = (1 - sigmas[i + 1] / sigmas[i]) * h / (2 * h_last)
        return mean + jnp.where(second_order, gain, 0.0) * (x0 - last), x0


class UniPcMemory(NamedTuple):
    """What `UniPc` keeps of the last steps.

    Attributes:
      x: Corrected x of the last step.
      x0: Prediction of the last step, from x before its correction.
      x0_before: The same of the step before.
    """

    x: Mean
    x0: Mean
    x0_before: Mean


@dataclasses.dataclass(frozen=True)
class UniPc(Ode):
    """UniPC of order 2 with B(h) = exp(-h) - 1, "bh2" (arXiv 2302.04867), for flow matching: Wan's solver.

    Each step first corrects x by the prediction x0 = x - sigma v at it (UniC), then predicts x_next (UniP). Both are
    r x + (1 - r) (x0 + slope), r = sigma_next / sigma, from the values of the last step and of this one. x0 is not
    computed again from the corrected x, which would need the network; it is what later steps read.

    The step after the first and the last one are of order 1: UniP is the DDIM step then, and UniC the trapezoidal rule.
    UniP of order 2 is `Dpm2`'s step. diffusers' UniPCMultistepScheduler takes the same steps (solver_order 2, bh2,
    predict_x0, lower_order_final), also on its float32 sigmas. Its sigmas start at 1 - 1e-6. From a sigma of 1 the
    limit is taken, in which the second step is of order 1, too.
    """

    def init_last(self, x: Sample) -> UniPcMemory:
        """Returns the memory of the first step, which does not read it."""
        return UniPcMemory(*[jnp.zeros(x.shape, jnp.float32)] * 3)

    def advance(
        self, x: Sample, v: Sample, sigmas: Sigmas, i: int | Int[Array, ""], last: UniPcMemory
    ) -> tuple[Mean, UniPcMemory]:
        """Takes step i of a schedule; returns x at sigmas[i + 1], and the memory for the next step."""
        x, v, sigmas = _float32(x, v, sigmas)
        x0 = x - sigmas[i] * v
        # Increases of log((1 - sigma) / sigma) over the step before the last one, the last, and this one.
        snr = _log_snr(sigmas[jnp.clip(i + jnp.arange(-2, 2), 0, len(sigmas) - 1)])
        h_before, h_last, h = snr[1:] - snr[:-1]

        b, c = _unic_moments(jnp.where(i > 0, h_last, 1.0))
        slope_before = (last.x0 - last.x0_before) * jnp.where(i > 1, h_last / h_before, 0.0)
        # Weights of both slopes, which integrate a parabola through the three predictions.
        of_before = jnp.where(i > 1, (b - c) / (1 + h_before / h_last), 0.0)
        of_last = jnp.where(i > 1, b - of_before, 0.5)
        slope = of_before * slope_before + of_last * (x0 - last.x0)
        r = sigmas[i] / sigmas[jnp.maximum(i - 1, 0)]
        corrected = r * last.x + (1 - r) * (last.x0 + slope)
        x = jnp.where(i > 0, corrected, x)

        second_order = (i > 0) & (i < len(sigmas) - 2)
        slope = jnp.where(second_order, h / (2 * h_last), 0.0) * (x0 - last.x0)
        r = sigmas[i + 1] / sigmas[i]
        return r * x + (1 - r) * (x0 + slope), UniPcMemory(x, x0, last.x0)


def _unic_moments(h: Float32[Array, ""]) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """Returns the means of s and of s^2, for s from 0 to 1 with the weights exp(-h (1 - s)): diffusers' `b`."""
    total = -jnp.expm1(-h)
    first = 1 / total - 1 / h
    return first, 1 / total - 2 * first / h


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
        """Returns mean `[b ...]` and std (shaped like sigma) of x_next."""
        g = cast(Any, self).diffusion(sigma, sigma_next, sigma_max)
        x, v, sigma, sigma_next = _float32(x, v, sigma, sigma_next)
        dt = sigma_next - sigma
        c = g**2 / (2 * jnp.where(sigma > 0, sigma, 1.0))
        of_x, of_v = 1 + c * dt, (1 + c * (1 - sigma)) * dt
        return x * _columns(of_x, x) + v * _columns(of_v, x), g * _sqrt(-dt)

    def log_prob(self, x_next: Sample, mean: Mean, std: Std) -> Float32[Array, "b"]:
        """Returns the Gaussian log-density with its normalizer, averaged over all axes but the first.

        If std = 0 (padding, which has no weight) it is finite: the density of std 1.
        """
        std = jnp.where(std > 0, std, 1.0)
        normaliser = jnp.log(std) + 0.5 * math.log(2 * math.pi)
        return -_mean_square(x_next, mean) / (2 * std**2) - normaliser


@dataclasses.dataclass(frozen=True)
class FlowSde(ReverseSde):
    """Flow-GRPO's SDE (arXiv 2505.05470): diffusion g = a sqrt(sigma / (1 - sigma)).

    At sigma = 1, the first step, 1 - sigma_max replaces 1 - sigma, as in its public code. This applies to UniPC's first
    sigma, too, at which g would be 700 for a = 0.7.

    GenRL's code takes the same steps, but compares sigma with exactly 1, which no schedule of UniPC contains. With the
    version of diffusers that it pins (0.33.1), the first of its 20 sigmas is 0.99967 and the std of that step 5.03. On
    this project's schedule it is 0.70.
    """

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """Returns g, the std of the step without its factor sqrt(-dt)."""
        sigma, sigma_max = _float32(sigma, sigma_max)
        bounded = jnp.where(sigma >= NEARLY_ONE, sigma_max, sigma)
        return self.noise_level * _sqrt(sigma / (1 - bounded))


@dataclasses.dataclass(frozen=True)
class CappedFlowSde(FlowSde):
    """Flow-GRPO's SDE with diffusion min(g, 0.45 / sqrt(-dt)): no step's std exceeds 0.45.

    This is the truncated noise schedule of LongCat-Video (arXiv 2510.22200) as in GenRL (its
    `diffusion_clip`, and the value of its configs). It bounds the steps near sigma = 1, where g grows
    without bound. The mean also uses the capped g, so that the marginals stay the ODE's.
    """

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """Returns g, the std of the step without its factor sqrt(-dt)."""
        sigma, sigma_next = _float32(sigma, sigma_next)
        moves = sigma > sigma_next
        cap = MAX_STD / _sqrt(jnp.where(moves, sigma - sigma_next, 1.0))
        g = super().diffusion(sigma, sigma_next, sigma_max)
        return jnp.where(moves, jnp.minimum(g, cap), g)


@dataclasses.dataclass(frozen=True)
class LinearSde(ReverseSde):
    """SDE of Flow-GRPO's code for Wan: diffusion g = a sigma_max sigma, for any a; the source has a = 1.

    There (zhtmike/flow_grpo has a copy; Flash-GRPO, arXiv 2605.15980, has the same) g is
    sigma_min + (sigma_max - sigma_min) sigma, and sigma_min, the last sigma, is 0. It is finite at sigma = 1.
    """

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """Returns g, the std of the step without its factor sqrt(-dt)."""
        sigma, sigma_max = _float32(sigma, sigma_max)
        return self.noise_level * sigma_max * sigma


@dataclasses.dataclass(frozen=True)
class DanceSde(ReverseSde):
    """DanceGRPO's SDE (arXiv 2505.07818): a constant diffusion g = a."""

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """Returns g, the std of the step without its factor sqrt(-dt)."""
        return jnp.full_like(jnp.asarray(sigma, jnp.float32), self.noise_level)


@dataclasses.dataclass(frozen=True)
class Cps:
    """Coefficients-preserving sampling (arXiv 2509.05952): part of the predicted noise is resampled.

    The share of fresh noise, sin(a pi/2), is the same in every step and does not shrink with the
    step. The last step, sigma_next = 0, is deterministic and cannot be trained.
    """

    noise_level: float

    def __post_init__(self):
        _check_positive(self)
        if self.noise_level > 1:
            raise ValueError(f"noise_level of cps is {self.noise_level}; it must be at most 1")

    def diffusion(
        self, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> Float32[Array, "*sigma"]:
        """Returns the std of the step, which has no factor sqrt(-dt)."""
        sigma_next = jnp.asarray(sigma_next, jnp.float32)
        return sigma_next * math.sin(self.noise_level * math.pi / 2)

    def mean_std(
        self, x: Sample, v: Sample, sigma: Sigma, sigma_next: Sigma, sigma_max: Sigma
    ) -> tuple[Mean, Std]:
        """Returns mean `[b ...]` and std (shaped like sigma) of x_next."""
        std = self.diffusion(sigma, sigma_next, sigma_max)
        x, v, sigma, sigma_next = _float32(x, v, sigma, sigma_next)
        x0 = x - _columns(sigma, x) * v
        eps = x + _columns(1 - sigma, x) * v
        # sqrt(sigma_next^2 - std^2), without a square root, whose slope is infinite at 0
        kept = sigma_next * math.cos(self.noise_level * math.pi / 2)
        return _columns(1 - sigma_next, x) * x0 + _columns(kept, x) * eps, std

    def log_prob(self, x_next: Sample, mean: Mean, std: Std) -> Float32[Array, "b"]:
        """Returns -(x_next - mean)^2 averaged over all axes but the first, without 1/(2 std^2) and normalizer."""
        return -_mean_square(x_next, mean)


ReverseStep = Ode | FlowSde | LinearSde | DanceSde | Cps
KINDS = {
    "ode": Ode,
    "flow": FlowSde,
    "dance": DanceSde,
    "cps": Cps,
    "flow_capped": CappedFlowSde,
    "linear": LinearSde,
    "dpm2": Dpm2,
    "unipc": UniPc,
}


def make_step(kind: str, noise_level: int | float) -> ReverseStep:
    """Creates the step of a config, e.g. `make_step("cps", 0.8)`; ode, dpm2 and unipc take noise level 0.

    Raises:
      ValueError: the noise level is invalid for the kind.
    """
    if not issubclass(KINDS[kind], Ode):
        return KINDS[kind](float(noise_level))
    if noise_level != 0:
        raise ValueError(
            f"noise_level of {kind} is {noise_level}; set it to 0 or choose an sde kind"
        )
    return KINDS[kind]()


def _check_positive(step: ReverseSde | Cps) -> None:
    if not 0 < step.noise_level < math.inf:
        raise ValueError(
            f"noise_level of {type(step).__name__} is {step.noise_level}; it must be positive, "
            "or choose the step kind ode"
        )


def _float32(*arrays: ArrayLike) -> list[Array]:
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def _columns(a: Array, x: Array) -> Array:
    """Reshapes a scalar or `[b]` to broadcast against x `[b ...]`."""
    return a.reshape(a.shape + (1,) * (x.ndim - 1)) if a.ndim else a


def _log_snr(sigma: Array) -> Array:
    """Returns log((1 - sigma) / sigma), which is infinite at both ends of the schedule."""
    return jnp.log1p(-sigma) - jnp.log(sigma)


def _sqrt(a: Array) -> Array:
    """Returns the square root, with value and gradient 0 where a is 0."""
    positive = a > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, a, 1.0)), 0.0)


def _mean_square(a: Array, b: Array) -> Float32[Array, "b"]:
    a, b = _float32(a, b)
    return jnp.mean((a - b) ** 2, axis=tuple(range(1, a.ndim)))
