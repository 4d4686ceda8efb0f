"""Custom flash attention for TPUs on packed heads: the heads of a token are adjacent in one row.

A TPU stores the last dimension of an array in tiles of 128 lanes. Splash attention takes [h s d]: heads of 64 channels
fill half of each tile, and token projections are copied into that layout and back. Here a block has 128 lanes of
[b s h*d]: two heads of 64 channels or one of 128. Where a product sums over lanes, the lanes of other heads are zeroed
in one factor. This costs no matrix unit time, because its sides have 128 places anyway.

A grid step has a block of queries and all keys of its lanes, so sums are never rescaled (arXiv 2205.14135 needs that
for blocks of keys), and gradients of keys and values accumulate in VMEM. Scores are [keys, queries]: sums over keys run
along sublanes, and a number per query broadcasts over them.

RMS norms of queries and keys are fused. As separate operations they would read and write all tokens once more, forward
and backward.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.attention.attend import EPSILON, MINUS_INFINITY, RESIDUALS, HeadNorms

LANES = 128
# VMEM limits of blocks, by `block_bytes`, and of the compiler in total; a v5p has 64 MiB.
BLOCKS, LIMIT = 40 * 2**20, 56 * 2**20
# Larger blocks of queries do not increase matrix unit utilization.
LARGEST_BLOCK = 512
# Contracting dimensions of two matrices: a b and a b^T.
PLAIN = (((1,), (0,)), ((), ()))
TRANSPOSED = (((1,), (1,)), ((), ()))


class Form(NamedTuple):
    """Static parameters of a kernel.

    Attributes:
      width: Channels per head.
      q_ends: End offset of each stream of queries.
      k_ends: End offset of each stream of keys.
      norms: Whether the kernel norms queries and keys.
      interpret: Whether to run Pallas's interpreter.
    """

    width: int
    q_ends: tuple[int, ...]
    k_ends: tuple[int, ...]
    norms: bool
    interpret: bool


def fits(keys: int, itemsize: int) -> bool:
    """Returns whether `keys` keys fit in VMEM for one step of the kernel."""
    return block_bytes(LANES, _padded(keys), itemsize) <= BLOCKS


def attend(
    q: Sequence[Float[Array, "b _ h d"]],
    k: Sequence[Float[Array, "b _ h d"]],
    v: Sequence[Float[Array, "b _ h d"]],
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
    norms: HeadNorms | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b _ h d"], ...]:
    """Computes `attend.attend_jointly` with the kernel. `interpret` runs it on a CPU.

    Streams are joined as rows of all heads, which XLA does not need to copy into another layout.
    """
    heads, width = q[0].shape[2:]
    form = Form(width, _ends(q), _ends(k), norms is not None, interpret)
    bias = _bias(form.k_ends[-1], lengths, log_weights)
    scales = (_scales(norms and norms.q, width), _scales(norms and norms.k, width))
    out = _kernel(_rows(q), _rows(k), _rows(v), bias, *scales, form)
    parts = jnp.split(out, form.q_ends, axis=1)[:-1]
    return tuple(part.reshape(*part.shape[:2], heads, width) for part in parts)


def _ends(streams: Sequence[Float[Array, "b _ h d"]]) -> tuple[int, ...]:
    """Returns the end offset of each stream."""
    return tuple(itertools.accumulate(stream.shape[1] for stream in streams))


def _scales(scales: Sequence[Float[Array, "d"]] | None, width: int) -> Float[Array, "p lanes"]:
    """Returns each stream's scales tiled over the lanes of every head. Without norms, returns unused ones."""
    if scales is None:
        return jnp.ones((1, LANES), jnp.float32)
    return jnp.tile(jnp.stack(scales).astype(jnp.float32), (1, LANES // width))


def _rows(streams: Sequence[Float[Array, "b _ h d"]]) -> Float[Array, "b n w"]:
    """Joins the tokens of all streams and pads with zeros to a multiple of the lanes.

    Writes into one array, which a TPU program fuses with the products that the streams come from. A concatenation
    would be a separate copy.
    """
    *others, last = (a.reshape(*a.shape[:2], -1) for a in streams)
    first = sum(a.shape[1] for a in others)
    last = jnp.pad(last, ((0, 0), (0, -(first + last.shape[1]) % LANES), (0, 0)))
    if not others:
        return last
    out = jax.lax.empty((last.shape[0], first + last.shape[1], last.shape[2]), last.dtype)
    begins = itertools.accumulate((a.shape[1] for a in others), initial=0)
    for begin, a in zip(begins, [*others, last], strict=True):
        out = jax.lax.dynamic_update_slice(out, a, (0, begin, 0))
    return out


def block(queries: int, keys: int, itemsize: int) -> int:
    """Returns the queries per step: the largest multiple of the lanes that divides `queries` and fits in VMEM."""
    sizes = range(LANES, LARGEST_BLOCK + 1, LANES)
    fitting = [n for n in sizes if queries % n == 0 and block_bytes(n, keys, itemsize) <= BLOCKS]
    return max(fitting)


def block_bytes(queries: int, keys: int, itemsize: int) -> int:
    """Returns the VMEM used by a step of the backward pass, which needs more than the forward pass.

    Counts double-buffered keys, values and their gradients, two float32 sums, key biases, normed keys, and up to four
    float32 arrays of scores.
    """
    of_keys = keys * LANES * (2 * 4 * itemsize + 2 * 4 + 2 * 4 + itemsize)
    of_queries = queries * LANES * (2 * 4 * itemsize + 4 * 4)
    return of_keys + of_queries + 4 * queries * keys * 4


def _padded(tokens: int) -> int:
    return -(-tokens // LANES) * LANES


def _bias(
    valid: int, lengths: Int[Array, "b"] | None, log_weights: Float[np.ndarray, "t"] | None
) -> Float[Array, "#b n lanes"]:
    """Returns the bias of each key's scores, along the sublanes: log-weights, or MINUS_INFINITY for padding."""
    terms = np.full(_padded(valid), MINUS_INFINITY, np.float32)
    terms[:valid] = 0 if log_weights is None else log_weights
    bias = jnp.asarray(terms)[None]
    if lengths is not None:
        inside = jnp.arange(len(terms)) < lengths[:, None]
        bias = jnp.where(inside, bias, MINUS_INFINITY)
    return jnp.broadcast_to(bias[..., None], (*bias.shape, LANES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _kernel(
    q: Float[Array, "b s w"],
    k: Float[Array, "b t w"],
    v: Float[Array, "b t w"],
    bias: Float[Array, "#b t lanes"],
    scales_q: Float[Array, "_ lanes"],
    scales_k: Float[Array, "_ lanes"],
    form: Form,
) -> Float[Array, "b s w"]:
    return _forward(q, k, v, bias, scales_q, scales_k, form)[0]


def _forward(q, k, v, bias, scales_q, scales_k, form):
    blocks = _Blocks(q, k, bias, form)
    b, s, w = q.shape
    logs = jax.ShapeDtypeStruct((b, w // LANES, LANES // form.width, s), jnp.float32)
    out, logs = blocks.call(
        functools.partial(forward, form=form),
        in_specs=[
            blocks.queries, blocks.keys, blocks.keys, blocks.bias,
            blocks.unsplit(scales_q), blocks.unsplit(scales_k),
        ],
        out_specs=[blocks.queries, blocks.numbers],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), logs],
        scratch_shapes=blocks.normed_keys,
        cost_estimate=blocks.cost(2),
        name=f"attention_forward_{form.width}",
    )(q, k, v, bias, scales_q, scales_k)  # fmt: skip
    out, logs = (checkpoint_name(a, RESIDUALS) for a in (out, logs))
    return out, (q, k, v, bias, scales_q, scales_k, out, logs)


def _backward(form, residuals, direction):
    q, k, v, bias, scales_q, scales_k, _, _ = residuals
    blocks = _Blocks(q, k, bias, form)
    sums = pltpu.VMEM((k.shape[1], LANES), jnp.float32)
    of_scales = [
        jax.ShapeDtypeStruct((*blocks.grid[:2], *a.shape), a.dtype) for a in (scales_q, scales_k)
    ]
    *of_tokens, of_scales_q, of_scales_k = blocks.call(
        functools.partial(backward, form=form),
        in_specs=[
            blocks.queries, blocks.keys, blocks.keys, blocks.bias,
            blocks.unsplit(scales_q), blocks.unsplit(scales_k),
            blocks.queries, blocks.numbers, blocks.queries,
        ],
        out_specs=[
            blocks.queries, blocks.keys, blocks.keys,
            blocks.of_lanes(scales_q), blocks.of_lanes(scales_k),
        ],
        out_shape=[*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v)), *of_scales],
        scratch_shapes=[sums, sums, *blocks.normed_keys],
        cost_estimate=blocks.cost(5),
        name=f"attention_backward_{form.width}",
    )(*residuals, direction)  # fmt: skip
    return *of_tokens, None, of_scales_q.sum((0, 1)), of_scales_k.sum((0, 1))


_kernel.defvjp(_forward, _backward)


class _Blocks:
    """Grid (row, lanes, queries), and the block of each array in a grid step."""

    def __init__(self, q: Array, k: Array, bias: Array, form: Form):
        b, s, w = q.shape
        width = form.width
        t = k.shape[1]
        size = block(s, t, q.dtype.itemsize)
        self.grid = (b, w // LANES, s // size)
        self.queries = pl.BlockSpec((1, size, LANES), lambda b, h, i: (b, i, h))
        self.keys = pl.BlockSpec((1, t, LANES), lambda b, h, i: (b, 0, h))
        each = bias.shape[0] > 1
        self.bias = pl.BlockSpec((1, t, LANES), lambda b, h, i: (b if each else 0, 0, 0))
        self.numbers = pl.BlockSpec((1, 1, LANES // width, size), lambda b, h, i: (b, h, 0, i))
        self.normed_keys = [pltpu.VMEM((t, LANES), k.dtype)] if form.norms else []
        self.scores = b * (w // width) * s * t
        self.width = width
        self.bytes = (2 * b * s * w + 2 * b * t * w) * q.dtype.itemsize
        self.call = functools.partial(
            pl.pallas_call,
            grid=self.grid,
            interpret=form.interpret,
            compiler_params=pltpu.CompilerParams(
                # Steps over queries are sequential, because they add to the same sums.
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=LIMIT,
            ),
        )

    def unsplit(self, scales: Array) -> pl.BlockSpec:
        """Returns the spec of the scales, which every step reads."""
        return pl.BlockSpec(scales.shape, lambda b, h, i: (0, 0))

    def of_lanes(self, scales: Array) -> pl.BlockSpec:
        """Returns the spec of the scales' gradients from the queries of one row in one group of lanes."""
        return pl.BlockSpec((1, 1, *scales.shape), lambda b, h, i: (b, h, 0, 0))

    def cost(self, products: int) -> pl.CostEstimate:
        """Estimates the cost of `products` products per score."""
        return pl.CostEstimate(
            flops=2 * products * self.scores * self.width,
            transcendentals=self.scores,
            bytes_accessed=self.bytes * products // 2,
        )


# Kernel bodies, on blocks in VMEM. A block of tokens is [tokens, lanes], and its lanes are those of one or more heads.
# Scores are [keys, queries].


def forward(q, k, v, bias, scales_q, scales_k, out, logs, *scratch, form):
    """Computes the results of a block of queries, and their log-sum-exp."""
    width = form.width
    q = _queries(q, scales_q, form)[0]
    k, v, bias = _keys(k, scales_k, scratch, form), v[0], bias[0][:, :1]
    values, results, scale = v.T, [], width**-0.5
    scores = _scores(k, q, 0, width)
    for head in range(LANES // width):
        # The next head's scores precede this head's softmax, so that the compiler interleaves them.
        next_scores = _scores(k, q, head + 1, width)
        scores = scores * scale + bias
        most = scores.max(0, keepdims=True)
        weights = jnp.exp(scores - most)
        total = weights.sum(0, keepdims=True)
        own = values[head * width : (head + 1) * width]
        results.append(_dot(own, weights.astype(v.dtype), PLAIN) / total)
        logs[0, 0, head : head + 1, :] = most + jnp.log(total)
        scores = next_scores
    out[0] = jnp.concatenate(results, axis=0).T.astype(out.dtype)


def backward(
    q, k, v, bias, scales_q, scales_k, out, logs, direction,
    of_q, of_k, of_v, of_scales_q, of_scales_k, sum_k, sum_v, *scratch, form,
):  # fmt: skip
    """Computes gradients of a block of queries; after the last block also those of keys, values and scales."""
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
    if scale_q is not None:
        result, of_scale = _norm_gradient(raw_q, scale_q, result, width)
        first = step * raw_q.shape[0]
        of_scales_q[0, 0] += _sums(of_scale, form.q_ends, first)
    of_q[0] = result.astype(of_q.dtype)

    @pl.when(step == last)
    def _():
        of_keys = sum_k[...]
        if form.norms:
            scale_k = _scale_rows(scales_k, form.k_ends, 0, raw_k.shape[0])
            of_keys, of_scale = _norm_gradient(raw_k, scale_k, of_keys, width)
            of_scales_k[0, 0] = _sums(of_scale, form.k_ends, 0)
        of_k[0] = of_keys.astype(of_k.dtype)
        of_v[0] = sum_v[...].astype(of_v.dtype)


def _scores(k: Array, q: Array, head: int, width: int) -> Float[Array, "t s"] | None:
    """Returns the products of keys and queries, or None after the last head."""
    return None if head == LANES // width else _dot(k, _own(q, head, width), TRANSPOSED)


def _queries(q, scales, form: Form) -> tuple[Array, Array | None]:
    """Returns a step's queries, normed if enabled, and the scales of their rows."""
    if not form.norms:
        return q[0], None
    rows = _scale_rows(scales, form.q_ends, pl.program_id(2) * q.shape[1], q.shape[1])
    return _normed(q[0], rows, form.width), rows


def _keys(k, scales, scratch, form: Form) -> Array:
    """Returns all keys of the lanes, normed by the first step if enabled."""
    if not form.norms:
        return k[0]
    (kept,) = scratch

    @pl.when(pl.program_id(2) == 0)
    def _():
        kept[...] = _normed(k[0], _scale_rows(scales, form.k_ends, 0, k.shape[1]), form.width)

    return kept[...]


def _scale_rows(
    scales, ends: tuple[int, ...], first: Array | int, rows: int
) -> Float[Array, "n lanes"]:
    """Returns the scales of `rows` tokens starting at `first`, by stream."""
    out = jnp.broadcast_to(scales[0:1], (rows, LANES))
    token = first + lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
    for stream, begin in enumerate(ends[:-1], 1):
        out = jnp.where(token >= begin, scales[stream : stream + 1], out)
    return out


def _sums(a: Float[Array, "n lanes"], ends: tuple[int, ...], first: Array | int) -> Array:
    """Returns the sum over the tokens of each stream: [streams, lanes]."""
    token = first + lax.broadcasted_iota(jnp.int32, a.shape, 0)
    begins = (0, *ends[:-1])
    inside = [(token >= begin) & (token < end) for begin, end in zip(begins, ends, strict=True)]
    return jnp.concatenate(
        [jnp.where(here, a, 0.0).sum(0, keepdims=True) for here in inside], axis=0
    )


def _normed(x: Array, scales: Array, width: int) -> Array:
    """Computes `attend.normed` of the heads that share the lanes."""
    wide = x.astype(jnp.float32)
    return (wide * (_inverse(wide, width, x.dtype) * scales)).astype(x.dtype)


def _inverse(x: Float[Array, "n lanes"], width: int, dtype: DTypeLike) -> Float[Array, "n lanes"]:
    """Returns the reciprocal root mean square of each head."""
    return lax.rsqrt(_means(x * x, width, dtype) + EPSILON)


def _norm_gradient(x: Array, scales: Array, direction: Array, width: int) -> tuple[Array, Array]:
    """Returns the gradients of `_normed` with respect to x and each token's scales, in float32."""
    dtype, x = x.dtype, x.astype(jnp.float32)
    inverse = _inverse(x, width, dtype)
    unit, scaled = x * inverse, direction * scales
    mean = _means(unit * scaled, width, dtype)
    return inverse * (scaled - unit * mean), direction * unit


def _means(x: Float[Array, "n lanes"], width: int, dtype: DTypeLike) -> Float[Array, "n lanes"]:
    """Returns the mean over each head's lanes, broadcast to these lanes, as a matrix product.

    Squares of bfloat16 numbers have 16 bits, so two bfloat16 numbers represent them.
    """
    lane = [lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1)]
    share = jnp.where(lax.div(lane[0], width) == lax.div(lane[1], width), 1 / width, 0.0)
    if dtype == jnp.float32:
        return _dot(x, share, PLAIN)
    share, high = share.astype(dtype), x.astype(dtype)
    low = (x - high.astype(jnp.float32)).astype(dtype)
    return _dot(high, share, PLAIN) + _dot(low, share, PLAIN)


def _dot(a: Array, b: Array, dimensions: tuple) -> Array:
    """Multiplies with float32 accumulation. Products of float32 are exact, regardless of the caller's precision."""
    is_float32 = a.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _own(a: Array, head: int, width: int) -> Array:
    """Zeros the lanes of other heads."""
    if width == LANES:
        return a
    lane = lax.broadcasted_iota(jnp.int32, a.shape, 1)
    inside = (lane >= head * width) & (lane < (head + 1) * width)
    return jnp.where(inside, a, jnp.zeros_like(a))
