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
    """As `attend.attend`, by cuDNN, which takes no bias on keys alone: weights become further channels.

    JAX's gradient of it takes even numbers of tokens only (0.10.2 and 0.12.0.1). An odd number of keys is padded by
    one that `lengths` excludes, an odd number of queries by one of zeros: its result is dropped, so that its gradient,
    and what it adds to those of keys and values, is zero.
    """
    (b, s, _, d), t = q.shape, k.shape[1]
    scale = d**-0.5
    if t % 2 and lengths is None:
        lengths = jnp.full(b, t, jnp.int32)
    q, k, v = (jnp.pad(a, ((0, 0), (0, a.shape[1] % 2), (0, 0), (0, 0))) for a in (q, k, v))
    if log_weights is not None:
        unit = key_weights.unit(scale)
        log_weights = np.pad(log_weights, (0, t % 2))
        terms = key_weights.parts(log_weights / (scale * unit), k.dtype)[:, None]
        q, k = key_weights.with_channels(q, k, terms, unit, width=width(d, len(terms)))
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - d)))
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return out[:, :s, :, :d]


def width(d: int, terms: int) -> int:
    """Channels of d channels and some terms: cuDNN takes multiples of 8."""
    return -(-(d + terms) // 8) * 8
