"""Our flash attention for TPUs, which takes heads as they lie: a token's heads side by side in one row.

A TPU holds the last dimension of an array in tiles of 128 lanes. Splash attention takes [h s d]: heads of 64 channels
fill half of each tile, and whatever is projected from tokens is copied into that form and back. Here a block has 128
lanes of [b s h*d], which are two heads of 64 channels or one of 128. The lanes of other heads are zeroed in one factor
of each product, which takes the matrix unit no longer, as its sides have 128 places anyway.

A step of the grid has some queries and all keys of such lanes, so no sum is rescaled (arXiv 2205.14135 needs that for
blocks of keys), and the gradients of keys and values are sums in fast memory. Scores are [keys, queries], whose sums
over keys go along the sublanes, and a number a query broadcasts over them.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from digen_jax.attention.key_weights import MINUS_INFINITY, RESIDUALS

LANES = 128
# Fast memory ("VMEM") that blocks may take by `block_bytes`, and that the compiler may take in all; a v5p has 64 MiB.
BLOCKS, LIMIT = 32 * 2**20, 56 * 2**20
# Blocks of more queries keep the matrix unit no busier.
LARGEST_BLOCK = 512

# Which dimensions of two matrices are multiplied: a b and a b^T.
PLAIN = (((1,), (0,)), ((), ()))
TRANSPOSED = (((1,), (1,)), ((), ()))


def fits(keys: int, itemsize: int) -> bool:
    """Whether a step of the kernel has room for so many keys."""
    return block_bytes(LANES, _padded(keys), itemsize) <= BLOCKS


def attend(
    q: Sequence[Float[Array, "b _ h d"]],
    k: Sequence[Float[Array, "b _ h d"]],
    v: Sequence[Float[Array, "b _ h d"]],
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b _ h d"], ...]:
    """As `attend.attend_jointly`, by the kernel; `interpret` runs it on a CPU.

    Streams are joined as rows of all heads, which XLA need not copy into another layout.
    """
    heads, width = q[0].shape[2:]
    keys = sum(stream.shape[1] for stream in k)
    bias = _bias(keys, lengths, log_weights)
    out = _kernel(_rows(q), _rows(k), _rows(v), bias, width, interpret)
    ends = list(itertools.accumulate(stream.shape[1] for stream in q))
    parts = jnp.split(out, ends, axis=1)[:-1]
    return tuple(part.reshape(*part.shape[:2], heads, width) for part in parts)


def _rows(streams: Sequence[Float[Array, "b _ h d"]]) -> Float[Array, "b n w"]:
    """All tokens of some streams, one behind the other, and zeros up to a multiple of the lanes."""
    flat = [a.reshape(*a.shape[:2], -1) for a in streams]
    tokens = sum(a.shape[1] for a in flat)
    zeros = jnp.zeros_like(
        flat[0], shape=(flat[0].shape[0], _padded(tokens) - tokens, flat[0].shape[2])
    )
    return jnp.concatenate([*flat, zeros], axis=1)


def block(queries: int, keys: int, itemsize: int) -> int:
    """Queries of a step: the most that divide them and fit, multiples of the lanes."""
    sizes = range(LANES, LARGEST_BLOCK + 1, LANES)
    fitting = [n for n in sizes if queries % n == 0 and block_bytes(n, keys, itemsize) <= BLOCKS]
    return max(fitting)


def block_bytes(queries: int, keys: int, itemsize: int) -> int:
    """Fast memory of a step of the backward pass, which needs more than the forward one.

    Keys, values and their gradients lie there twice, as the next ones are fetched; beside them two float32 sums and
    the biases of keys; of scores there are up to four float32 arrays.
    """
    of_keys = keys * LANES * (2 * 4 * itemsize + 2 * 4 + 2 * 4)
    of_queries = queries * LANES * (2 * 4 * itemsize + 4 * 4)
    return of_keys + of_queries + 4 * queries * keys * 4


def _padded(tokens: int) -> int:
    return -(-tokens // LANES) * LANES


def _bias(
    valid: int, lengths: Int[Array, "b"] | None, log_weights: Float[np.ndarray, "t"] | None
) -> Float[Array, "#b n lanes"]:
    """What is added to the scores of each key, along the sublanes: log-weights, or MINUS_INFINITY for padding."""
    terms = np.full(_padded(valid), MINUS_INFINITY, np.float32)
    terms[:valid] = 0 if log_weights is None else log_weights
    bias = jnp.asarray(terms)[None]
    if lengths is not None:
        inside = jnp.arange(len(terms)) < lengths[:, None]
        bias = jnp.where(inside, bias, MINUS_INFINITY)
    return jnp.broadcast_to(bias[..., None], (*bias.shape, LANES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _kernel(
    q: Float[Array, "b s w"],
    k: Float[Array, "b t w"],
    v: Float[Array, "b t w"],
    bias: Float[Array, "#b t lanes"],
    width: int,
    interpret: bool,
) -> Float[Array, "b s w"]:
    return _forward(q, k, v, bias, width, interpret)[0]


def _forward(q, k, v, bias, width, interpret):
    blocks = _Blocks(q, k, bias, width)
    b, s, w = q.shape
    logs = jax.ShapeDtypeStruct((b, w // LANES, LANES // width, s), jnp.float32)
    out, logs = blocks.call(
        functools.partial(_forward_body, width=width),
        in_specs=[blocks.queries, blocks.keys, blocks.keys, blocks.bias],
        out_specs=[blocks.queries, blocks.numbers],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), logs],
        cost_estimate=blocks.cost(2),
        interpret=interpret,
        name="attention_forward",
    )(q, k, v, bias)
    out, logs = (checkpoint_name(a, RESIDUALS) for a in (out, logs))
    return out, (q, k, v, bias, out, logs)


def _backward(width, interpret, residuals, direction):
    q, k, v, bias, _, _ = residuals
    blocks = _Blocks(q, k, bias, width)
    sums = pltpu.VMEM((k.shape[1], LANES), jnp.float32)
    gradients = blocks.call(
        functools.partial(_backward_body, width=width),
        in_specs=[
            blocks.queries, blocks.keys, blocks.keys, blocks.bias,
            blocks.queries, blocks.numbers, blocks.queries,
        ],
        out_specs=[blocks.queries, blocks.keys, blocks.keys],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v)],
        scratch_shapes=[sums, sums],
        cost_estimate=blocks.cost(5),
        interpret=interpret,
        name="attention_backward",
    )(*residuals, direction)  # fmt: skip
    return *gradients, None


_kernel.defvjp(_forward, _backward)


class _Blocks:
    """The grid (row, lanes, queries), and what a step of it has of each array."""

    def __init__(self, q: Array, k: Array, bias: Array, width: int):
        b, s, w = q.shape
        t = k.shape[1]
        size = block(s, t, q.dtype.itemsize)
        self.grid = (b, w // LANES, s // size)
        self.queries = pl.BlockSpec((1, size, LANES), lambda b, h, i: (b, i, h))
        self.keys = pl.BlockSpec((1, t, LANES), lambda b, h, i: (b, 0, h))
        each = bias.shape[0] > 1
        self.bias = pl.BlockSpec((1, t, LANES), lambda b, h, i: (b if each else 0, 0, 0))
        self.numbers = pl.BlockSpec((1, 1, LANES // width, size), lambda b, h, i: (b, h, 0, i))
        self.scores = b * (w // width) * s * t
        self.bytes = (2 * b * s * w + 2 * b * t * w) * q.dtype.itemsize
        self.call = functools.partial(
            pl.pallas_call,
            grid=self.grid,
            compiler_params=pltpu.CompilerParams(
                # Steps over queries follow one another, because they add to the same sums.
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=LIMIT,
            ),
        )

    def cost(self, products: int) -> pl.CostEstimate:
        """Of so many products of each score; the matrix unit multiplies all lanes for each head."""
        return pl.CostEstimate(
            flops=2 * products * self.scores * LANES,
            transcendentals=self.scores,
            bytes_accessed=self.bytes * products // 2,
        )


def _forward_body(q, k, v, bias, out, logs, *, width):
    q, k, v, bias = q[0], k[0], v[0], bias[0][:, :1]
    result = None
    for head in range(LANES // width):
        scores = _dot(k, _own(q, head, width), TRANSPOSED) * width**-0.5 + bias
        most = scores.max(0, keepdims=True)
        weights = jnp.exp(scores - most)
        total = weights.sum(0, keepdims=True)
        new = _dot(weights.T.astype(v.dtype), v, PLAIN) * _column(1 / total)
        result = _joined(result, new, head, width)
        logs[0, 0, head : head + 1, :] = most + jnp.log(total)
    out[0] = result.astype(out.dtype)


def _backward_body(
    q, k, v, bias, out, logs, direction, of_q, of_k, of_v, sum_k, sum_v, *, width
):  # fmt: skip
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        sum_k[...] = jnp.zeros_like(sum_k)
        sum_v[...] = jnp.zeros_like(sum_v)

    q, k, v, bias, out, direction = q[0], k[0], v[0], bias[0][:, :1], out[0], direction[0]
    products = (direction.astype(jnp.float32) * out.astype(jnp.float32)).T
    result, scale = None, width**-0.5
    for head in range(LANES // width):
        own_q, own_direction = _own(q, head, width), _own(direction, head, width)
        scores = _dot(k, own_q, TRANSPOSED) * scale + bias
        weights = jnp.exp(scores - logs[0, 0, head : head + 1, :])
        sum_v[...] += _dot(weights.astype(direction.dtype), own_direction, PLAIN)
        mean = products[head * width : (head + 1) * width].sum(0, keepdims=True)
        of_scores = weights * (_dot(v, own_direction, TRANSPOSED) - mean) * scale
        of_scores = of_scores.astype(q.dtype)
        sum_k[...] += _dot(of_scores, own_q, PLAIN)
        result = _joined(result, _dot(of_scores.T, k, PLAIN), head, width)
    of_q[0] = result.astype(of_q.dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        of_k[0] = sum_k[...].astype(of_k.dtype)
        of_v[0] = sum_v[...].astype(of_v.dtype)


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


def _joined(heads: Array | None, new: Array, head: int, width: int) -> Array:
    """The lanes of earlier heads from `heads`, the others from `new`."""
    if heads is None:
        return new
    lane = lax.broadcasted_iota(jnp.int32, new.shape, 1)
    return jnp.where(lane >= head * width, new, heads)


def _column(numbers: Float[Array, "1 n"]) -> Float[Array, "n lanes"]:
    return jnp.broadcast_to(numbers, (LANES, numbers.shape[1])).T
