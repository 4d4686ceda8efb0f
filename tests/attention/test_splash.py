"""Splash attention in Pallas's interpreter, which needs no TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

from digen_jax.attention import flash
from digen_jax.attention.attend import on_each_device
from digen_jax.attention.kernels import Target
from digen_jax.parallel.mesh import make_mesh
from tests.attention import oracle
from tests.attention.oracle import draw, error, gradients_of, weights

BOUND = {jnp.float32: 1e-5, jnp.bfloat16: 0.01}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    make = splash_attention.make_splash_mha_single_device
    monkeypatch.setattr(
        splash_attention, "make_splash_mha_single_device", functools.partial(make, interpret=True)
    )


# (queries, keys, heads, groups, width, lengths, weighted)
CASES = {
    "whole blocks": (128, 256, 1, 1, 128, None, False),
    "channels mask": (100, 150, 2, 2, 64, [150, 3], False),
    "weights": (100, 150, 2, 2, 64, None, True),
    "weights and lengths": (200, 150, 4, 2, 16, [150, 77], True),
    "segments mask": (130, 140, 2, 1, 128, [140, 5], False),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in CASES), ("weights and lengths", jnp.bfloat16)],
)
def test_splash_and_its_gradients_are_attention_written_out(name, dtype):
    s, t, heads, groups, width, lengths, weighted = CASES[name]
    q, k, v, direction = draw(2, s, t, heads, groups, width, dtype)
    log_weights = weights(t) if weighted else None
    rows = None if lengths is None else jnp.array(lengths)
    found = gradients_of(functools.partial(flash.splash, lengths=rows, log_weights=log_weights))
    # The precision of products is the kernel's own, forward and backward.
    out, *gradients = jax.jit(found)(q, k, v, direction)
    assert out.dtype == dtype
    assert error(out, oracle.attention(q, k, v, lengths, log_weights)) < BOUND[dtype]
    expected = oracle.gradients(q, k, v, direction, lengths, log_weights)
    assert all(error(*pair) < BOUND[dtype] for pair in zip(gradients, expected, strict=True))


def test_several_blocks_of_keys_and_queries(monkeypatch):
    monkeypatch.setitem(flash.LARGEST_BLOCK, 4, 128)
    q, k, v, direction = draw(1, 300, 400, 2, 1, 16)
    lengths = jnp.array([200])  # the last blocks have no key that counts
    found = gradients_of(functools.partial(flash.splash, lengths=lengths))
    out, *gradients = jax.jit(found)(q, k, v, direction)
    assert error(out, oracle.attention(q, k, v, [200])) < 1e-5
    expected = oracle.gradients(q, k, v, direction, [200])
    assert all(error(*pair) < 1e-5 for pair in zip(gradients, expected, strict=True))


def test_inside_remat_scan_and_shard_map():
    """As in a network: blocks are scanned and recomputed, on a mesh that splits rows and heads."""
    mesh = make_mesh(jax.devices()[:4], data=2, tensor=2)
    target = Target(None, "auto", mesh, ("data", "fsdp"))
    q, *_, direction = draw(2, 40, 40, 2, 2, 16)

    def by(attention):
        def block(x, _):
            return attention(x, x, x), None

        return lambda x: jax.lax.scan(jax.checkpoint(block), x, None, length=2)[0]

    def split(q, k, v):
        def whole(q, k, v, lengths, norms):
            return (flash.splash(q[0], k[0], v[0], lengths),)

        return on_each_device(target, whole, (q,), (k,), (v,), None)[0]

    def gradient(attention):
        return jax.jit(jax.grad(lambda x: jnp.sum(by(attention)(x) * direction)))(q)

    with jax.default_matmul_precision("highest"):
        expected = gradient(jax.nn.dot_product_attention)
    assert error(gradient(split), np.asarray(expected)) < 1e-5
