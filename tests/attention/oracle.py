"""Plain attention in float64, written out, with arguments and errors for the tests of kernels."""

import jax
import jax.numpy as jnp
import numpy as np


def attention(q, k, v, lengths=None, log_weights=None, causal=False):
    """softmax(q k / sqrt(d) + log_weights) v for [b s h d] and [b t g d], query by query."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    shared = q.shape[2] // k.shape[2]
    out = np.zeros(q.shape)
    for row, query, head in np.ndindex(*q.shape[:3]):
        count = k.shape[1] if lengths is None else lengths[row]
        if causal:
            count = min(count, query + 1)
        scores = k[row, :count, head // shared] @ q[row, query, head] / np.sqrt(q.shape[3])
        if log_weights is not None:
            scores = scores + log_weights[:count]
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ v[row, :count, head // shared] / weights.sum()
    return out


def gradients(q, k, v, direction, lengths=None, log_weights=None):
    """Those of the sum of attention times `direction`, by the softmax's Jacobian."""
    q, k, v, direction = (np.asarray(a, np.float64) for a in (q, k, v, direction))
    shared, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        count, group = k.shape[1] if lengths is None else lengths[row], head // shared
        keys, values = k[row, :count, group], v[row, :count, group]
        scores = scale * q[row, :, head] @ keys.T
        if log_weights is not None:
            scores = scores + log_weights[:count]
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        d = direction[row, :, head]
        dp = d @ values.T
        ds = scale * p * (dp - (p * dp).sum(1, keepdims=True))
        dq[row, :, head] = ds @ keys
        dk[row, :count, group] += ds.T @ q[row, :, head]
        dv[row, :count, group] += p.T @ d
    return dq, dk, dv


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
