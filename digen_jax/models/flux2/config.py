"""The config.json of the FLUX.2 transformer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from digen_jax.json_fields import fields_of, number
from digen_jax.models.layers import EPSILON, TIME_FEATURES

AXES = 4


@dataclasses.dataclass(frozen=True)
class Flux2Config:
    """The fields of diffusers' config.json, with its defaults but for guidance; raises ValueError if they conflict.

    FLUX.2-dev is given its guidance as a number (`guidance_embeds`), and has another text encoder; klein is not.

    Attributes:
      in_channels: of a token, which is one of the autoencoder's normed patches.
      mlp_ratio: width of a feed-forward network's hidden layer, in widths of the transformer.
      axes_dims_rope: channels of a head that turn with a token's image, row, column, and place in the text.
    """

    patch_size: int = number(1, 1, 1)
    in_channels: int = 128
    out_channels: int = 128
    num_layers: int = number(8, 1, 1000)
    num_single_layers: int = number(48, 1, 1000)
    attention_head_dim: int = 128
    num_attention_heads: int = 48
    joint_attention_dim: int = 15360
    timestep_guidance_channels: int = number(TIME_FEATURES, TIME_FEATURES, TIME_FEATURES)
    mlp_ratio: float = number(3.0, 0.01, 100)
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: float = number(2000.0, 1, 1e12)
    eps: float = number(EPSILON, EPSILON, EPSILON)
    guidance_embeds: Literal[False] = False

    def __post_init__(self):
        widths = self.axes_dims_rope
        positive = all(width > 0 and width % 2 == 0 for width in widths)
        if len(widths) != AXES or not positive or sum(widths) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope must be four even numbers whose sum is attention_head_dim = "
                f"{self.attention_head_dim}, not {list(widths)}."
            )
        if self.hidden < 1:
            raise ValueError(f"mlp_ratio times {self.dim} must be 1 or more, not {self.mlp_ratio}.")

    @property
    def dim(self) -> int:
        """Width of the transformer."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """Width of a feed-forward network's hidden layer."""
        return int(self.dim * self.mlp_ratio)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Flux2Config":
        """Reads diffusers' config.json, ignoring keys that start with an underscore.

        Raises a ValueError that names a key that is unknown or whose value is not supported.
        """
        if config.get("out_channels") is None:
            config = {**config, "out_channels": config.get("in_channels", cls.in_channels)}
        # diffusers' default, which the files of klein do not rely on.
        config = {"guidance_embeds": True, **config}
        return cls(**fields_of(cls, config, "a FLUX.2 transformer"))
