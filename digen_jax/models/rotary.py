"""Rotary position embeddings (Su et al., arXiv 2104.09864): pairs of channels are rotated by a token's position.

Image transformers split a head's channels over several position axes and rotate channels 2i and 2i + 1 as a pair
(`rotary_table`, `rotate_pairs`). Language models have one axis, and pair i with i + d/2 (`rotate_halves`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int
from numpy.typing import DTypeLike

from digen_jax.files import number

Table = Float32[Array, "*b n d"] | Float32[np.ndarray, "n d"]


class Rotary(NamedTuple):
    """Rotation of each token's channels, shared by all heads, and by all rows or per row.

    Attributes:
      cos: Cosine of each channel's angle.
      sin: Sine of each channel's angle, negative for the first channel of a pair.
    """

    cos: Table
    sin: Table


def image_positions(height: int, width: int, index: int = 0) -> Int[np.ndarray, "n 3"]:
    """Returns (index, row, column) of an image's tokens, row by row; text is (0, 0, 0) in FLUX.

    `index` distinguishes images: in FLUX.1 Kontext it is 1 for the source image.
    """
    rows, columns = np.indices((height, width))
    return np.stack([np.full_like(rows, index), rows, columns], axis=-1).reshape(-1, 3)


def rotary_table(
    positions: Int[np.ndarray, "n axes"],
    widths: Sequence[int],
    theta: float,
    dtype: DTypeLike = np.float64,
) -> Rotary:
    """Returns the rotation table of tokens.

    Args:
      positions: Position of each token along each axis.
      widths: Channels of a head rotated by each axis, all even.
      theta: Pair i of an axis of d channels rotates by theta^(-2i/d) radians per position.
      dtype: dtype of the angles: float64 in diffusers' `FluxPosEmbed`, float32 in its `QwenEmbedRope`.
    """
    exponents = [
        np.arange(0, width, 2).astype(dtype) / np.asarray(width, dtype) for width in widths
    ]
    # Powers in float64, because float32 powers differ between libraries.
    pairs = [1 / (theta ** each.astype(np.float64)).astype(dtype) for each in exponents]
    axes = positions.T.astype(dtype)
    turns = [np.outer(axis, pair) for axis, pair in zip(axes, pairs, strict=True)]
    return turned_by(np.concatenate(turns, axis=1))


def turned_by(angles: Float[np.ndarray, "n half"]) -> Rotary:
    """Returns the table of tokens whose channel pairs rotate by `angles`, in radians."""
    angles = np.repeat(angles.astype(np.float64), 2, axis=1)
    signs = np.where(np.arange(angles.shape[1]) % 2, 1, -1)
    return Rotary(np.cos(angles).astype(np.float32), (np.sin(angles) * signs).astype(np.float32))


def video_rotary(
    widths: Sequence[int],
    grid: tuple[int, int, int],
    theta: float,
    dtype: DTypeLike = np.float64,
) -> Rotary:
    """Returns the table of a clip's tokens, whose position is (frame, row, column); see `rotary_table`.

    It is broadcast from a table for each axis, because a full one of 75,600 tokens is 77 MB of constants. `grid` is the
    clip's number of frames, rows and columns of tokens.
    """

    def along(axis: int) -> Rotary:
        positions = np.arange(grid[axis])[:, None]
        table = rotary_table(positions, widths[axis : axis + 1], theta, dtype)
        shape = [1, 1, 1, -1]
        shape[axis] = grid[axis]
        return Rotary(*(jnp.asarray(part).reshape(shape) for part in table))

    def together(tables: Sequence[Array]) -> Float[Array, "n d"]:
        wide = [jnp.broadcast_to(table, (*grid, table.shape[-1])) for table in tables]
        return jnp.concatenate(wide, axis=-1).reshape(math.prod(grid), -1)

    return Rotary(*map(together, zip(*map(along, range(3)), strict=True)))


def joined(first: Rotary, second: Rotary) -> Rotary:
    """Concatenates the tables of two streams."""
    return Rotary(*(jnp.concatenate(tables) for tables in zip(first, second, strict=True)))


def rotate_pairs(x: Float[Array, "b n h d"], rotary: Rotary) -> Float[Array, "b n h d"]:
    """Rotates the channel pairs of every head, in float32, and rounds to x's dtype.

    Channels of a pair are swapped by two rolls: an array [.., d/2, 2] would fill two of a TPU's 128 lanes.
    """
    wide = x.astype(jnp.float32)
    first = np.arange(x.shape[-1]) % 2 == 0
    swapped = jnp.where(first, jnp.roll(wide, -1, axis=-1), jnp.roll(wide, 1, axis=-1))
    cos, sin = (table[..., None, :] for table in rotary)
    return (wide * cos + swapped * sin).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 for longer texts, with transformers' names (its `rope_type` "llama3").

    A wavelength above `original_max_position_embeddings / low_freq_factor` tokens is multiplied by `factor`, one below
    `original_max_position_embeddings / high_freq_factor` is unchanged, and wavelengths between are interpolated.
    """

    factor: float | int = number(dataclasses.MISSING, 1)
    low_freq_factor: float | int = number(dataclasses.MISSING, 1e-6)
    high_freq_factor: float | int = number(dataclasses.MISSING, 1e-6)
    original_max_position_embeddings: int = number(dataclasses.MISSING, 1)

    def __post_init__(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be larger than low_freq_factor"
                f" {self.low_freq_factor}"
            )


def inverse_frequencies(width: int, theta: float) -> Float32[np.ndarray, "half"]:
    """Returns theta^(-2i / width) for the pairs i of a head's channels, in radians per token, rounded as in torch."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = np.power(np.float64(theta), exponents.astype(np.float64))
    return np.float32(1) / powers.astype(np.float32)


def llama3_scaled(
    frequencies: Float32[np.ndarray, "half"], scaling: Llama3Scaling
) -> Float32[np.ndarray, "half"]:
    """Scales frequencies by `Llama3Scaling`."""
    frequencies = frequencies.astype(np.float64)
    waves = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def cos_sin(
    positions: Float32[np.ndarray, "n"] | Float32[np.ndarray, "n half"],
    frequencies: Float32[np.ndarray, "half"],
) -> tuple[Float32[np.ndarray, "n half"], Float32[np.ndarray, "n half"]]:
    """Returns cosine and sine of float32 angles, which are positions, of a token or of each pair, times frequencies."""
    angles = (positions.reshape(len(positions), -1) * frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate_halves(
    x: Float[Array, "b n h d"],
    cos: Float32[np.ndarray, "n half"],
    sin: Float32[np.ndarray, "n half"],
) -> Float[Array, "b n h d"]:
    """Rotates channels i and i + d/2 as a pair, in float32, and rounds to x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
