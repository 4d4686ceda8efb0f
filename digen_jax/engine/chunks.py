"""A batch taken in chunks, one after the other within a program, so that memory does not grow with the batch."""

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
    """`function` of a batch that lies split over a mesh, to be called while tracing.

    Every chunk holds the same number of rows of each device, so that no row moves to another device. Where the
    rows do not fill the chunks, each device repeats its last one, fewer times than there are chunks.

    Args:
      function: of rows that do not depend on one another.
      batch: b rows, a multiple of the devices that images are split over.
      at_once: the rows of a chunk on each device, at most; where all fit they are taken at once.
      group: the mesh.
    """
    split = jax.lax.with_sharding_constraint

    def on_own_rows(rows: Shaped[Array, "n ..."]) -> Shaped[Array, "n ..."]:
        # Else XLA follows parameters that are split, and has every device compute all rows.
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
