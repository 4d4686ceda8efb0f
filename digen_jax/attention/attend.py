"""Softmax attention, computed by the kernel that fits the devices (see `kernels`).

Kernels share the preprocessing of queries and keys: RMS norms of heads (arXiv 2010.04245), and weights and padding of
keys, which are encoded as extra channels that every kernel supports.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.attention.kernels import (
    CUDNN,
    MULTIPLE,
    PACKED,
    SEQUENCE,
    SPLASH,
    TENSOR,
    XLA,
    Heads,
    Target,
    choose,
    current,
)

EPSILON = 1e-6  # of RMS norms
# Checkpoint name of the residuals that a kernel saves for its backward pass, for `jax.checkpoint` policies.
RESIDUALS = "attention"
# Added to the score of a padding key. Finite, because 0 times infinity is NaN.
MINUS_INFINITY = -1e30


class HeadNorms(NamedTuple):
    """Scales of the RMS norms, one per stream of tokens, shared by all its heads."""

    q: Sequence[Float[Array, "d"]]
    k: Sequence[Float[Array, "d"]]


def normed(x: Float[Array, "b n h d"], scale: Float[Array, "d"]) -> Float[Array, "b n h d"]:
    """Divides heads by their root mean square and scales them, in float32, rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * (jax.lax.rsqrt(mean + EPSILON) * scale)).astype(x.dtype)


def parts(log_weights: Float[np.ndarray, "t"], dtype: DTypeLike) -> Float[np.ndarray, "p t"]:
    """Splits `log_weights` into numbers of a dtype that sum to them at float32 precision.

    A part has the 8 bits of bfloat16 or the 11 of float16, so three of them have float32's 24.
    """
    dtype = jnp.dtype(dtype)
    rest, found = np.asarray(log_weights, np.float32), []
    for _ in range(1 if dtype.itemsize >= 4 else 3):
        found.append(rest.astype(dtype).astype(np.float32))
        rest = rest - found[-1]
    return np.stack(found)


def unit(scale: float) -> float:
    """Returns the power of two for a query's extra channels such that `scale` times it is about 1."""
    return 2.0 ** -round(math.log2(scale))


def with_channels(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    terms: Float[Array, "p #b t"] | Float[np.ndarray, "p #b t"],
    unit: float = 1.0,
    width: int = 0,
) -> tuple[Float[Array, "b s h e"], Float[Array, "b t g e"]]:
    """Adds channels to queries and keys that increase their products by `unit` times the sum of a key's `terms`.

    Args:
      q: Queries.
      k: Keys.
      terms: Terms of each key, exact in the keys' dtype.
      unit: Value of the queries' channels, exact in the queries' dtype.
      width: Minimum number of channels of the results; unused ones are 0.
    """
    d, e = q.shape[-1], max(width, q.shape[-1] + len(terms))
    channels = np.arange(e)
    # By selection: XLA fuses it with the arrays' next use. A concatenation would be materialized first.
    q, k = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, e - d))) for a in (q, k))
    q = jnp.where((channels >= d) & (channels < d + len(terms)), jnp.asarray(unit, q.dtype), q)
    for i, term in enumerate(terms):
        k = jnp.where(channels == d + i, jnp.asarray(term)[:, :, None, None].astype(k.dtype), k)
    return q, k


def masked(
    terms: Float[np.ndarray, "p t"], lengths: Int[Array, "b"] | None, valid: int
) -> Float[Array, "p #b t"]:
    """Sets the terms of padding to MINUS_INFINITY: each row's keys from `lengths` on, and keys from `valid` on."""
    keys = np.arange(terms.shape[1])
    inside = (keys < valid)[None]
    if lengths is not None:
        inside = inside & (keys < lengths[:, None])
    first = jnp.arange(len(terms))[:, None, None] == 0
    return jnp.where(inside, terms[:, None], jnp.where(first, MINUS_INFINITY, 0.0))


# One [b s h d] array of tokens for each stream.
Streams = Sequence[Array]
Attention = Callable[[Streams, Streams, Streams, Int[Array, "b"] | None, HeadNorms | None], Streams]

# Bytes of float32 scores per device above which XLA's attention processes queries in blocks.
MOST_SCORES = 2**28


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
    causal: bool = False,
) -> Float[Array, "b s h d"]:
    """Returns softmax(q k / sqrt(d) + log_weights) v, with float32 scores and softmax.

    The `kernels.Target` determines the kernel and its sharding. Without a target, XLA's kernel is used.

    Args:
      q: Queries.
      k: Keys. Heads are grouped if h is a multiple of g (GQA, arXiv 2305.13245).
      v: Values.
      lengths: Number of valid keys in each row, at least 1; padding comes last. None means all keys are valid.
      log_weights: Added to the scores of each key: a key of weight n counts as n equal keys. Finite.
      causal: Whether queries attend only to keys up to their position; always computed by XLA.

    Raises:
      ConfigError: the configured kernel cannot compute this.
    """
    return attend_jointly((q,), (k,), (v,), lengths, log_weights, causal)[0]


def attend_jointly(
    q: Streams,
    k: Streams,
    v: Streams,
    lengths: Int[Array, "b"] | None = None,
    log_weights: Float[np.ndarray, "t"] | None = None,
    causal: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Array, ...]:
    """Returns `attend` over the concatenated tokens of several streams, split into one result per query stream.

    `lengths` and `log_weights` refer to the keys of all streams. `norms` are applied to the heads of queries and keys
    before attention.
    """
    target = current()
    first = q[0]
    kernel = XLA
    if not causal:
        keys, groups = sum(stream.shape[1] for stream in k), k[0].shape[2]
        heads = Heads(first.shape[2], first.shape[3], log_weights is not None, groups, keys)
        heads = heads.split(target.parts(TENSOR, SEQUENCE))
        kernel = choose(target.kernel, target.device, first.dtype, heads)
    if norms is not None and kernel != PACKED:
        q, k = (
            [normed(a, scale) for a, scale in zip(streams, scales, strict=True)]
            for streams, scales in ((q, norms.q), (k, norms.k))
        )
        norms = None
    compute = functools.partial(_attend_unsharded, kernel, log_weights, causal)
    if target.mesh is None or (kernel == XLA and target.mesh.shape[SEQUENCE] == 1):
        most = MOST_SCORES * target.parts(*target.rows, TENSOR)
        return compute(most, tuple(q), tuple(k), tuple(v), lengths, norms)
    compute = functools.partial(compute, MOST_SCORES)
    return on_each_device(target, compute, tuple(q), tuple(k), tuple(v), lengths, norms)


def _attend_unsharded(
    kernel: str,
    log_weights: Float[np.ndarray, "t"] | None,
    causal: bool,
    most_scores: int,
    q: Streams,
    k: Streams,
    v: Streams,
    lengths: Int[Array, "b"] | None,
    norms: HeadNorms | None,
) -> tuple[Array, ...]:
    """Computes attention of unsharded arrays, or of arrays whose program XLA partitions."""
    # Kernels are imported only where they are chosen, because Pallas is slow to import.
    if kernel == PACKED:
        from digen_jax.attention import packed

        return packed.attend(q, k, v, lengths, log_weights, norms)
    sizes = [stream.shape[1] for stream in q]
    of_q, of_k, of_v = (a[0] if len(a) == 1 else jnp.concatenate(a, axis=1) for a in (q, k, v))
    if kernel in (SPLASH, CUDNN):
        from digen_jax.attention import flash

        library = flash.splash if kernel == SPLASH else flash.cudnn
        out = library(of_q, of_k, of_v, lengths, log_weights)
    else:
        out = _xla(of_q, of_k, of_v, lengths, log_weights, causal, most_scores)
    if len(sizes) == 1:
        return (out,)
    return tuple(jnp.split(out, list(itertools.accumulate(sizes))[:-1], axis=1))


def _xla(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g d"],
    lengths: Int[Array, "b"] | None,
    log_weights: Float[np.ndarray, "t"] | None,
    causal: bool,
    most_scores: int,
) -> Float[Array, "b s h d"]:
    """Attends with all queries at once, or with blocks of queries if the scores exceed `most_scores` bytes.

    The backward pass recomputes the scores one block at a time and accumulates gradients in float32.
    """
    (b, s, h, _), t = q.shape, k.shape[1]
    bias = None
    if log_weights is not None:
        bias = jnp.asarray(log_weights, jnp.float32)[None, None, None]
    attention = functools.partial(
        jax.nn.dot_product_attention,
        bias=bias,
        key_value_seq_lengths=lengths,
        implementation="xla",
    )
    blocks = -(-4 * b * h * s * t // most_scores)
    if blocks <= 1:
        return checkpoint_name(attention(q, k, v, is_causal=causal), RESIDUALS)
    size = MULTIPLE * -(-s // (MULTIPLE * blocks))
    blocks = -(-s // size)
    wide = [a.astype(jnp.float32) for a in (k, v)]

    @jax.checkpoint
    def of_block(block: tuple[Array, Array]) -> Array:
        q, places = block
        mask = (places[:, None] >= jnp.arange(t))[None, None] if causal else None
        return attention(q, *(a.astype(q.dtype) for a in wide), mask=mask)

    padded = jnp.pad(q, ((0, 0), (0, blocks * size - s), (0, 0), (0, 0)))
    each = padded.reshape(b, blocks, size, *q.shape[2:]).swapaxes(0, 1)
    out = jax.lax.map(of_block, (each, jnp.arange(blocks * size).reshape(blocks, size)))
    out = out.swapaxes(0, 1).reshape(padded.shape)[:, :s]
    return checkpoint_name(out, RESIDUALS)


def on_each_device(
    target: Target,
    attend: Attention,
    q: Streams,
    k: Streams,
    v: Streams,
    lengths: Int[Array, "b"] | None,
    norms: HeadNorms | None = None,
) -> tuple[Array, ...]:
    """Runs `attend` on each device's shard of rows and heads, because XLA cannot partition a kernel.

    A mesh axis that does not divide the rows, or the heads of queries and keys, is not used for sharding: its devices
    do the same work. The token axis shards heads instead of tokens during attention (DeepSpeed-Ulysses,
    arXiv 2309.14509), so it must divide the heads that are left on each device of the head axis.
    """
    rows_split = not q[0].shape[0] % target.parts(*target.rows)
    heads_split = not any(a.shape[2] % target.parts(TENSOR) for a in (q[0], k[0]))
    rows = target.rows if rows_split else None
    spec = PartitionSpec(rows, SEQUENCE, TENSOR if heads_split else None)
    parts = target.parts(SEQUENCE)
    of_q, of_k = ([stream.shape[1] for stream in streams] for streams in (q, k))

    def divisible(a: Float[Array, "b s h d"]) -> Float[Array, "b n h d"]:
        return jnp.pad(a, ((0, 0), (0, -a.shape[1] % parts), (0, 0), (0, 0)))

    def to_heads(streams: Streams, sizes: Sequence[int]) -> Streams:
        exchanged = (jax.lax.all_to_all(a, SEQUENCE, 2, 1, tiled=True) for a in streams)
        return tuple(a[:, :size] for a, size in zip(exchanged, sizes, strict=True))

    def attend_to_all(q, k, v, lengths, norms):
        """All-to-all from a shard of tokens to a shard of heads, and back."""
        out = attend(to_heads(q, of_q), to_heads(k, of_k), to_heads(v, of_k), lengths, norms)
        return tuple(jax.lax.all_to_all(divisible(a), SEQUENCE, 1, 2, tiled=True) for a in out)

    q, k, v = (tuple(map(divisible, streams)) for streams in (q, k, v))
    out = jax.shard_map(
        attend_to_all if parts > 1 else attend,
        mesh=target.mesh,
        in_specs=(spec, spec, spec, PartitionSpec(rows), PartitionSpec()),
        out_specs=spec,
        check_vma=False,  # a kernel does not declare over which axes its results vary
    )(q, k, v, lengths, norms)
    return tuple(a[:, :size] for a, size in zip(out, of_q, strict=True))
