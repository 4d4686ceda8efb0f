"""Converts arrays on a mesh whose devices belong to several processes from and to numbers on the hosts."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Shaped

from digen_jax.errors import ConfigError
from digen_jax.process import team


def put(value: Any, sharding: Sharding) -> Array:
    """Lays out a value that every process has whole, typed keys included, over a mesh.

    `jax.device_put` does the same, but over several processes it first compares all values.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def any_of(mask: Bool[np.ndarray, "n"], mesh: Mesh) -> Bool[np.ndarray, "n"]:
    """Where some process of a mesh has true; all of them must call."""
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # one for each device
    masks = jax.make_array_from_callback(
        (mesh.size, len(mask)), rows, lambda index: mask[None, index[1]]
    )
    whole = NamedSharding(mesh, PartitionSpec())
    return fetch(jax.jit(lambda masks: masks.any(0), out_shardings=whole)(masks))


def fetch(array: Shaped[Array, "..."]) -> Shaped[np.ndarray, "..."]:
    """The whole array on the host of every process; if it is split over several processes, all must call."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def job_devices(count: int, field: str) -> list[jax.Device]:
    """The devices for the mesh of a field of the config: equally many of each process that works with this one.

    Raises:
      ConfigError: a process has fewer.
    """
    processes = team.members() or range(team.size())
    own, found = count // len(processes), []
    for process in processes:
        its = [one for one in jax.devices() if one.process_index == process]
        if len(its) < own:
            raise ConfigError(
                f"{field} has {count} devices, but its process has {len(its)} ({jax.devices()[0].device_kind}): make "
                "it smaller, or start it where there are more"
            )
        found += its[:own]
    return found
