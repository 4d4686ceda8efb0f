"""Linear layers and patches as products, against float64 numpy and a convolution; the precision of a family."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.attention.kernels import on_device
from digen_jax.checkpoints.lora import lora_layers
from digen_jax.families import load_family
from digen_jax.models.linear import Linear, dot_general, exact_products, of_one_input, patch_product
from digen_jax.models.sd3.family import TokenIds
from tests.pipelines import ROOT

FORM = (((2,), (0,)), ((), ()))
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5")


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
    expected = (x @ kernel, cotangent @ kernel.T, np.einsum("bni,bno->io", x, cotangent))
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


class Three(nn.Module):
    """Linear layers of one input."""

    @nn.compact
    def __call__(self, x):
        return of_one_input([Linear(width, name=f"to_{width}") for width in (6, 4, 5)], x)


@pytest.mark.parametrize("device", [None, TPU])
@pytest.mark.parametrize("adapted", [(), (6, 5), (6, 4, 5)])
def test_layers_of_one_input_are_those_layers_with_their_low_rank_terms(device, adapted):
    """With factors of other ranks than their neighbours'; without them for some layers, or for all."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 7))
    params = {
        f"to_{o}": {"kernel": rng.normal(size=(7, o)), "bias": rng.normal(size=o)}
        for o in (6, 4, 5)
    }
    lora = {
        f"to_{o}": {"a": rng.normal(size=(7, o // 2)), "b": rng.normal(size=(o // 2, o))}
        for o in adapted
    }
    directions = [rng.normal(size=(2, 3, o)) for o in (6, 4, 5)]
    single = jax.tree.map(jnp.float32, (params, lora, x, directions))

    def found(params, lora, x, directions):
        def out(lora, x):
            return Three().apply({"params": params, "lora": lora}, x)

        with jax.default_matmul_precision("highest"), on_device(device), lora_layers(0.5):
            results, pullback = jax.vjp(out, lora, x)
            return results, *pullback(directions)

    results, of_lora, of_x = jax.jit(found)(*single)
    expected_x = np.zeros_like(x)
    for o, result, direction in zip((6, 4, 5), results, directions, strict=True):
        kernel = params[f"to_{o}"]["kernel"]
        if o in adapted:
            a, b = lora[f"to_{o}"]["a"], lora[f"to_{o}"]["b"]
            kernel = kernel + 0.5 * a @ b
            of_a = 0.5 * np.einsum("bni,bno,ro->ir", x, direction, b)
            of_b = 0.5 * np.einsum("bni,ir,bno->ro", x, a, direction)
            np.testing.assert_allclose(of_lora[f"to_{o}"]["a"], of_a, atol=1e-4)
            np.testing.assert_allclose(of_lora[f"to_{o}"]["b"], of_b, atol=1e-4)
        np.testing.assert_allclose(result, x @ kernel + params[f"to_{o}"]["bias"], atol=1e-4)
        expected_x += direction @ kernel.T
    np.testing.assert_allclose(of_x, expected_x, atol=1e-4)


# ----------------------------------------------------------------------------------------- precision


@functools.cache
def family():
    return load_family(ROOT / "assets" / "shapes-sd3")


def products(jaxpr):
    """The precision of every product and convolution in a program, those in its inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield equation.params["precision"]
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from products(inner)


def traced(part):
    shapes = family().shapes()
    ids = jax.ShapeDtypeStruct((1, 12), jnp.int32)
    latents = jax.ShapeDtypeStruct((1, 8, 8, 8), jnp.float32)
    sigma = jax.ShapeDtypeStruct((1,), jnp.float32)
    if part == "encode":
        return jax.make_jaxpr(lambda p, i: family().encode(p, TokenIds(i, i)))(shapes, ids)
    if part == "decode":
        return jax.make_jaxpr(family().decode)(shapes, latents)
    conditioning = jax.eval_shape(lambda p, i: family().encode(p, TokenIds(i, i)), shapes, ids)

    def loss(transformer, x, sigma, conditioning):
        return (
            family()
            .velocity({"transformer": {"params": transformer}}, x, sigma, conditioning)
            .sum()
        )

    return jax.make_jaxpr(jax.grad(loss))(shapes["transformer"], latents, sigma, conditioning)


@pytest.mark.parametrize("part", ["encode", "decode", "gradient"])
def test_float32_is_multiplied_by_more_than_one_pass_of_bfloat16(part):
    found = list(products(traced(part).jaxpr))
    assert len(found) > 3
    assert set(found) == {(jax.lax.Precision.HIGH,) * 2}


def test_the_gradient_of_a_lora_on_a_tpu_is_multiplied_so_too():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return of_one_input([Linear(width, name=f"to_{width}") for width in (6, 4)], x)

    params = {f"to_{o}": {"kernel": jnp.ones((7, o)), "bias": jnp.ones(o)} for o in (6, 4)}
    lora = {f"to_{o}": {"a": jnp.ones((7, 2)), "b": jnp.ones((2, o))} for o in (6, 4)}

    def loss(lora, x):
        @exact_products
        def out():
            return Layers().apply({"params": params, "lora": lora}, x)

        with on_device(types.SimpleNamespace(platform="tpu")), lora_layers(0.5):
            return sum(map(jnp.sum, out()))

    found = list(products(jax.make_jaxpr(jax.grad(loss, (0, 1)))(lora, jnp.ones((2, 3, 7))).jaxpr))
    assert len(found) > 6
    assert set(found) == {(jax.lax.Precision.HIGH,) * 2}


def test_what_the_user_has_chosen_stands():
    with jax.default_matmul_precision("highest"):
        found = set(products(traced("decode").jaxpr))
    assert found == {(jax.lax.Precision.HIGHEST,) * 2}
