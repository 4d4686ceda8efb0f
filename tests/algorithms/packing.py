"""Common properties of all losses: sums do not depend on packing, and rows without weight have no effect."""

import jax
import jax.numpy as jnp
import numpy as np

JUNK = np.array([np.nan, np.inf, -np.inf, 1e4, -1e4], np.float32)


def value_and_gradients(total, weight, arrays, differentiated):
    """Gradients of total(weight, *arrays), a sum, with respect to the first `count` arrays."""
    wrt = tuple(range(1, 1 + differentiated))
    value, gradients = jax.jit(jax.value_and_grad(total, argnums=wrt))(weight, *arrays)
    return float(value), [np.asarray(gradient) for gradient in gradients]


def check_junk(total, arrays, differentiated):
    """Rows of weight 0 change nothing, whatever they hold, and get no gradient."""
    rows = len(arrays[0])
    plain = value_and_gradients(total, jnp.ones(rows), arrays, differentiated)
    weight = jnp.concatenate([jnp.ones(rows), jnp.zeros(len(JUNK))])
    junked = [jnp.concatenate([array, junk_like(array)]) for array in arrays]
    value, gradients = value_and_gradients(total, weight, junked, differentiated)
    np.testing.assert_allclose(value, plain[0], rtol=1e-5)  # of a sum
    for gradient, expected in zip(gradients, plain[1], strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(gradient[:rows], expected, rtol=1e-6)
        np.testing.assert_array_equal(gradient[rows:], 0)


def junk_like(array):
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.zeros(len(JUNK), array.dtype)
    column = JUNK.reshape(-1, *[1] * (array.ndim - 1))
    return jnp.broadcast_to(jnp.asarray(column), (len(JUNK), *array.shape[1:]))


def check_split(total, arrays, differentiated):
    """The sums over two parts add up to the whole's, and every row's gradient is the same."""
    rows = len(arrays[0])
    value, gradients = value_and_gradients(total, jnp.ones(rows), arrays, differentiated)
    parts = [
        value_and_gradients(total, jnp.ones(len(part)), [a[part] for a in arrays], differentiated)
        for part in np.split(np.arange(rows), [rows // 3])
    ]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], value, rtol=1e-5)
    for whole, *pieces in zip(gradients, *(part[1] for part in parts), strict=True):
        np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=1e-6)


def close(ours, reference):
    """Within 1e-5 of the reference's largest element."""
    reference = np.asarray(reference)
    assert np.abs(np.asarray(ours) - reference).max() <= 1e-5 * np.abs(reference).max()
