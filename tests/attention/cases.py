"""What the tests of attention share: arguments, gradients and errors."""

import jax
import jax.numpy as jnp
import numpy as np


def draw(b, s, t, heads, groups, width, dtype=jnp.float32):
    """Queries, keys, values and a direction."""
    rng = np.random.default_rng(0)
    shapes = (
        (b, s, heads, width),
        (b, t, groups, width),
        (b, t, groups, width),
        (b, s, heads, width),
    )
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def weights(t):
    """Logarithms of weights, of which the third is a large one."""
    return np.log(np.where(np.arange(t) == 2, 256.0, 1.0 + np.arange(t) % 2))


def gradients_of(attention):
    """(attention, its gradients by q, k and v in a direction) as a function."""

    def found(q, k, v, direction):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, *pullback(direction)

    return found


def error(found, expected):
    """The largest difference in parts of the largest number."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()
