"""Our flash attention for TPUs, which takes heads as they lie: a token's heads side by side in one row.

A TPU holds the last dimension of an array in tiles of 128 lanes. Splash attention takes [h s d]: heads of 64 channels
fill half of each tile, and whatever is projected from tokens is copied into that form and back. Here a block has 128
lanes of [b s h*d], which are two heads of 64 channels or one of 128. Where a product sums over lanes, those of other
heads are zeroed in one factor; that takes the matrix unit no longer, as its sides have 128 places anyway.

A step of the grid has some queries and all keys of such lanes, so no sum is rescaled (arXiv 2205.14135 needs that for
blocks of keys), and the gradients of keys and values are sums in fast memory. Scores are [keys, queries], whose sums
over keys go along the sublanes, and a number a query broadcasts over them.

RMS norms of queries and keys are a part of it, which apart from it would read and write all tokens once more, forward
and backward.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from digen_jax.attention.head_norms import HeadNorms
from digen_jax.attention.key_weights import MINUS_INFINITY, RESIDUALS
from digen_jax.attention.packed_bodies import LANES, Form, backward, forward

# Fast memory ("VMEM") that blocks may take by `block_bytes`, and that the compiler may take in all; a v5p has 64 MiB.
BLOCKS, LIMIT = 40 * 2**20, 56 * 2**20
# Blocks of more queries keep the matrix unit no busier.
LARGEST_BLOCK = 512


def fits(keys: int, itemsize: int) -> bool:
    """Whether a step of the kernel has room for so many keys."""
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
    """As `attend.attend_jointly`, by the kernel; `interpret` runs it on a CPU.

    Streams are joined as rows of all heads, which XLA need not copy into another layout.
    """
    heads, width = q[0].shape[2:]
    form = Form(width, _ends(q), _ends(k), norms is not None, interpret)
    bias = _bias(form.k_ends[-1], lengths, log_weights)
    scales = (_scales(norms and norms.q, width), _scales(norms and norms.k, width))
    out = _kernel(_rows(q), _rows(k), _rows(v), bias, *scales, form)
    parts = jnp.split(out, form.q_ends, axis=1)[:-1]
    return tuple(part.reshape(*part.shape[:2], heads, width) for part in parts)


def _ends(streams: Sequence[Float[Array, "b _ h d"]]) -> tuple[int, ...]:
    """Behind the last token of each stream."""
    return tuple(itertools.accumulate(stream.shape[1] for stream in streams))


def _scales(scales: Sequence[Float[Array, "d"]] | None, width: int) -> Float[Array, "p lanes"]:
    """The scales of each stream in the lanes of every head; ones, which nothing reads, without norms."""
    if scales is None:
        return jnp.ones((1, LANES), jnp.float32)
    return jnp.tile(jnp.stack(scales).astype(jnp.float32), (1, LANES // width))


def _rows(streams: Sequence[Float[Array, "b _ h d"]]) -> Float[Array, "b n w"]:
    """All tokens of some streams, one behind the other, and zeros up to a multiple of the lanes.

    Written into one array, which a TPU's program does as the end of the products that the streams come from; a
    concatenation would be a copy of its own.
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
    """Queries of a step: the most that divide them and fit, multiples of the lanes."""
    sizes = range(LANES, LARGEST_BLOCK + 1, LANES)
    fitting = [n for n in sizes if queries % n == 0 and block_bytes(n, keys, itemsize) <= BLOCKS]
    return max(fitting)


def block_bytes(queries: int, keys: int, itemsize: int) -> int:
    """Fast memory of a step of the backward pass, which needs more than the forward one.

    Keys, values and their gradients lie there twice, as the next ones are fetched; next to them two float32 sums and
    the biases of keys, and normed keys; of scores there are up to four float32 arrays.
    """
    of_keys = keys * LANES * (2 * 4 * itemsize + 2 * 4 + 2 * 4 + itemsize)
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
            blocks.whole(scales_q), blocks.whole(scales_k),
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
            blocks.whole(scales_q), blocks.whole(scales_k),
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
    """The grid (row, lanes, queries), and what a step of it has of each array."""

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
                # Steps over queries follow one another, because they add to the same sums.
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=LIMIT,
            ),
        )

    def whole(self, scales: Array) -> pl.BlockSpec:
        """The scales, which every step reads."""
        return pl.BlockSpec(scales.shape, lambda b, h, i: (0, 0))

    def of_lanes(self, scales: Array) -> pl.BlockSpec:
        """The gradients of scales from the queries of one row in some lanes."""
        return pl.BlockSpec((1, 1, *scales.shape), lambda b, h, i: (b, h, 0, 0))

    def cost(self, products: int) -> pl.CostEstimate:
        """Of so many products of each score."""
        return pl.CostEstimate(
            flops=2 * products * self.scores * self.width,
            transcendentals=self.scores,
            bytes_accessed=self.bytes * products // 2,
        )
