"""The config.json of the Z-Image transformer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxtyping import Array, Int

from digen_jax.json_fields import fields_of, number

# Constants of diffusers' transformer_z_image.py.
MULTIPLE = 32  # SEQ_MULTI_OF
EMBEDDING = 256  # ADALN_EMBED_DIM


@dataclasses.dataclass(frozen=True)
class ZImageConfig:
    """The fields of diffusers' config.json, with its defaults; raises ValueError if they conflict.

    Attributes:
      axes_dims: channels of a head that turn with a token's position: its place in the caption, row, column.
      axes_lens: positions along each of these axes.
    """

    all_patch_size: tuple[int, ...] = (2,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = number(30, 1, 1000)
    n_refiner_layers: int = number(2, 1, 1000)
    n_heads: int = 30
    n_kv_heads: int = 30
    norm_eps: float = number(1e-5, 0, 1)
    qk_norm: Literal[True] = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: Literal[None] = None  # of reference images, which only the Omni models read
    rope_theta: float = number(256.0, 1, 1e12)
    t_scale: float = number(1000.0, 0)
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def __post_init__(self):
        if len(self.all_patch_size) != 1 or self.all_patch_size[0] < 1:
            raise ValueError(f"all_patch_size must be one number, not {list(self.all_patch_size)}.")
        if tuple(self.all_f_patch_size) != (1,):
            raise ValueError(f"all_f_patch_size must be [1], not {list(self.all_f_patch_size)}.")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"n_kv_heads must equal n_heads = {self.n_heads}, not {self.n_kv_heads}."
            )
        widths = self.axes_dims
        even = all(width > 0 and width % 2 == 0 for width in widths)
        if len(widths) != 3 or not even or sum(widths) * self.n_heads != self.dim:
            raise ValueError(
                f"axes_dims must be three even numbers whose sum is dim / n_heads = "
                f"{self.dim} / {self.n_heads}, not {list(widths)}."
            )
        if len(self.axes_lens) != 3 or min(self.axes_lens) < 1:
            raise ValueError(f"axes_lens must be three numbers from 1, not {list(self.axes_lens)}.")

    @property
    def patch(self) -> int:
        """Latents a token has along each side."""
        return self.all_patch_size[0]

    @property
    def hidden(self) -> int:
        """Width of a feed-forward network's hidden layer."""
        return int(self.dim / 3 * 8)

    @property
    def embedding(self) -> int:
        """Width of the embedding of time."""
        return min(self.dim, EMBEDDING)

    @property
    def longest_caption(self) -> int:
        """Tokens of a caption behind which there is a position for the image."""
        return (self.axes_lens[0] - 2) // MULTIPLE * MULTIPLE

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ZImageConfig":
        """Reads diffusers' config.json, ignoring keys that start with an underscore.

        Raises a ValueError that names a key that is unknown or whose value is not supported.
        """
        return cls(**fields_of(cls, config, "a Z-Image transformer"))


def filled_up(tokens: int | Int[Array, "b"]) -> int | Int[Array, "b"]:
    """The tokens of an image or caption with those that fill it up."""
    return tokens + -tokens % MULTIPLE
