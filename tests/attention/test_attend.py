"""Attention by XLA, and what does not depend on the kernel: streams, weights of keys, parts of a mesh."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.attention import attend as attending
from digen_jax.attention import flash
from digen_jax.attention.attend import attend, attend_jointly, on_each_device, parts
from digen_jax.attention.kernels import Target, current, on_device, on_mesh
from digen_jax.parallel.mesh import make_mesh
from tests.attention import oracle
from tests.attention.oracle import draw, error, gradients_of, weights

EXACT = 1e-5


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    ("heads", "groups", "lengths", "weighted"),
    [(2, 2, None, False), (3, 1, None, True), (4, 2, [7, 3], True)],
)
def test_xla_and_its_gradients_are_attention_written_out(heads, groups, lengths, weighted):
    q, k, v, direction = draw(2, 5, 7, heads, groups, 8)
    log_weights = weights(7) if weighted else None
    rows = None if lengths is None else jnp.array(lengths)
    found = gradients_of(functools.partial(attend, lengths=rows, log_weights=log_weights))
    out, *gradients = jax.jit(found)(q, k, v, direction)
    assert error(out, oracle.attention(q, k, v, lengths, log_weights)) < EXACT
    expected = oracle.gradients(q, k, v, direction, lengths, log_weights)
    assert all(error(*pair) < EXACT for pair in zip(gradients, expected, strict=True))


def test_causal_attention_is_to_the_keys_so_far():
    q, k, v, _ = draw(2, 6, 6, 2, 2, 8)
    assert error(attend(q, k, v, causal=True), oracle.attention(q, k, v, causal=True)) < EXACT


@pytest.mark.parametrize(
    ("heads", "groups", "lengths", "weighted", "dtype", "causal"),
    [
        (4, 2, [29, 3], False, "bfloat16", False),
        (2, 1, [29, 5], True, "float32", True),
    ],
)
def test_blocks_of_queries_attend_as_all_at_once(
    monkeypatch, heads, groups, lengths, weighted, dtype, causal
):
    """With the same gradients, where blocks do not divide the queries, and where devices have some rows each."""
    arrays = draw(2, 27, 29, heads, groups, 8, dtype)
    rows = None if lengths is None else jnp.array(lengths)
    log_weights = weights(29) if weighted else None
    whole = functools.partial(attend, lengths=rows, log_weights=log_weights, causal=causal)
    mesh = make_mesh(jax.devices()[:2], data=2)
    by_row = NamedSharding(mesh, PartitionSpec("data"))

    def split(*arrays):
        with on_mesh(mesh, ("data",)):
            return whole(*arrays)

    expected = jax.jit(gradients_of(whole))(*arrays)
    monkeypatch.setattr(attending, "MOST_SCORES", 4 * heads * 8 * 29)  # 8 queries of a row
    jitted = jax.jit(gradients_of(split), in_shardings=by_row, out_shardings=by_row)
    compiled = jitted.lower(*arrays).compile()
    text = compiled.as_text()
    assert ",8,29]" in text and not re.search(r"(27|32),29\]|29,(27|32)\]", text)
    assert "all-" not in text
    found = compiled(*(jax.device_put(a, by_row) for a in arrays))
    for pair in zip(found, expected, strict=True):
        assert error(*pair) < (EXACT if dtype == "float32" else 2**-7)


def test_streams_attend_to_one_another_and_come_back_apart():
    q, k, v, _ = draw(2, 7, 7, 2, 2, 8)
    cut = functools.partial(np.split, indices_or_sections=[4], axis=1)
    streams = [[jnp.asarray(part) for part in cut(a)] for a in (q, k, v)]
    found = attend_jointly(*streams)
    assert [part.shape[1] for part in found] == [4, 3]
    whole = oracle.attention(q, k, v)
    assert error(jnp.concatenate(found, axis=1), whole) < EXACT
    (first,) = attend_jointly(streams[0][:1], *streams[1:])
    assert error(first, whole[:, :4]) < EXACT


def test_a_key_of_weight_n_counts_as_n_equal_ones():
    q, k, v, _ = draw(1, 5, 4, 2, 2, 8)
    repeated = np.repeat([0, 1, 2, 3], [1, 1, 1, 256])
    log_weights = np.log([1.0, 1.0, 1.0, 256.0])
    expected = oracle.attention(q, np.asarray(k)[:, repeated], np.asarray(v)[:, repeated])
    assert error(attend(q, k, v, log_weights=log_weights), expected) < EXACT


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_weights_are_exact_as_sums_of_a_dtypes_numbers(dtype):
    log_weights = np.log([1, 2, 7, 256, 333, 4096]).astype(np.float32)
    found = parts(log_weights, dtype)
    np.testing.assert_array_equal(found, found.astype(dtype).astype(np.float32))
    smallest = 2.0**-24 if dtype == jnp.float16 else 0  # its least number
    assert np.all(np.abs(found.sum(0, dtype=np.float64) - log_weights) <= smallest / 2)


@pytest.mark.parametrize(
    ("s", "t", "width", "dtype", "padded", "weighted"),
    [
        (5, 7, 8, "float32", False, False),
        (6, 7, 40, "float32", True, True),
        (5, 7, 64, "bfloat16", True, True),
    ],
)
def test_cudnn_gets_even_tokens_and_weights_as_channels(
    monkeypatch, s, t, width, dtype, padded, weighted
):
    """For any tokens, the results and gradients of attention without padding.

    cuDNN itself needs a GPU; XLA stands for it.
    """
    compute = jax.nn.dot_product_attention

    def by_xla(q, k, v, *, implementation, **options):
        assert implementation == "cudnn" and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        assert q.shape[1] % 2 == k.shape[1] % 2 == v.shape[1] % 2 == 0
        return compute(q, k, v, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v, direction = draw(2, s, t, 4, 2, width, dtype)
    lengths = [t, max(1, t - 2)] if padded else None
    rows = None if lengths is None else jnp.array(lengths)
    log_weights = weights(t) if weighted else None
    found = gradients_of(lambda *a: flash.cudnn(*a, rows, log_weights))
    found = jax.jit(found)(q, k, v, direction)
    assert all(a.dtype == q.dtype for a in found)
    expected = (
        oracle.attention(q, k, v, lengths, log_weights),
        *oracle.gradients(q, k, v, direction, lengths, log_weights),
    )
    bound = EXACT if dtype == "float32" else 0.02
    for one, wanted in zip(found, expected, strict=True):
        assert one.shape == wanted.shape
        assert np.abs(one - wanted).max() <= bound * max(1, np.abs(wanted).max())


@pytest.mark.parametrize(
    ("rows", "heads", "axes"),
    [
        (4, 4, dict(data=2, tensor=4)),
        (4, 2, dict(fsdp=2, tensor=4)),
        (3, 4, dict(data=2, tensor=2)),
    ],
)
def test_each_device_attends_for_its_rows_and_heads(rows, heads, axes):
    """Where an axis does not divide them, too."""
    mesh = make_mesh(jax.devices()[: np.prod(list(axes.values()))], **axes)
    target = Target(None, "auto", mesh, ("data", "fsdp"))
    q, k, v, direction = draw(rows, 5, 7, heads, heads, 8)
    lengths = jnp.array([7, 3, 1, 5][:rows])

    def whole(q, k, v, lengths, norms):
        return (attend(q[0], k[0], v[0], lengths),)

    def split(q, k, v):
        return on_each_device(target, whole, (q,), (k,), (v,), lengths)[0]

    found = jax.jit(gradients_of(split))(q, k, v, direction)
    expected = oracle.attention(q, k, v, lengths), *oracle.gradients(q, k, v, direction, lengths)
    assert all(error(*pair) < EXACT for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        (dict(data=2, sequence=4), 24),
        (dict(fsdp=2, tensor=2, sequence=2), 8),
    ],
)
def test_tokens_that_are_split_attend_to_all_others(axes, groups):
    """All-to-all, forward and backward, for two streams of tokens that the axis does not divide."""
    mesh = make_mesh(jax.devices()[: np.prod(list(axes.values()))], **axes)
    q, k, v, direction = draw(2, 17, 17, 24, groups, 8)
    lengths = jnp.array([17, 11])

    def split(q, k, v):
        cut = functools.partial(jnp.split, indices_or_sections=[14], axis=1)
        with on_mesh(mesh, ("data", "fsdp")):
            out = attend_jointly(*map(cut, (q, k, v)), lengths, weights(17))
        return jnp.concatenate(out, axis=1)

    compiled = jax.jit(gradients_of(split)).lower(q, k, v, direction).compile()
    assert "all-to-all" in compiled.as_text()
    expected = oracle.attention(q, k, v, lengths, weights(17))
    gradients = oracle.gradients(q, k, v, direction, lengths, weights(17))
    for pair in zip(compiled(q, k, v, direction), (expected, *gradients), strict=True):
        assert error(*pair) < EXACT


def test_a_target_ends_with_their_context():
    mesh = make_mesh(jax.devices()[:2], data=2)
    with on_mesh(mesh, ("data",), "xla"):
        assert current().mesh is mesh and current().kernel == "xla"
        with on_device(jax.devices()[1]):
            assert current() == Target(jax.devices()[1], "auto")
        assert current().mesh is mesh
    assert current() == Target()
    with on_mesh(make_mesh(jax.devices()[:1]), ("data",)):
        assert current().mesh is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_are_normed_over_the_last_axis(dtype):
    rng = np.random.default_rng(0)
    x, direction = (jnp.asarray(3 * rng.normal(size=(2, 5, 4, 8)), dtype) for _ in range(2))
    scale = jnp.asarray(rng.normal(size=8), jnp.float32)

    def found(norm):
        out, pullback = jax.vjp(norm, x, scale)
        return out, *pullback(direction)

    module = nn.RMSNorm(attending.EPSILON, dtype=dtype)
    expected = found(lambda x, scale: module.apply({"params": {"scale": scale}}, x))
    bound = 1e-6 if dtype == jnp.float32 else 2e-2
    for a, b in zip(found(attending.normed), expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(c, np.float64) for c in (a, b))
        assert np.abs(a - b).max() < bound * np.abs(b).max()
