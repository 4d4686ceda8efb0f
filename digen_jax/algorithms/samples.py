"""Samples that do not count: padding, and what a correction rejects, has weight 0."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32


def blanked(
    trained: Bool[Array, "n"], *arrays: Float[Array, "n ..."]
) -> tuple[Float32[Array, "n ..."], ...]:
    """The arrays in float32, with zeros for samples that are not trained (weight 0).

    Whatever a function of these does with a blanked row, its gradient stops here. To be called
    before anything is computed from log-probabilities or means that carry a gradient: of an overflow
    that is only left out of a sum, the gradient is NaN.
    """
    return tuple(
        jnp.where(
            trained.reshape(trained.shape + (1,) * (array.ndim - 1)),
            array.astype(jnp.float32),
            0.0,
        )
        for array in arrays
    )


def weighted_sum(weight: Float[Array, "n"], values: Float[Array, "n"]) -> Float[Array, ""]:
    """Sum of weight * value, in which a value of weight 0 may be anything, inf and NaN included."""
    return jnp.sum(weight * jnp.where(weight > 0, values, 0.0))
