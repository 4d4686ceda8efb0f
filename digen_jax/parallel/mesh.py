"""Device mesh axes: every mesh has all of them, and unused ones have size 1.

| axis     | splits                                                                                        |
| -------- | --------------------------------------------------------------------------------------------- |
| time     | the denoising steps of a training pass                                                        |
| data     | images                                                                                        |
| fsdp     | images, and parameters that are gathered before use (ZeRO, arXiv 1910.02054)                  |
| tensor   | parameters by heads and inner widths, so that each device computes a part (arXiv 1909.08053)  |
| sequence | tokens, or heads in attention, so that each device has a part of the activations              |

Devices that differ only in `tensor` or `sequence` work on the same images.

`put`, `fetch` and `job_devices` are for meshes whose devices belong to several processes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Shaped

from digen_jax.errors import ConfigError
from digen_jax.process import job

TIME, DATA, FSDP, TENSOR, SEQUENCE = "time", "data", "fsdp", "tensor", "sequence"

BATCH = (DATA, FSDP)  # axes that split images
MODEL = (TENSOR, SEQUENCE)  # axes that split the work on an image; their devices are neighbours
SAMPLES = (TIME, *BATCH)  # axes with different samples: a gradient is the sum over them
PARAMETERS = (FSDP, TENSOR)  # axes that may split a parameter
ALL = (*SAMPLES, *MODEL)


def axis_sizes(**given: int) -> dict[str, int]:
    """Returns the sizes of all axes; unspecified ones are 1."""
    return dict.fromkeys(ALL, 1) | given


def make_mesh(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    """Creates a mesh of all devices in order, the last axis varying fastest; `sizes` as in `axis_sizes`."""
    grid = np.asarray(devices).reshape(list(axis_sizes(**sizes).values()))
    return Mesh(grid, ALL, axis_types=(AxisType.Auto,) * len(ALL))


def parts(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the product of the sizes of some axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def put(value: Any, sharding: Sharding) -> Array:
    """Shards a value over a mesh; every process passes the full value. Typed keys are supported.

    `jax.device_put` does the same, but over several processes it first compares all values.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def any_of(mask: Bool[np.ndarray, "n"], mesh: Mesh) -> Bool[np.ndarray, "n"]:
    """Combines the masks of all processes of a mesh by logical or; every process must call it."""
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # one per device
    masks = jax.make_array_from_callback(
        (mesh.size, len(mask)), rows, lambda index: mask[None, index[1]]
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    return fetch(jax.jit(lambda masks: masks.any(0), out_shardings=replicated)(masks))


def fetch(array: Shaped[Array, "..."]) -> Shaped[np.ndarray, "..."]:
    """Returns the full array on the host of every process; if it spans several processes, all must call it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def job_devices(count: int, field: str) -> list[jax.Device]:
    """Returns the devices for the mesh of a config field, the same number from each process of this process group.

    Raises:
      ConfigError: a process has too few devices.
    """
    processes = job.members() or range(job.size())
    share, found = count // len(processes), []
    for process in processes:
        local = [one for one in jax.devices() if one.process_index == process]
        if len(local) < share:
            raise ConfigError(
                f"{field} has {count} devices, but its process has {len(local)} ({jax.devices()[0].device_kind}): make "
                "it smaller, or start it where there are more"
            )
        found += local[:share]
    return found
