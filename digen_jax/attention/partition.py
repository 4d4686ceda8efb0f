"""Attention on a mesh: which part of it each device computes."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from digen_jax.attention.head_norms import HeadNorms
from digen_jax.target import Target

# Arrays [b s h d], of the tokens of several streams.
Streams = Sequence[Array]
Attention = Callable[[Streams, Streams, Streams, Int[Array, "b"] | None, HeadNorms | None], Streams]


def on_each_device(
    target: Target,
    attend: Attention,
    q: Streams,
    k: Streams,
    v: Streams,
    lengths: Int[Array, "b"] | None,
    norms: HeadNorms | None = None,
) -> Streams:
    """`attend` by each device for its rows and heads, because XLA cannot partition a kernel.

    An axis that does not divide the rows, or the heads of queries and keys, does not split them: its devices do
    the same work. The axis that splits tokens splits heads in their place while they attend (DeepSpeed-Ulysses,
    arXiv 2309.14509), and has to divide the heads that a device of the axis for heads has.
    """
    mesh, heads = target.mesh, target.heads
    rows_split = not q[0].shape[0] % math.prod(mesh.shape[axis] for axis in target.rows)
    heads_split = not any(a.shape[2] % mesh.shape[heads] for a in (q[0], k[0]))
    rows = target.rows if rows_split else None
    spec = PartitionSpec(rows, target.tokens, heads if heads_split else None)
    parts, sizes = mesh.shape[target.tokens], [stream.shape[1] for stream in q]
    if parts > 1:
        of_k = [stream.shape[1] for stream in k]
        attend = functools.partial(_exchanged, attend, target.tokens, sizes, of_k)
    out = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(rows), PartitionSpec()),
        out_specs=spec,
        check_vma=False,  # a kernel does not say over which axes its results vary
    )(*(tuple(_divisible(a, parts) for a in streams) for streams in (q, k, v)), lengths, norms)
    return tuple(a[:, :size] for a, size in zip(out, sizes, strict=True))


def _exchanged(
    attend: Attention,
    axis: str,
    of_q: Sequence[int],
    of_k: Sequence[int],
    q: Streams,
    k: Streams,
    v: Streams,
    lengths: Int[Array, "b"] | None,
    norms: HeadNorms | None,
) -> Streams:
    """On one device: its tokens of all its heads become all tokens of some of these, and back.

    `of_q` and `of_k` are the tokens of each stream, without those that make an axis divide them.
    """

    def whole(streams: Streams, sizes: Sequence[int]) -> Streams:
        exchanged = (jax.lax.all_to_all(a, axis, 2, 1, tiled=True) for a in streams)
        return tuple(a[:, :size] for a, size in zip(exchanged, sizes, strict=True))

    out = attend(whole(q, of_q), whole(k, of_k), whole(v, of_k), lengths, norms)
    parts = jax.lax.axis_size(axis)
    return tuple(jax.lax.all_to_all(_divisible(a, parts), axis, 1, 2, tiled=True) for a in out)


def _divisible(a: Float[Array, "b s h d"], parts: int) -> Float[Array, "b n h d"]:
    """With zero tokens behind so that the parts are equal."""
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % parts), (0, 0), (0, 0)))
