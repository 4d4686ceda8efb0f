"""Samples that do not count: padding and rejected samples have weight 0."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32


def blanked(
    trained: Bool[Array, "n"], *arrays: Float[Array, "n ..."]
) -> tuple[Float32[Array, "n ..."], ...]:
    """The arrays in float32, with zeros for samples that are not trained (weight 0).

    The gradient of a function of these stops at a blanked row. Call it before any computation with
    log-probabilities or means that have a gradient: if an overflow is merely left out of a sum, its
    gradient is NaN.
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
