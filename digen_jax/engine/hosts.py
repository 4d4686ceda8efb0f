"""Converts arrays on a mesh whose devices belong to several processes from and to numbers on the hosts."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import Array, Shaped


def put(value: Any, sharding: Sharding) -> Array:
    """Lays out a value that every process has whole, typed keys included, over a mesh.

    `jax.device_put` does the same, but over several processes it first compares all values.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def fetch(array: Shaped[Array, "..."]) -> Shaped[np.ndarray, "..."]:
    """The whole array on the host of every process; if it is split over several processes, all must call."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
