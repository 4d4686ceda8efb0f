"""cuDNN's flash attention on NVIDIA's GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from digen_jax.attention import key_weights


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
) -> Float[Array, "b s h d"]:
    """As `attend.attend`, by cuDNN, which takes no bias on keys alone: weights become further channels."""
    d = q.shape[-1]
    scale = d**-0.5
    if log_weights is not None:
        unit = key_weights.unit(scale)
        terms = key_weights.parts(log_weights / (scale * unit), k.dtype)[:, None]
        q, k = key_weights.with_channels(q, k, terms, unit, width=width(d, len(terms)))
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - d)))
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return out[..., :d]


def width(d: int, terms: int) -> int:
    """Channels of d channels and some terms: cuDNN takes multiples of 8."""
    return -(-(d + terms) // 8) * 8
