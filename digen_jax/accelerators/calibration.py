"""What plain matrix products reach by the same estimate, as a scale for a program's share of the peak.

Only the compiler's own estimate counts here: a program of one product also has to fetch its operands first, which in a
network happens while other operations run.
"""

import jax
import jax.numpy as jnp

from digen_jax.accelerators.chips import Chip
from digen_jax.accelerators.costs import COMPILER, estimate

# Sixteen sequences of Stable Diffusion 3.5 at 512 x 512: 1,024 patches and 78 tokens of text.
ROWS = 16 * 1102


def shares(
    device: jax.Device, chip: Chip, width: int, rows: int = ROWS
) -> dict[tuple[int, int, int], float]:
    """Shares of the chip's peak of bfloat16 products [rows k] [k n], by (rows, k, n).

    They are the products of a transformer of that width: d x d, d x 4d and 4d x d.
    """
    sizes = [(width, width), (width, 4 * width), (4 * width, width)]
    return {(rows, k, n): _share(device, chip, rows, k, n) for k, n in sizes}


def _share(device: jax.Device, chip: Chip, m: int, k: int, n: int) -> float:
    lowered = lower_product(device, m, k, n)
    return 2 * m * k * n / chip.flops / estimate(lowered.compile(), chip).of(COMPILER)


def lower_product(device: jax.Device, m: int, k: int, n: int) -> jax.stages.Lowered:
    """The bfloat16 product [m k] [k n] on one device."""
    lying = jax.sharding.SingleDeviceSharding(device)
    left, right = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lying) for shape in ((m, k), (k, n))
    )
    return jax.jit(jnp.matmul).lower(left, right)
