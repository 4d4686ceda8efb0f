"""Preprocessing of queries and keys: RMS norms of heads (arXiv 2010.04245), and key weights.

Key weights and padding are encoded as extra channels of queries and keys, which every kernel supports.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

EPSILON = 1e-6  # of RMS norms
# Checkpoint name of the residuals that a kernel saves for its backward pass, for `jax.checkpoint` policies.
RESIDUALS = "attention"
# Added to the score of a padding key. Finite, because 0 times infinity is NaN.
MINUS_INFINITY = -1e30


class HeadNorms(NamedTuple):
    """Scales of the RMS norms, one per stream of tokens, shared by all its heads."""

    q: Sequence[Float[Array, "d"]]
    k: Sequence[Float[Array, "d"]]


def normed(x: Float[Array, "b n h d"], scale: Float[Array, "d"]) -> Float[Array, "b n h d"]:
    """Divides heads by their root mean square and scales them, in float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * (jax.lax.rsqrt(mean + EPSILON) * scale)).astype(x.dtype)


def parts(log_weights: Float[np.ndarray, "t"], dtype: DTypeLike) -> Float[np.ndarray, "p t"]:
    """Splits `log_weights` into numbers of a dtype that sum to them at float32 precision.

    A part has the 8 bits of bfloat16 or the 11 of float16, so three of them have float32's 24.
    """
    dtype = jnp.dtype(dtype)
    rest, found = np.asarray(log_weights, np.float32), []
    for _ in range(1 if dtype.itemsize >= 4 else 3):
        found.append(rest.astype(dtype).astype(np.float32))
        rest = rest - found[-1]
    return np.stack(found)


def unit(scale: float) -> float:
    """Returns the power of two for a query's extra channels such that `scale` times it is about 1."""
    return 2.0 ** -round(math.log2(scale))


def with_channels(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    terms: Float[Array, "p #b t"] | Float[np.ndarray, "p #b t"],
    unit: float = 1.0,
    width: int = 0,
) -> tuple[Float[Array, "b s h e"], Float[Array, "b t g e"]]:
    """Adds channels to queries and keys that increase their products by `unit` times the sum of a key's `terms`.

    Args:
      q: Queries.
      k: Keys.
      terms: Terms of each key, exact in the keys' dtype.
      unit: Value of the queries' channels, exact in the queries' dtype.
      width: Minimum number of channels of the results; unused ones are 0.
    """
    d, e = q.shape[-1], max(width, q.shape[-1] + len(terms))
    channels = np.arange(e)
    # By selection: XLA fuses it with the arrays' next use. A concatenation would be materialized first.
    q, k = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, e - d))) for a in (q, k))
    q = jnp.where((channels >= d) & (channels < d + len(terms)), jnp.asarray(unit, q.dtype), q)
    for i, term in enumerate(terms):
        k = jnp.where(channels == d + i, jnp.asarray(term)[:, :, None, None].astype(k.dtype), k)
    return q, k


def masked(
    terms: Float[np.ndarray, "p t"], lengths: Int[Array, "b"] | None, valid: int
) -> Float[Array, "p #b t"]:
    """Sets the terms of padding to MINUS_INFINITY: each row's keys from `lengths` on, and keys from `valid` on."""
    keys = np.arange(terms.shape[1])
    inside = (keys < valid)[None]
    if lengths is not None:
        inside = inside & (keys < lengths[:, None])
    first = jnp.arange(len(terms))[:, None, None] == 0
    return jnp.where(inside, terms[:, None], jnp.where(first, MINUS_INFINITY, 0.0))
