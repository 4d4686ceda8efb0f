"""Linear layers and patches as products, on a CPU and without surroundings, against float64 numpy and a convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.attention.surroundings import on_device
from digen_jax.models.linear import Linear, dot_general, patch_product

FORM = (((2,), (0,)), ((), ()))


@pytest.mark.parametrize("shape", [(3, 5, 4, 9), (3, 5, 9, 4), (2, 1, 6, 6)])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_product_and_gradients_are_those_of_numpy(shape, on_cpu):
    b, n, i, o = shape
    rng = np.random.default_rng(0)
    x, kernel, cotangent = (rng.normal(size=s) for s in ((b, n, i), (i, o), (b, n, o)))
    inputs = jnp.float32(x), jnp.float32(kernel)

    def both(x, kernel, cotangent):
        y, pullback = jax.vjp(lambda x, kernel: dot_general(x, kernel, FORM), x, kernel)
        return y, *pullback(cotangent)

    if on_cpu:
        with on_device(jax.devices()[0]):
            found = jax.jit(both)(*inputs, jnp.float32(cotangent))
    else:
        found = jax.jit(both)(*inputs, jnp.float32(cotangent))
    expected = (
        x @ kernel,
        cotangent @ kernel.T,
        np.einsum("bni,bno->io", x, cotangent),
    )
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


@pytest.mark.parametrize(("i", "o"), [(8, 32), (32, 8)])
def test_a_kernels_gradient_needs_no_transposed_copy_of_the_tokens(i, o):
    dense = Linear(o)
    x = jnp.ones((3, 5, i))
    params = dense.init(jax.random.key(0), x)

    def gradient(params, x):
        with on_device(jax.devices()[0]):
            return jax.grad(lambda p: jnp.sum(jnp.sin(dense.apply(p, x))))(params)

    text = jax.jit(gradient).lower(params, x).compile().as_text()
    lines = [line for line in text.splitlines() if "f32[15,8]" in line or "f32[15,32]" in line]
    assert lines
    copied = [f"f32[{width},15]{{1,0}}" for width in (i, o)]
    assert not any(shape in text for shape in copied)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_patches_are_a_convolution(on_cpu):
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=s).astype(np.float32) for s in ((2, 6, 8, 3), (2, 4, 3, 5)))

    def loss(convolve, x, kernel):
        y = convolve(x, kernel, (2, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jnp.sin(y)), y

    def all_of(convolve):
        return jax.value_and_grad(lambda *a: loss(convolve, *a), (0, 1), has_aux=True)(x, kernel)

    if on_cpu:
        with on_device(jax.devices()[0]):
            found = all_of(patch_product)
    else:
        found = all_of(patch_product)
    expected = all_of(jax.lax.conv_general_dilated)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)
