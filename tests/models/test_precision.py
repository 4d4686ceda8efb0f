"""The precision of a family's float32 products, read from the programs that it traces."""

import functools

import jax
import jax.numpy as jnp
import pytest

from digen_jax.families import load_family
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


def test_what_the_user_has_chosen_stands():
    with jax.default_matmul_precision("highest"):
        found = set(products(traced("decode").jaxpr))
    assert found == {(jax.lax.Precision.HIGHEST,) * 2}
