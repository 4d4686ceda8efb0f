"""The distance of a policy from a reference, per sample. Only the policy gets a gradient.

Rows without weight must be blanked first (`samples.blanked`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def gaussian_kl(
    mean: Float[Array, "n ..."],
    reference_mean: Float[Array, "n ..."],
    std: Float[Array, "n"] | Float[Array, ""],
) -> Float[Array, "n"]:
    """KL between two Gaussians of equal std: (mean - reference_mean)^2 / (2 std^2).

    Averaged over all axes but the first, with gradient to `mean`. Implementations differ in `std`.
    Flow-GRPO's code for images divides by the diffusion without its factor sqrt(-dt)
    (`step.diffusion(...)`), and its published coefficients are for this; its paper (arXiv 2505.05470), and its
    code for video, by the step's whole std (`replay(...).std`), which gives the true KL; Flow-DPPO and
    GRPO-Guard use the true KL to the old policy. If std = 0 (padding, which has no weight), std 1 is used, so
    that the value is finite.
    """
    std = jnp.where(std > 0, std, 1.0)
    return _mean_square(mean, reference_mean) / (2 * std**2)


def velocity_mse(
    velocity: Float[Array, "n ..."], target: Float[Array, "n ..."]
) -> Float32[Array, "n"]:
    """(v - target)^2, averaged over all axes but the first, with gradient to `velocity`.

    With target eps - x0 it is the loss of flow matching; with a reference's velocity it is the penalty of
    DiffusionNFT's code and Flow-Factory's "v-based" one: without a factor, so that all noise levels have
    equal weights. Flow-GRPO's true KL is this times
    -dt/2 (1/g + g (1 - sigma) / (2 sigma))^2, g the diffusion of the step's SDE (arXiv 2505.05470).
    """
    return _mean_square(velocity, target)


def _mean_square(a: Float[Array, "n ..."], reference: Float[Array, "n ..."]) -> Float32[Array, "n"]:
    reference = jax.lax.stop_gradient(reference).astype(jnp.float32)
    return jnp.mean((a.astype(jnp.float32) - reference) ** 2, axis=tuple(range(1, a.ndim)))
