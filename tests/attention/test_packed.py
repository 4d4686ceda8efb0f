"""Our kernel in Pallas's interpreter, which needs no TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.attention import packed
from digen_jax.attention.attend import HeadNorms, normed
from tests.attention import oracle
from tests.attention.oracle import draw, error, gradients_of, weights

BOUND = {jnp.float32: 1e-5, jnp.bfloat16: 0.02}


def attend(q, k, v, **options):
    """Of one stream, or of two where there are enough tokens."""
    streams = [(a[:, :60], a[:, 60:]) if a.shape[1] > 60 else (a,) for a in (q, k, v)]
    return jnp.concatenate(packed.attend(*streams, **options, interpret=True), axis=1)


# (queries, keys, heads, width, lengths, weighted)
CASES = {
    "two heads in a tile": (100, 150, 4, 64, None, False),
    "a head in a tile, weights": (130, 128, 2, 128, None, True),
    "eight heads in a tile": (20, 30, 8, 16, [30, 3], True),
    "several blocks of queries": (140, 140, 2, 64, [140, 5], False),
}


@pytest.fixture
def blocks_of_128(request, monkeypatch):
    if "several blocks" in request.node.name:
        monkeypatch.setattr(packed, "LARGEST_BLOCK", 128)


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in CASES), ("eight heads in a tile", jnp.bfloat16)],
)
def test_the_kernel_and_its_gradients_are_attention_written_out(name, dtype):
    s, t, heads, width, lengths, weighted = CASES[name]
    q, k, v, direction = draw(2, s, t, heads, heads, width, dtype)
    log_weights = weights(t) if weighted else None
    rows = None if lengths is None else jnp.array(lengths)
    found = gradients_of(functools.partial(attend, lengths=rows, log_weights=log_weights))
    with jax.default_matmul_precision("default"):  # the kernel's precision is its own
        out, *gradients = jax.jit(found)(q, k, v, direction)
    assert out.dtype == dtype
    assert error(out, oracle.attention(q, k, v, lengths, log_weights)) < BOUND[dtype]
    expected = oracle.gradients(q, k, v, direction, lengths, log_weights)
    errors = [error(*pair) for pair in zip(gradients, expected, strict=True)]
    assert max(errors) < BOUND[dtype], errors


# (queries, keys, heads, width)
NORMED = {"a head in a tile": (130, 128, 2, 128), "several blocks of queries": (200, 70, 2, 64)}


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in NORMED), ("a head in a tile", jnp.bfloat16)],
)
def test_the_kernel_norms_the_heads_of_each_stream(name, dtype):
    s, t, heads, width = NORMED[name]
    q, k, v, direction = draw(2, s, t, heads, heads, width, dtype)
    q, k = 3 * q, 0.5 * k
    rng = np.random.default_rng(1)
    scales = [jnp.asarray(1 + rng.normal(size=(2, width)), jnp.float32) for _ in range(2)]

    def found(q, k, v, *scales):
        streams = [(a[:, :60], a[:, 60:]) for a in (q, k, v)]
        out = packed.attend(*streams, norms=HeadNorms(*map(list, scales)), interpret=True)
        return jnp.concatenate(out, axis=1)

    def norm(a, scales):
        return jnp.concatenate([normed(a[:, :60], scales[0]), normed(a[:, 60:], scales[1])], axis=1)

    def with_gradients(direction, *arguments):
        out, pullback = jax.vjp(found, *arguments)
        return out, *pullback(direction)

    with jax.default_matmul_precision("default"):  # the kernel's precision is its own
        out, of_q, of_k, of_v, *of_scales = jax.jit(with_gradients)(direction, q, k, v, *scales)
    (normed_q, back_q), (normed_k, back_k) = (
        jax.vjp(jax.jit(norm), a, scale) for a, scale in zip((q, k), scales, strict=True)
    )
    assert error(out, oracle.attention(normed_q, normed_k, v)) < BOUND[dtype]
    expected_q, expected_k, expected_v = oracle.gradients(normed_q, normed_k, v, direction)
    expected_q, of_scales_q = back_q(jnp.asarray(expected_q, dtype))
    expected_k, of_scales_k = back_k(jnp.asarray(expected_k, dtype))
    expected = (expected_q, expected_k, expected_v, of_scales_q, of_scales_k)
    errors = [error(*pair) for pair in zip((of_q, of_k, of_v, *of_scales), expected, strict=True)]
    assert max(errors) < BOUND[dtype], errors


def test_a_heavy_key_counts_as_that_many_in_bfloat16():
    """256 equal keys, and one of weight 256, whose logarithm bfloat16 cannot hold."""
    q, k, v, _ = draw(1, 40, 300, 2, 2, 64, jnp.bfloat16)
    copies = [jnp.concatenate([a[:, :44], jnp.repeat(a[:, 44:45], 256, 1)], 1) for a in (k, v)]
    log_weights = np.log(np.r_[np.ones(44), 256.0])
    found = attend(q, k[:, :45], v[:, :45], log_weights=log_weights)
    assert error(found, oracle.attention(q, *copies)) < BOUND[jnp.bfloat16]


def test_blocks_fit_fast_memory():
    """The compiler confirms it for the largest ones: test_tpu."""
    blocks = [packed.block(s, s, 2) for s in (128, 1024, 1152, 1408, 4608)]
    assert blocks == [128, 512, 384, 128, 256]
    assert packed.fits(4608, 2) and not packed.fits(40_000, 2)
