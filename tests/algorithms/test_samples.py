import jax
import jax.numpy as jnp
import numpy as np

from digen_jax.algorithms.losses import mask_rows, weighted_sum


def test_blanked_rows_are_zero_and_stop_the_gradient():
    weight = jnp.array([1.0, 0.0, 0.5, 0.0])
    a = jnp.array([1.0, jnp.nan, 2.0, 1e4])
    b = jnp.stack([a, 2 * a], 1)
    of_a, of_b = mask_rows(weight > 0, a, b)
    np.testing.assert_array_equal(of_a, [1, 0, 2, 0])
    np.testing.assert_array_equal(of_b, [[1, 2], [0, 0], [2, 4], [0, 0]])

    def total(a):
        (a,) = mask_rows(weight > 0, a)
        return weighted_sum(weight, jnp.exp(a) / jnp.array([1.0, 0.0, 1.0, jnp.nan]))

    np.testing.assert_allclose(jax.grad(total)(a), [np.e, 0, np.e**2 / 2, 0], rtol=1e-6)


def test_weighted_sum_leaves_out_what_has_no_weight():
    values = jnp.array([2.0, jnp.inf, 3.0, jnp.nan])
    assert float(weighted_sum(jnp.array([1.0, 0.0, 0.5, 0.0]), values)) == 3.5
