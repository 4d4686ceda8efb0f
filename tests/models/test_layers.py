"""Layers in the form that they have on TPUs, against the form that they have elsewhere."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.attention.surroundings import on_device
from digen_jax.models import layers

TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5")


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("device", [None, TPU])
def test_a_norm_of_heads_is_an_rms_norm_over_the_last_axis(dtype, device):
    x, scale = 3 * draw(2, 5, 4, 8), {"params": {"scale": draw(8)}}
    x, direction = x.astype(dtype), draw(2, 5, 4, 8).astype(dtype)

    def found(norm):
        out, pullback = jax.vjp(norm.apply, scale, x)
        return out, *jax.tree.leaves(pullback(direction))

    expected = found(nn.RMSNorm(layers.EPSILON, dtype=dtype))
    with jax.default_matmul_precision("highest"), on_device(device):
        own = jax.jit(lambda: found(layers.HeadNorm(dtype)))()
    bound = 1e-6 if dtype == jnp.float32 else 2e-2
    for a, b in zip(own, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(c, np.float64) for c in (a, b))
        assert np.abs(a - b).max() < bound * np.abs(b).max()
