"""What the losses on the forward process share: velocity errors, and samples that are not trained."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32


def matching_error(
    v: Float[Array, "n *shape"], target: Float[Array, "n *shape"]
) -> Float32[Array, "n"]:
    """(v - target)^2, averaged over all axes but the first: the flow-matching loss of each sample.

    With a reference's velocity for target it is the KL between the two policies' paths, up to a
    factor that depends on sigma and on the noise of the process.
    """
    difference = v.astype(jnp.float32) - target.astype(jnp.float32)
    return jnp.mean(difference**2, axis=tuple(range(1, v.ndim)))


def only(trained: Bool[Array, "n"], array: Float[Array, "n *shape"]) -> Float32[Array, "n *shape"]:
    """The array in float32, with 0 for samples that are not trained.

    Inputs of a loss go through it, not only its result: the gradient of an inf or NaN is NaN even
    where what follows multiplies it by 0.
    """
    columns = trained.reshape(trained.shape + (1,) * (array.ndim - 1))
    return jnp.where(columns, array.astype(jnp.float32), 0.0)
