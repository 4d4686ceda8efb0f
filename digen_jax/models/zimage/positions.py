"""Positions of Z-Image's tokens on three axes: a caption's token has its place, one of the image its row and column.

caption  (1 + i, 0, 0)          for i up to the filled-up length n
image    (n + 1, row, column)
what fills up the image  (0, 0, 0)
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from digen_jax.models.rotary import Rotary, turned_by
from digen_jax.models.zimage.config import ZImageConfig


def caption_rotary(config: ZImageConfig, tokens: int) -> Rotary:
    """The table of captions of so many tokens, which is the same for all rows."""
    still = np.zeros((tokens, sum(config.axes_dims[1:]) // 2), np.float32)
    return turned_by(np.concatenate([_angles(config, 0, tokens + 1)[1:], still], axis=1))


def image_rotary(
    config: ZImageConfig, grid: tuple[int, int], tokens: int, lengths: Int[Array, "b"]
) -> Rotary:
    """The table of each row's image, which lies behind its caption.

    Args:
      config: the transformer's.
      grid: rows and columns of patches.
      tokens: with those that fill up.
      lengths: each caption's filled-up length.
    """
    rows, columns = (index.reshape(-1) for index in np.indices(grid))
    inside = [_angles(config, 1, grid[0])[rows], _angles(config, 2, grid[1])[columns]]
    inside = np.pad(np.concatenate(inside, axis=1), ((0, tokens - rows.size), (0, 0)))
    behind = turned_by(_angles(config, 0, config.longest_caption + 2))
    filling = np.arange(tokens) >= rows.size
    places = jnp.where(filling, 0, lengths[:, None] + 1)
    first = Rotary(*(jnp.asarray(table)[places] for table in behind))
    return Rotary(
        *(
            jnp.concatenate([a, jnp.broadcast_to(b, (*a.shape[:2], b.shape[-1]))], axis=-1)
            for a, b in zip(first, turned_by(inside), strict=True)
        )
    )


def joined(image: Rotary, caption: Rotary) -> Rotary:
    """The table of both, the caption's behind the image's."""
    return Rotary(
        *(
            jnp.concatenate([i, jnp.broadcast_to(c, (len(i), *c.shape))], axis=1)
            for i, c in zip(image, caption, strict=True)
        )
    )


def _angles(config: ZImageConfig, axis: int, positions: int) -> Float[np.ndarray, "n half"]:
    """Of the pairs that turn with an axis at its first positions; float64 rounded to float32, as in diffusers."""
    width = config.axes_dims[axis]
    pairs = 1 / config.rope_theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    return np.outer(np.arange(positions), pairs).astype(np.float32)
