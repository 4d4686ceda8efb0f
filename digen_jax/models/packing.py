"""Latents as tokens of 2 x 2 of them, as FLUX's and Qwen-Image's pipelines pack them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

# Latents a token has along each side.
SIDE = 2


def pack(latents: Float[Array, "b h w c"]) -> Float[Array, "b n p"]:
    """Tokens row by row, each channel's four numbers side by side; raises ValueError if a side is odd."""
    batch, height, width, channels = latents.shape
    if height % SIDE or width % SIDE:
        raise ValueError(
            f"latents of {height} x {width} do not fit: both sides must be multiples of {SIDE}."
        )
    x = latents.reshape(batch, height // SIDE, SIDE, width // SIDE, SIDE, channels)
    x = jnp.einsum("bhpwqc->bhwcpq", x)
    return x.reshape(batch, height // SIDE * (width // SIDE), channels * SIDE * SIDE)


def unpack(tokens: Float[Array, "b n p"], height: int, width: int) -> Float[Array, "b h w c"]:
    """The inverse of `pack`, for latents of `height` x `width`."""
    x = tokens.reshape(len(tokens), height // SIDE, width // SIDE, -1, SIDE, SIDE)
    x = jnp.einsum("bhwcpq->bhpwqc", x)
    return x.reshape(len(tokens), height, width, -1)
