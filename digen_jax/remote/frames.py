"""Arrays as bytes: safetensors files of a bounded size, each with pieces of a few arrays."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Shaped, UInt8
from safetensors import SafetensorError
from safetensors.numpy import load, save

from digen_jax.remote.wire import FRAME

HEADER = 100  # bytes of a frame that a piece takes beside its own, about
MOST = 512  # pieces of a frame


class Cut(NamedTuple):
    """Some bytes of an array."""

    array: int
    start: int
    stop: int


def plan(arrays: Sequence[jax.ShapeDtypeStruct], size: int | None = None) -> list[list[Cut]]:
    """The pieces of every frame, of `size` or FRAME bytes; giver and taker make the same of the same arrays."""
    size = FRAME if size is None else size
    frames: list[list[Cut]] = []
    room = 0
    for number, array in enumerate(arrays):
        whole, start = math.prod(array.shape) * array.dtype.itemsize, 0
        while start < whole:
            if room <= HEADER or len(frames[-1]) >= MOST:
                frames.append([])
                room = size
            stop = min(whole, start + room - HEADER)
            frames[-1].append(Cut(number, start, stop))
            room -= stop - start + HEADER
            start = stop
    return frames


def frame(cuts: Sequence[Cut], bytes_of: Callable[[int], UInt8[np.ndarray, "_"]]) -> bytes:
    """A frame; `bytes_of` are those of an array by its number."""
    return save({str(cut.array): bytes_of(cut.array)[cut.start : cut.stop] for cut in cuts})


def gathered(
    arrays: Sequence[jax.ShapeDtypeStruct], frames: Iterator[bytes], size: int | None = None
) -> Iterator[tuple[int, Shaped[np.ndarray, "..."]]]:
    """(number, array) of each array as soon as its last byte has come.

    Raises:
      ValueError: a frame has other pieces than it must have.
    """
    for number, array in enumerate(arrays):
        if not math.prod(array.shape):
            yield number, np.zeros(array.shape, array.dtype)
    begun: dict[int, np.ndarray] = {}
    for cuts, found in zip(plan(arrays, size), frames, strict=True):
        try:
            pieces = load(found)
        except SafetensorError as error:
            raise ValueError(f"a frame that cannot be read: {error}") from error
        sizes = {name: (piece.dtype, piece.shape) for name, piece in pieces.items()}
        if sizes != {str(cut.array): (np.uint8, (cut.stop - cut.start,)) for cut in cuts}:
            raise ValueError(f"a frame with the pieces {', '.join(sizes)} of other arrays")
        for cut in cuts:
            array = arrays[cut.array]
            whole = math.prod(array.shape) * array.dtype.itemsize
            held = begun.setdefault(cut.array, np.empty(whole, np.uint8))
            held[cut.start : cut.stop] = pieces[str(cut.array)]
            if cut.stop == whole:
                yield cut.array, begun.pop(cut.array).view(array.dtype).reshape(array.shape)


def to_bytes(array: Shaped[Array, "..."] | Shaped[np.ndarray, "..."]) -> UInt8[np.ndarray, "_"]:
    """All bytes of an array, row by row. A JAX array keeps no copy of them."""
    if isinstance(array, jax.Array):
        # np.asarray leaves a copy on the host with the array that it is called of.
        shards = [shard.data for shard in array.addressable_shards]
        array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
