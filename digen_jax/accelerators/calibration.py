"""What plain matrix products reach by the same estimate, as a scale for a program's share of the peak."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from digen_jax.accelerators.chips import Chip
from digen_jax.accelerators.costs import estimate


def shares(
    device: jax.Device, chip: Chip, rows: int, width: int
) -> dict[tuple[int, int, int], float]:
    """Shares of the chip's peak of bfloat16 products [rows k] [k n], by (rows, k, n).

    They are the products of a transformer of that width: d x d, d x 4d and 4d x d.
    """
    sizes = [(width, width), (width, 4 * width), (4 * width, width)]
    return {(rows, k, n): _share(device, chip, (rows, k, n)) for k, n in sizes}


def _share(device: jax.Device, chip: Chip, sizes: Sequence[int]) -> float:
    m, k, n = sizes
    lying = jax.sharding.SingleDeviceSharding(device)
    left, right = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lying) for shape in ((m, k), (k, n))
    )
    compiled = jax.jit(jnp.matmul).lower(left, right).compile()
    return 2 * m * k * n / chip.flops / estimate(compiled, chip).seconds
