import jax
import jax.numpy as jnp
import numpy as np

from digen_jax.algorithms.matching import matching_error, only


def test_matching_error_is_each_samples_own_mean():
    v, target = np.random.default_rng(0).normal(size=(2, 3, 4, 2)).astype(np.float32)
    error = matching_error(jnp.asarray(v), jnp.asarray(target))
    expected = [np.mean((np.float64(a) - b) ** 2) for a, b in zip(v, target, strict=True)]
    np.testing.assert_allclose(error, expected, rtol=1e-6)


def test_matching_error_is_float32_whatever_comes_in():
    v = jnp.array([[1.0, 2.0]], jnp.bfloat16)
    error = matching_error(v, jnp.array([[1.0078125, 2.0]], jnp.bfloat16))
    assert error.dtype == jnp.float32
    np.testing.assert_allclose(error, [0.0078125**2 / 2], rtol=1e-6)


def test_what_is_not_trained_is_zero_and_has_no_gradient():
    x = jnp.array([[1.0, -2.0], [jnp.nan, jnp.inf], [0.0, 3.0]])
    trained = jnp.array([True, False, True])
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(only(trained, x) ** 3))(x)
    assert float(value) == 1 - 8 + 27
    np.testing.assert_array_equal(gradient, [[3, 12], [0, 0], [0, 27]])
