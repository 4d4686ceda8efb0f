"""What plain matrix products reach by the same estimate, as a scale for a program's share of the peak.

Only the compiler's own estimate counts here: a program of one product also has to fetch its operands first, which in a
network happens while other operations run.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from digen_jax.planning.chips import Chip

# Sixteen sequences of Stable Diffusion 3.5 at 512 x 512: 1,024 patches and 78 tokens of text.
ROWS = 16 * 1102


def shares(
    device: jax.Device,
    chip: Chip,
    width: int,
    seconds: Callable[[jax.stages.Lowered], float],
    rows: int = ROWS,
) -> dict[tuple[int, int, int], float]:
    """Shares of the chip's peak of bfloat16 products [rows k] [k n], by (rows, k, n).

    They are the products of a transformer of that width: d x d, d x 4d and 4d x d.

    Args:
      device: for which they are compiled.
      chip: the facts of it.
      width: d.
      seconds: of such a program, estimated by the compiler or measured.
      rows: of the left factor.
    """
    found = {}
    for k, n in ((width, width), (width, 4 * width), (4 * width, width)):
        took = seconds(_product(device, rows, k, n))
        found[rows, k, n] = 2 * rows * k * n / chip.flops / took
    return found


def _product(device: jax.Device, m: int, k: int, n: int) -> jax.stages.Lowered:
    lying = jax.sharding.SingleDeviceSharding(device)
    left, right = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lying) for shape in ((m, k), (k, n))
    )
    return jax.jit(jnp.matmul).lower(left, right)
