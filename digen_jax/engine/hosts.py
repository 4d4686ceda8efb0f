"""Arrays on a mesh whose devices belong to several processes, from and to numbers that each has on its host."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import Array, Shaped


def put(value: Any, sharding: Sharding) -> Array:
    """An array that every process has whole, typed keys too, laid out over a mesh.

    `jax.device_put` does the same, but over several processes it compares the values of all first.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def fetch(array: Shaped[Array, "..."]) -> Shaped[np.ndarray, "..."]:
    """All of an array on the host of every process; where it is split over several, all must call."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
