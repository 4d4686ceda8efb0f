"""The sum of the passes over a fragment: one scan, with the gradient taken inside its body."""

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
) -> Any:
    """`totals` + the sum over all passes of gradient(*parameters, shared, pass), with the memory of one pass.

    If the parameters are whole on every device and tokens are not split, each device sums its own share, and the
    sums are reduced once, at the end, over the devices with other samples; otherwise XLA reduces in every pass.
    `layout` contains the totals' shardings.
    """

    def scan(parameters, shared, micros, totals, merge, laid_out):
        def body(totals, micro):
            new = gradient(*parameters, shared, merge(micro))
            return laid_out(jax.tree.map(jnp.add, totals, new)), None

        return jax.lax.scan(body, totals, micros)[0]

    def own_share(parameters, shared, micros, totals):
        first = jax.lax.axis_index(SAMPLES) == 0
        mine = jax.tree.map(lambda a: jnp.where(first, a, 0), totals)
        with on_device(group.mesh.devices.flat[0], group.attention):
            mine = scan(parameters, shared, micros, mine, merged_on_device, lambda sums: sums)
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
                lambda micro: merged(micro, group),
                lambda sums: jax.lax.with_sharding_constraint(sums, layout),
            )
    # Unchecked, because the check would make every gradient of whole parameters a sum over all devices.
    return jax.shard_map(
        own_share,
        mesh=group.mesh,
        in_specs=(whole, whole, group.passes(1).spec, whole),
        out_specs=whole,
        check_vma=False,
    )(parameters, shared, micros, totals)
