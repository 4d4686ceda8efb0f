"""Processing of a batch in sequential chunks within a program, so that memory does not grow with the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from digen_jax.parallel.placement import DeviceGroup


def in_chunks(function: Callable[[Any], Any], batch: Any, at_once: int, group: DeviceGroup) -> Any:
    """`function` of a batch that is split over a mesh; to be called while tracing.

    Every chunk contains the same number of rows of each device, so that no row moves to another device. Of several
    chunks this number is a power of two, or `at_once`: on a TPU the decoder takes seven images 2.4 times as long as
    eight (estimated: docs/performance.md). If the rows do not fill the chunks, each device repeats its last row.

    Args:
      function: of rows that do not depend on one another: from arrays [n, ...] to arrays [n, ...].
      batch: arrays [b, ...] with b a multiple of the number of devices that split images.
      at_once: the most rows of a chunk on each device; if all fit, there is one chunk.
      group: the mesh.

    Returns:
      Arrays [b, ...].
    """
    split = jax.lax.with_sharding_constraint

    def on_own_rows(rows: Any) -> Any:
        # Otherwise XLA follows split parameters, and every device computes all rows.
        return split(function(split(rows, group.batch)), group.batch)

    devices, count = group.images, len(jax.tree.leaves(batch)[0])
    share = count // devices
    rounds = -(-share // at_once)
    if rounds <= 1:
        return on_own_rows(batch)
    rows = min(at_once, 1 << (-(-share // rounds) - 1).bit_length())

    def chunked(array: Shaped[Array, "b ..."]) -> Shaped[Array, "rounds n ..."]:
        apart = array.reshape(devices, share, *array.shape[1:])
        free = [(0, 0)] * (apart.ndim - 2)
        filled = jnp.pad(apart, [(0, 0), (0, rounds * rows - share), *free], mode="edge")
        chunks = filled.reshape(devices, rounds, rows, *array.shape[1:]).swapaxes(0, 1)
        return split(chunks.reshape(rounds, devices * rows, *array.shape[1:]), group.batch_of_steps)

    def joined(done: Shaped[Array, "rounds n ..."]) -> Shaped[Array, "b ..."]:
        apart = done.reshape(rounds, devices, rows, *done.shape[2:]).swapaxes(0, 1)
        apart = apart.reshape(devices, rounds * rows, *done.shape[2:])[:, :share]
        return split(apart.reshape(count, *done.shape[2:]), group.batch)

    return jax.tree.map(joined, jax.lax.map(on_own_rows, jax.tree.map(chunked, batch)))
