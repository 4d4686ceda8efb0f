"""What a step of `packed`'s kernels does with its blocks in fast memory; for the idea see `packed`.

A block of tokens is [tokens, lanes], and its lanes are those of one or more heads. Scores are [keys, queries].
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from digen_jax.attention.head_norms import EPSILON

LANES = 128

# Which dimensions of two matrices are multiplied: a b and a b^T.
PLAIN = (((1,), (0,)), ((), ()))
TRANSPOSED = (((1,), (1,)), ((), ()))


class Form(NamedTuple):
    """What a kernel is made for.

    Attributes:
      width: channels of a head.
      q_ends: behind the last token of each stream of queries.
      k_ends: the same of keys.
      norms: whether queries and keys are normed here.
      interpret: whether Pallas's interpreter runs it.
    """

    width: int
    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    norms: bool
    interpret: bool


def forward(q, k, v, bias, scales_q, scales_k, out, logs, *scratch, form):
    """Results of some queries, and the logarithms of their sums of exponentials."""
    width = form.width
    q = _queries(q, scales_q, form)[0]
    k, v, bias = _keys(k, scales_k, scratch, form), v[0], bias[0][:, :1]
    values, results, scale = v.T, [], width**-0.5
    scores = _scores(k, q, 0, width)
    for head in range(LANES // width):
        # The next head's scores stand before this one's softmax, so that the compiler interleaves them.
        ahead = _scores(k, q, head + 1, width)
        scores = scores * scale + bias
        most = scores.max(0, keepdims=True)
        weights = jnp.exp(scores - most)
        total = weights.sum(0, keepdims=True)
        own = values[head * width : (head + 1) * width]
        results.append(_dot(own, weights.astype(v.dtype), PLAIN) / total)
        logs[0, 0, head : head + 1, :] = most + jnp.log(total)
        scores = ahead
    out[0] = jnp.concatenate(results, axis=0).T.astype(out.dtype)


def backward(
    q, k, v, bias, scales_q, scales_k, out, logs, direction,
    of_q, of_k, of_v, of_scales_q, of_scales_k, sum_k, sum_v, *scratch, form,
):  # fmt: skip
    """Gradients of some queries; those of keys, values and scales once all queries have been here."""
    step, last, width = pl.program_id(2), pl.num_programs(2) - 1, form.width

    @pl.when(step == 0)
    def _():
        sum_k[...] = jnp.zeros_like(sum_k)
        sum_v[...] = jnp.zeros_like(sum_v)
        of_scales_q[...] = jnp.zeros_like(of_scales_q)
        of_scales_k[...] = jnp.zeros_like(of_scales_k)

    raw_q, raw_k = q[0], k[0]
    q, scale_q = _queries(q, scales_q, form)
    k, v, bias = _keys(k, scales_k, scratch, form), v[0], bias[0][:, :1]
    out, direction = out[0], direction[0]
    products = (direction.astype(jnp.float32) * out.astype(jnp.float32)).T
    keys, results, scale = k.T, [], width**-0.5
    for head in range(LANES // width):
        own_q, own_direction = _own(q, head, width), _own(direction, head, width)
        scores = _dot(k, own_q, TRANSPOSED) * scale + bias
        weights = jnp.exp(scores - logs[0, 0, head : head + 1, :])
        sum_v[...] += _dot(weights.astype(direction.dtype), own_direction, PLAIN)
        mean = products[head * width : (head + 1) * width].sum(0, keepdims=True)
        of_scores = weights * (_dot(v, own_direction, TRANSPOSED) - mean) * scale
        of_scores = of_scores.astype(q.dtype)
        sum_k[...] += _dot(of_scores, own_q, PLAIN)
        results.append(_dot(keys[head * width : (head + 1) * width], of_scores, PLAIN))
    result = jnp.concatenate(results, axis=0).T
    if form.norms:
        result, of_scale = _norm_gradient(raw_q, scale_q, result, width)
        first = step * raw_q.shape[0]
        of_scales_q[0, 0] += _sums(of_scale, form.q_ends, first)
    of_q[0] = result.astype(of_q.dtype)

    @pl.when(step == last)
    def _():
        of_keys = sum_k[...]
        if form.norms:
            scale_k = _rows(scales_k, form.k_ends, 0, raw_k.shape[0])
            of_keys, of_scale = _norm_gradient(raw_k, scale_k, of_keys, width)
            of_scales_k[0, 0] = _sums(of_scale, form.k_ends, 0)
        of_k[0] = of_keys.astype(of_k.dtype)
        of_v[0] = sum_v[...].astype(of_v.dtype)


def _scores(k: Array, q: Array, head: int, width: int) -> Float[Array, "t s"] | None:
    """Products of keys and queries; None behind the last head."""
    return None if head == LANES // width else _dot(k, _own(q, head, width), TRANSPOSED)


def _queries(q, scales, form: Form) -> tuple[Array, Array | None]:
    """A step's queries, normed if they are, and the scales of their rows."""
    if not form.norms:
        return q[0], None
    rows = _rows(scales, form.q_ends, pl.program_id(2) * q.shape[1], q.shape[1])
    return _normed(q[0], rows, form.width), rows


def _keys(k, scales, scratch, form: Form) -> Array:
    """All keys of the lanes, normed by the first step if they are."""
    if not form.norms:
        return k[0]
    (kept,) = scratch

    @pl.when(pl.program_id(2) == 0)
    def _():
        kept[...] = _normed(k[0], _rows(scales, form.k_ends, 0, k.shape[1]), form.width)

    return kept[...]


def _rows(scales, ends: tuple[int, ...], first: Array | int, rows: int) -> Float[Array, "n lanes"]:
    """The scales of each token's stream, of some tokens from `first` on."""
    out = jnp.broadcast_to(scales[0:1], (rows, LANES))
    token = first + lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
    for stream, begin in enumerate(ends[:-1], 1):
        out = jnp.where(token >= begin, scales[stream : stream + 1], out)
    return out


def _sums(a: Float[Array, "n lanes"], ends: tuple[int, ...], first: Array | int) -> Array:
    """The sum over the tokens of each stream: [streams, lanes]."""
    token = first + lax.broadcasted_iota(jnp.int32, a.shape, 0)
    begins = (0, *ends[:-1])
    inside = [(token >= begin) & (token < end) for begin, end in zip(begins, ends, strict=True)]
    return jnp.concatenate(
        [jnp.where(here, a, 0.0).sum(0, keepdims=True) for here in inside], axis=0
    )


def _normed(x: Array, scales: Array, width: int) -> Array:
    """`head_norms.normed` of the heads that share the lanes."""
    wide = x.astype(jnp.float32)
    return (wide * (_inverse(wide, width, x.dtype) * scales)).astype(x.dtype)


def _inverse(x: Float[Array, "n lanes"], width: int, dtype: DTypeLike) -> Float[Array, "n lanes"]:
    """One over the root mean square of each head."""
    return lax.rsqrt(_means(x * x, width, dtype) + EPSILON)


def _norm_gradient(x: Array, scales: Array, direction: Array, width: int) -> tuple[Array, Array]:
    """Of `_normed`: the gradients of x and of each token's scales, in float32."""
    dtype, x = x.dtype, x.astype(jnp.float32)
    inverse = _inverse(x, width, dtype)
    unit, scaled = x * inverse, direction * scales
    mean = _means(unit * scaled, width, dtype)
    return inverse * (scaled - unit * mean), direction * unit


def _means(x: Float[Array, "n lanes"], width: int, dtype: DTypeLike) -> Float[Array, "n lanes"]:
    """The mean over each head's lanes, in all of these, as a product.

    The squares of bfloat16 numbers have 16 bits, and two bfloat16 numbers hold them.
    """
    lane = [lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1)]
    share = jnp.where(lax.div(lane[0], width) == lax.div(lane[1], width), 1 / width, 0.0)
    if dtype == jnp.float32:
        return _dot(x, share, PLAIN)
    share, high = share.astype(dtype), x.astype(dtype)
    low = (x - high.astype(jnp.float32)).astype(dtype)
    return _dot(high, share, PLAIN) + _dot(low, share, PLAIN)


def _dot(a: Array, b: Array, dimensions: tuple) -> Array:
    """A product with a float32 sum; of float32 factors it is exact, which the caller's precision is not."""
    whole = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if whole else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _own(a: Array, head: int, width: int) -> Array:
    """With zeros in the lanes of other heads."""
    if width == LANES:
        return a
    lane = lax.broadcasted_iota(jnp.int32, a.shape, 1)
    inside = (lane >= head * width) & (lane < (head + 1) * width)
    return jnp.where(inside, a, jnp.zeros_like(a))
