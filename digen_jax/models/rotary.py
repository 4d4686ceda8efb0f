"""Rotary position embeddings of image transformers (Su et al., arXiv 2104.09864), over several axes of positions.

A head's channels are shared out among the axes. Channels 2i and 2i + 1 turn as a pair; language models pair i with
i + d/2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int
from numpy.typing import DTypeLike

Table = Float32[Array, "*b n d"] | Float32[np.ndarray, "n d"]


class Rotary(NamedTuple):
    """How far the channels of each token turn, the same in all heads, and in all rows or by row.

    Attributes:
      cos: the cosine of each channel's angle.
      sin: its sine, negative for the first channel of a pair.
    """

    cos: Table
    sin: Table


def image_positions(height: int, width: int, index: int = 0) -> Int[np.ndarray, "n 3"]:
    """(index, row, column) of an image's tokens, row by row; text is (0, 0, 0) in FLUX.

    `index` tells images apart: in FLUX.1 Kontext it is 1 for the image that is edited.
    """
    rows, columns = np.indices((height, width))
    return np.stack([np.full_like(rows, index), rows, columns], axis=-1).reshape(-1, 3)


def rotary_table(
    positions: Int[np.ndarray, "n axes"],
    widths: Sequence[int],
    theta: float,
    dtype: DTypeLike = np.float64,
) -> Rotary:
    """The table of some tokens.

    Args:
      positions: of each token along each axis.
      widths: channels of a head that turn with each axis, all even.
      theta: pair i of an axis of d channels turns by theta^(-2i/d) radians a position.
      dtype: of the angles: float64 in diffusers' `FluxPosEmbed`, float32 in its `QwenEmbedRope`.
    """
    exponents = [
        np.arange(0, width, 2).astype(dtype) / np.asarray(width, dtype) for width in widths
    ]
    # A power in float64, since those in float32 differ by library.
    pairs = [1 / (theta ** each.astype(np.float64)).astype(dtype) for each in exponents]
    axes = positions.T.astype(dtype)
    turns = [np.outer(axis, pair) for axis, pair in zip(axes, pairs, strict=True)]
    return turned_by(np.concatenate(turns, axis=1))


def turned_by(angles: Float[np.ndarray, "n half"]) -> Rotary:
    """The table of tokens whose pairs of channels turn by some angles, in radians."""
    angles = np.repeat(angles.astype(np.float64), 2, axis=1)
    signs = np.where(np.arange(angles.shape[1]) % 2, 1, -1)
    return Rotary(np.cos(angles).astype(np.float32), (np.sin(angles) * signs).astype(np.float32))


def rotate_pairs(x: Float[Array, "b n h d"], rotary: Rotary) -> Float[Array, "b n h d"]:
    """Turns the pairs of channels of every head, in float32, and rounds to x's dtype.

    A pair's channels change places by two rolls: an array [.., d/2, 2] would fill two of a TPU's 128 lanes.
    """
    wide = x.astype(jnp.float32)
    first = np.arange(x.shape[-1]) % 2 == 0
    swapped = jnp.where(first, jnp.roll(wide, -1, axis=-1), jnp.roll(wide, 1, axis=-1))
    cos, sin = (table[..., None, :] for table in rotary)
    return (wide * cos + swapped * sin).astype(x.dtype)
