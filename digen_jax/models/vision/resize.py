"""Resizing with antialiasing, as Pillow does bytes and as torchvision does floating-point numbers.

Both compute a pixel of the result as a weighted mean of the pixels within the filter's support, which grows with the
factor of reduction; along rows first, then along columns. Pillow (src/libImaging/Resample.c) rounds weights to 22 bits
and the pixels between the passes to bytes; torchvision (torch's `_upsample_bicubic2d_aa`) rounds nothing. For some
sizes, such as pictures more than about twice as high as wide, Pillow 13 begins with the columns, so that some of its
bytes differ by a few.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

Filter = Literal["bilinear", "bicubic"]

SUPPORT: dict[Filter, float] = {"bilinear": 1.0, "bicubic": 2.0}
# Bits behind the point of Pillow's weights.
PRECISION = 22
# Weights are the sum of two integers, of which this many bits are the lower: products of each with bytes, and their
# sums, are exact in float32.
LOWER = 11
EXACT = 2**24


def _filter(kind: Filter, x: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n m"]:
    """A triangle, or Keys' cubic with a = -0.5 (Cubic convolution interpolation, IEEE TASSP 29, 1981)."""
    x = np.abs(x)
    if kind == "bilinear":
        return np.maximum(1 - x, 0)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0))


@functools.cache
def weights(kind: Filter, before: int, after: int) -> Float[np.ndarray, "after before"]:
    """The weight of each pixel of a row in each pixel of the resized row, in float64."""
    scale = before / after
    wider = max(scale, 1.0)
    support = SUPPORT[kind] * wider
    centre = (np.arange(after)[:, None] + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(int), 0)
    last = np.minimum((centre + support + 0.5).astype(int), before)
    pixel = np.arange(before)[None, :]
    found = _filter(kind, (pixel - centre + 0.5) * (1 / wider))
    found = np.where((pixel >= first) & (pixel < last), found, 0)
    return found / found.sum(axis=1, keepdims=True)


def resize_bytes(
    images: UInt8[Array, "b h w 3"], height: int, width: int, kind: Filter
) -> UInt8[Array, "b {height} {width} 3"]:
    """Exactly the bytes of Pillow's `Image.resize`, to its twelfth version, on any device.

    Raises:
      ValueError: pictures are larger than the products are exact for, about 16 times the new size.
    """
    x = _pass(images.astype(jnp.float32), 2, width, kind)
    return _pass(x, 1, height, kind).astype(jnp.uint8)


def _pass(
    x: Float32[Array, "b h w 3"], axis: int, size: int, kind: Filter
) -> Float32[Array, "..."]:
    """One pass; the numbers are whole, from 0 to 255, before and after it."""
    if x.shape[axis] == size:
        return x
    exact = weights(kind, x.shape[axis], size) * 2**PRECISION
    whole = np.trunc(exact + np.copysign(0.5, exact)).astype(np.int64)
    upper = (whole + 2 ** (LOWER - 1)) >> LOWER
    lower = whole - (upper << LOWER)
    if max(np.abs(part).sum(axis=1).max() for part in (upper, lower)) * 255 >= EXACT:
        raise ValueError(
            f"a side of {x.shape[axis]} pixels cannot be resized to {size} as Pillow does it: give smaller pictures"
        )
    high, low = (_weighted(part, x, axis).astype(jnp.int32) for part in (upper, lower))
    half: Int32[Array, ""] = jnp.int32(2 ** (PRECISION - 1))
    total = (high << LOWER) + low + half
    return jnp.clip(total >> PRECISION, 0, 255).astype(jnp.float32)


def resize(
    images: Float[Array, "b h w 3"], height: int, width: int, kind: Filter
) -> Float32[Array, "b {height} {width} 3"]:
    """As torchvision's `resize(antialias=True)` of floating-point pictures; bicubic may leave their range."""
    x = images.astype(jnp.float32)
    for axis, size in ((2, width), (1, height)):
        if x.shape[axis] != size:
            x = _weighted(weights(kind, x.shape[axis], size), x, axis)
    return x


def _weighted(matrix: np.ndarray, x: Float32[Array, "b h w 3"], axis: int) -> Float32[Array, "..."]:
    equation = {1: "oh,bhwc->bowc", 2: "ow,bhwc->bhoc"}[axis]
    matrix = jnp.asarray(matrix, jnp.float32)
    return jnp.einsum(equation, matrix, x, precision=jax.lax.Precision.HIGHEST)
