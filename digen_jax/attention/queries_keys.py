"""What happens to queries and keys before they attend: RMS norms of heads (arXiv 2010.04245), and keys' weights.

Weights of keys, and padding, are further channels of queries and keys: a way that every kernel takes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

EPSILON = 1e-6  # of the norms
# The name of what a kernel keeps for its backward pass, for a policy of `jax.checkpoint`.
RESIDUALS = "attention"
# Added to the score of a key that is padding. Finite, as 0 times infinity is not a number.
MINUS_INFINITY = -1e30


class HeadNorms(NamedTuple):
    """The scales of the norms, one for each stream of tokens, the same for all heads of it."""

    q: Sequence[Float[Array, "d"]]
    k: Sequence[Float[Array, "d"]]


def normed(x: Float[Array, "b n h d"], scale: Float[Array, "d"]) -> Float[Array, "b n h d"]:
    """The heads divided by their root mean square and scaled, in float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * (jax.lax.rsqrt(mean + EPSILON) * scale)).astype(x.dtype)


def parts(log_weights: Float[np.ndarray, "t"], dtype: DTypeLike) -> Float[np.ndarray, "p t"]:
    """Numbers of a dtype whose sum is `log_weights` to float32's precision.

    A part has the 8 bits of bfloat16 or the 11 of float16, so three of them have float32's 24.
    """
    dtype = jnp.dtype(dtype)
    rest, found = np.asarray(log_weights, np.float32), []
    for _ in range(1 if dtype.itemsize >= 4 else 3):
        found.append(rest.astype(dtype).astype(np.float32))
        rest = rest - found[-1]
    return np.stack(found)


def unit(scale: float) -> float:
    """The power of two for a query's further channels such that `scale` times it is about 1."""
    return 2.0 ** -round(math.log2(scale))


def with_channels(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    terms: Float[Array, "p #b t"] | Float[np.ndarray, "p #b t"],
    unit: float = 1.0,
    width: int = 0,
) -> tuple[Float[Array, "b s h e"], Float[Array, "b t g e"]]:
    """Queries and keys whose products are higher by `unit` times the sum of a key's `terms`.

    Args:
      q: queries.
      k: keys.
      terms: of each key, which have to be exact in the keys' dtype.
      unit: exact in the queries' dtype.
      width: the least number of channels of the results; further ones are 0.
    """
    d, e = q.shape[-1], max(width, q.shape[-1] + len(terms))
    channels = np.arange(e)
    # By selection: XLA fuses it with the arrays' next use, where a concatenation would be written out first.
    q, k = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, e - d))) for a in (q, k))
    q = jnp.where((channels >= d) & (channels < d + len(terms)), jnp.asarray(unit, q.dtype), q)
    for i, term in enumerate(terms):
        k = jnp.where(channels == d + i, jnp.asarray(term)[:, :, None, None].astype(k.dtype), k)
    return q, k


def masked(
    terms: Float[np.ndarray, "p t"], lengths: Int[Array, "b"] | None, valid: int
) -> Float[Array, "p #b t"]:
    """Terms of which those of padding are MINUS_INFINITY: of each row's keys from `lengths` on, and from `valid` on."""
    keys = np.arange(terms.shape[1])
    inside = (keys < valid)[None]
    if lengths is not None:
        inside = inside & (keys < lengths[:, None])
    first = jnp.arange(len(terms))[:, None, None] == 0
    return jnp.where(inside, terms[:, None], jnp.where(first, MINUS_INFINITY, 0.0))
