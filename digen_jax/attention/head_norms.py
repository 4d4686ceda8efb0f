"""RMS norms of the heads of queries and keys (arXiv 2010.04245), before they attend."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6


class HeadNorms(NamedTuple):
    """The scales of the norms, one for each stream of tokens, the same for all heads of it."""

    q: Sequence[Float[Array, "d"]]
    k: Sequence[Float[Array, "d"]]


def normed(x: Float[Array, "b n h d"], scale: Float[Array, "d"]) -> Float[Array, "b n h d"]:
    """The heads divided by their root mean square and scaled, in float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * (jax.lax.rsqrt(mean + EPSILON) * scale)).astype(x.dtype)
