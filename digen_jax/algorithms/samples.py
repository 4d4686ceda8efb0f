"""Samples that do not count: padding, and what a correction rejects, has weight 0."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def blanked(
    weight: Float[Array, "n"], *arrays: Float[Array, "n ..."]
) -> tuple[Float[Array, "n ..."], ...]:
    """The arrays with zeros where the weight is 0.

    Whatever a function of these does with a blanked row, its gradient stops here. To be called
    before anything is computed from log-probabilities or means that carry a gradient: of an overflow
    that is only left out of a sum, the gradient is NaN.
    """
    counts = weight > 0
    return tuple(
        jnp.where(counts.reshape(counts.shape + (1,) * (array.ndim - 1)), array, 0.0)
        for array in arrays
    )


def weighted_sum(weight: Float[Array, "n"], values: Float[Array, "n"]) -> Float[Array, ""]:
    """Sum of weight * value, in which a value of weight 0 may be anything, inf and NaN included."""
    return jnp.sum(weight * jnp.where(weight > 0, values, 0.0))
