import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.attention.attend import EPSILON, normed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_are_normed_over_the_last_axis(dtype):
    rng = np.random.default_rng(0)
    x, direction = (jnp.asarray(3 * rng.normal(size=(2, 5, 4, 8)), dtype) for _ in range(2))
    scale = jnp.asarray(rng.normal(size=8), jnp.float32)

    def found(norm):
        out, pullback = jax.vjp(norm, x, scale)
        return out, *pullback(direction)

    module = nn.RMSNorm(EPSILON, dtype=dtype)
    expected = found(lambda x, scale: module.apply({"params": {"scale": scale}}, x))
    bound = 1e-6 if dtype == jnp.float32 else 2e-2
    for a, b in zip(found(normed), expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(c, np.float64) for c in (a, b))
        assert np.abs(a - b).max() < bound * np.abs(b).max()
