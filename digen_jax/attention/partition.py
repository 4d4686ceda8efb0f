"""Attention on a mesh: which part of it each device computes."""

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from digen_jax.attention.surroundings import Surroundings

# Arrays [b s h d], of the tokens of several streams.
Streams = Sequence[Array]
Attention = Callable[[Streams, Streams, Streams, Int[Array, "b"] | None], Streams]


def on_each_device(
    around: Surroundings,
    attend: Attention,
    q: Streams,
    k: Streams,
    v: Streams,
    lengths: Int[Array, "b"] | None,
) -> Streams:
    """`attend` by each device for its rows and heads, because XLA cannot partition a kernel.

    An axis that does not divide the rows, or the heads of queries and keys, does not split them: its devices do
    the same work.
    """
    mesh, heads = around.mesh, around.heads
    rows_split = not q[0].shape[0] % math.prod(mesh.shape[axis] for axis in around.rows)
    heads_split = not any(a.shape[2] % mesh.shape[heads] for a in (q[0], k[0]))
    rows = around.rows if rows_split else None
    spec = PartitionSpec(rows, None, heads if heads_split else None)
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(rows)),
        out_specs=spec,
        check_vma=False,  # a kernel does not say over which axes its results vary
    )(q, k, v, lengths)
