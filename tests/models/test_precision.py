"""The precision of a family's float32 products, read from the programs that it traces."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from digen_jax.attention.kernels import on_device
from digen_jax.checkpoints.lora import lora_layers
from digen_jax.families import load_family
from digen_jax.models.linear import Linear, exact_products, of_one_input
from digen_jax.models.sd3.family import TokenIds
from tests.pipelines import ROOT


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
