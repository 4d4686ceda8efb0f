"""How far a policy is from a reference, per sample. The gradient goes to the policy alone.

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
    (`step.diffusion(...)`), and its published coefficients belong to that; its paper (arXiv
    2505.05470), and its code for video, by the step's whole std (`replay(...).std`), which is the KL
    proper, and which Flow-DPPO and GRPO-Guard take to the old policy. Where std = 0 (padding, which
    has no weight) the value is finite: that of 1.
    """
    std = jnp.where(std > 0, std, 1.0)
    return _mean_square(mean, reference_mean) / (2 * std**2)


def velocity_mse(
    velocity: Float[Array, "n ..."], target: Float[Array, "n ..."]
) -> Float32[Array, "n"]:
    """(v - target)^2, averaged over all axes but the first, with gradient to `velocity`.

    With eps - x0 for the target it is the loss of flow matching; with a reference's velocity, what
    DiffusionNFT's code and Flow-Factory's "v-based" penalty take: without a factor, so that all noise
    levels count alike. Flow-GRPO's KL proper is this times
    -dt/2 (1/g + g (1 - sigma) / (2 sigma))^2, g the diffusion of the step's SDE (arXiv 2505.05470).
    """
    return _mean_square(velocity, target)


def _mean_square(a: Float[Array, "n ..."], reference: Float[Array, "n ..."]) -> Float32[Array, "n"]:
    reference = jax.lax.stop_gradient(reference).astype(jnp.float32)
    return jnp.mean((a.astype(jnp.float32) - reference) ** 2, axis=tuple(range(1, a.ndim)))
