"""The axes of a device mesh: every mesh has them all, of size 1 where they are not used.

| axis     | splits                                                                                        |
| -------- | --------------------------------------------------------------------------------------------- |
| time     | the denoising steps of a training pass                                                        |
| data     | images                                                                                        |
| fsdp     | images, and parameters that are gathered where they are used (ZeRO, arXiv 1910.02054)         |
| tensor   | parameters by heads and inner widths, so that each device computes a part (arXiv 1909.08053)  |
| sequence | nothing yet: tokens                                                                           |

Devices that differ in `tensor` or `sequence` alone work on the same images.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

TIME, DATA, FSDP, TENSOR, SEQUENCE = "time", "data", "fsdp", "tensor", "sequence"

# What images are split over.
BATCH = (DATA, FSDP)
# What splits the work on an image, so that neighbouring devices share it.
MODEL = (TENSOR, SEQUENCE)
# Whose devices train other samples each: a gradient is the sum over these, and only these.
SAMPLES = (TIME, *BATCH)
# What a parameter may be split over.
PARAMETERS = (FSDP, TENSOR)
ALL = (*SAMPLES, *MODEL)


def axis_sizes(**given: int) -> dict[str, int]:
    """The sizes of all axes, 1 of those that are not given."""
    return dict.fromkeys(ALL, 1) | given


def make_mesh(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    """A mesh of all the devices in their order, the last axis first, by the sizes of `axis_sizes`."""
    grid = np.asarray(devices).reshape(list(axis_sizes(**sizes).values()))
    return Mesh(grid, ALL, axis_types=(AxisType.Auto,) * len(ALL))


def parts(mesh: Mesh, axes: Sequence[str]) -> int:
    """Into how many parts some axes split."""
    return math.prod(mesh.shape[axis] for axis in axes)
