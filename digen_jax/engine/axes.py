"""The axes of a device mesh: every mesh has all of them, unused ones with size 1.

| axis     | splits                                                                                        |
| -------- | --------------------------------------------------------------------------------------------- |
| time     | the denoising steps of a training pass                                                        |
| data     | images                                                                                        |
| fsdp     | images, and parameters that are gathered before use (ZeRO, arXiv 1910.02054)                  |
| tensor   | parameters by heads and inner widths, so that each device computes a part (arXiv 1909.08053)  |
| sequence | tokens, and in attention heads, so that each device has a part of the activations             |

Devices that differ only in `tensor` or `sequence` work on the same images.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

TIME, DATA, FSDP, TENSOR, SEQUENCE = "time", "data", "fsdp", "tensor", "sequence"

# The axes that split images.
BATCH = (DATA, FSDP)
# The axes that split the work on an image, so that neighbouring devices share it.
MODEL = (TENSOR, SEQUENCE)
# The axes whose devices train different samples: a gradient is the sum over these, and only these.
SAMPLES = (TIME, *BATCH)
# The axes that may split a parameter.
PARAMETERS = (FSDP, TENSOR)
ALL = (*SAMPLES, *MODEL)


def axis_sizes(**given: int) -> dict[str, int]:
    """The sizes of all axes; 1 for those that are not given."""
    return dict.fromkeys(ALL, 1) | given


def make_mesh(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    """A mesh of all devices in their order, with the last axis varying fastest, by the sizes of `axis_sizes`."""
    grid = np.asarray(devices).reshape(list(axis_sizes(**sizes).values()))
    return Mesh(grid, ALL, axis_types=(AxisType.Auto,) * len(ALL))


def parts(mesh: Mesh, axes: Sequence[str]) -> int:
    """The number of parts into which some axes split."""
    return math.prod(mesh.shape[axis] for axis in axes)
