"""Processing of a batch in sequential chunks within a program, so that memory does not grow with the batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from digen_jax.engine.placement import DeviceGroup


def in_chunks(
    function: Callable[[Shaped[Array, "n ..."]], Shaped[Array, "n ..."]],
    batch: Shaped[Array, "b ..."],
    at_once: int,
    group: DeviceGroup,
) -> Shaped[Array, "b ..."]:
    """`function` of a batch that is split over a mesh; to be called while tracing.

    Every chunk contains the same number of rows of each device, so that no row moves to another device. If the
    rows do not fill the chunks, each device repeats its last row, fewer times than there are chunks.

    Args:
      function: of rows that do not depend on one another.
      batch: b rows, a multiple of the number of devices that split images.
      at_once: the most rows of a chunk on each device; if all fit, there is one chunk.
      group: the mesh.
    """
    split = jax.lax.with_sharding_constraint

    def on_own_rows(rows: Shaped[Array, "n ..."]) -> Shaped[Array, "n ..."]:
        # Otherwise XLA follows split parameters, and every device computes all rows.
        return split(function(split(rows, group.batch)), group.batch)

    devices = group.images
    share = len(batch) // devices
    rounds = -(-share // at_once)
    if rounds <= 1:
        return on_own_rows(batch)
    rows = -(-share // rounds)
    apart = batch.reshape(devices, share, *batch.shape[1:])
    filled = jnp.pad(
        apart, [(0, 0), (0, rounds * rows - share)] + [(0, 0)] * (apart.ndim - 2), mode="edge"
    )
    chunks = filled.reshape(devices, rounds, rows, *batch.shape[1:]).swapaxes(0, 1)
    chunks = chunks.reshape(rounds, devices * rows, *batch.shape[1:])
    done = jax.lax.map(on_own_rows, split(chunks, group.batch_of_steps))
    apart = done.reshape(rounds, devices, rows, *done.shape[2:]).swapaxes(0, 1)
    apart = apart.reshape(devices, rounds * rows, *done.shape[2:])[:, :share]
    return split(apart.reshape(len(batch), *done.shape[2:]), group.batch)
