"""The sum of the passes over a chunk: one loop, with the gradient taken inside its body."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from digen_jax.engine.activations import traced_on
from digen_jax.engine.axes import SAMPLES, SEQUENCE
from digen_jax.engine.packing import MicroBatch, Shared, merged, merged_on_device
from digen_jax.engine.placement import DeviceGroup
from digen_jax.target import on_device


def sum_passes(
    gradient: Callable[..., Any],
    group: DeviceGroup,
    parameters: tuple[Any, ...],
    shared: Shared,
    micros: MicroBatch,
    totals: Any,
    layout: Any,
    piece: Any = None,
) -> Any:
    """`totals` + the sum over passes of gradient(*parameters, shared, pass), with the memory of one pass.

    `piece` is (first, count) of the passes, which may be traced, so that one program is for all pieces; None: all.

    If the parameters are whole on every device and tokens are not split, each device sums its own share, and the
    sums are reduced once, at the end, over the devices with other samples; otherwise XLA reduces in every pass.
    `layout` contains the totals' shardings.
    """

    def scan(parameters, shared, micros, totals, piece, merge, laid_out):
        def body(number, totals):
            micro = jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, number, 0, False), micros
            )
            new = gradient(*parameters, shared, merge(micro))
            return laid_out(jax.tree.map(jnp.add, totals, new))

        passes = len(jax.tree.leaves(micros)[0])
        first, count = (0, passes) if piece is None else piece
        # A chunk of which images are left out has fewer passes.
        end = passes if piece is None else jnp.minimum(first + count, passes)
        return jax.lax.fori_loop(first, end, body, totals)

    def own_share(parameters, shared, micros, totals, piece):
        first = jax.lax.axis_index(SAMPLES) == 0
        mine = jax.tree.map(lambda a: jnp.where(first, a, 0), totals)
        with on_device(group.mesh.devices.flat[0], group.attention):
            mine = scan(
                parameters, shared, micros, mine, piece, merged_on_device, lambda sums: sums
            )
        return jax.lax.psum(mine, SAMPLES)

    whole = PartitionSpec()
    apart = group.mesh.shape[SEQUENCE] == 1 and all(map(group.holds_whole, parameters))
    if group.mesh.size == 1 or not apart:
        with traced_on(group.merged, group.attention):
            return scan(
                parameters,
                shared,
                micros,
                totals,
                piece,
                lambda micro: merged(micro, group),
                lambda sums: jax.lax.with_sharding_constraint(sums, layout),
            )
    # Unchecked, because the check would make every gradient of whole parameters a sum over all devices.
    return jax.shard_map(
        own_share,
        mesh=group.mesh,
        in_specs=(whole, whole, group.passes(1).spec, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(parameters, shared, micros, totals, piece)
