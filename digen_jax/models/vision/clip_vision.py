"""CLIP's vision tower with its projection, of any size, and with either activation.

Radford et al., arXiv 2103.00020. Names follow transformers' CLIPVisionModelWithProjection, in which the norm before
the layers has a letter less: `pre_layrnorm`.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from digen_jax.json_fields import check_values, number
from digen_jax.models import clip_layers
from digen_jax.models.clip_layers import CLIPEncoder, check_layers, norm
from digen_jax.models.linear import patch_product

LISTS = clip_layers.LISTS

# The logical axes of kernels, see `logical_axes`.
AXES = (
    (r"/patch_embedding$", ("channels", "embed")),
    (r"/position_embedding$", ("positions", "embed")),
    (r"vision_model/embeddings$", ("embed",)),
    *clip_layers.AXES,
    (r"lay(e)?r_?norm", ("embed",)),
    (r"^visual_projection$", ("embed", "text")),
)

# A buffer that old versions of transformers saved with the parameters.
IGNORED: tuple[str, ...] = ("vision_model.embeddings.position_ids",)


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig:
    """The fields of transformers' config.json that change the network, with its defaults."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    projection_dim: int = 512
    num_hidden_layers: int = number(12, 1, 1000)
    num_attention_heads: int = 12
    num_channels: int = number(3, 3, 3)
    image_size: int = number(224, 1, 2**14)
    patch_size: int = number(32, 1, 2**14)
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = number(1e-5, 0, 1)

    def __post_init__(self):
        check_layers(self)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CLIPVisionConfig":
        """The configuration in a transformers config.json, whose other fields are about training.

        Raises:
          ValueError: a field has a value that this network does not support.
        """
        if config.get("model_type", "clip_vision_model") != "clip_vision_model":
            raise ValueError(
                f"model_type must be 'clip_vision_model' but is {config['model_type']!r}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        check_values(cls, config)
        return cls(**{name: value for name, value in config.items() if name in known})


class CLIPVisionEmbeddings(nn.Module):
    """A class token and a token for each patch, with positions."""

    config: CLIPVisionConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Pixels to tokens: the class first, then patches row by row.

        Raises:
          ValueError: the picture does not have the size of the positions.
        """
        config, dtype, width = self.config, self.dtype, self.config.hidden_size
        if pixels.shape[1:3] != (config.image_size, config.image_size):
            raise ValueError(
                f"pictures are {pixels.shape[1]} x {pixels.shape[2]} pixels but image_size is {config.image_size}: "
                "resize them first"
            )
        patch = (config.patch_size, config.patch_size)
        embed = nn.Conv(
            width,
            patch,
            patch,
            "VALID",
            use_bias=False,
            dtype=dtype,
            conv_general_dilated=patch_product,
            name="patch_embedding",
        )
        patches = embed(pixels).reshape(len(pixels), -1, width)
        first = self.param("class_embedding", nn.initializers.normal(0.02), (width,))
        first = jnp.broadcast_to(first.astype(dtype), (len(pixels), 1, width))
        x = jnp.concatenate([first, patches], axis=1)
        table = nn.Embed(x.shape[1], width, dtype=dtype, name="position_embedding")
        return x + table(jnp.arange(x.shape[1]))


class CLIPVisionTransformer(nn.Module):
    """Embeddings, layers and the norms before and after them."""

    config: CLIPVisionConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b d"]:
        """Pixels to the normed last state of the class token, transformers' `pooler_output`."""
        config, dtype = self.config, self.dtype
        x = CLIPVisionEmbeddings(config, dtype, name="embeddings")(pixels)
        x = norm(config, dtype, "pre_layrnorm")(x)
        encoder = CLIPEncoder(config, dtype, causal=False, name="encoder")
        x, _ = encoder(x, config.num_hidden_layers)
        return norm(config, dtype, "post_layernorm")(x[:, 0])


class CLIPVisionModelWithProjection(nn.Module):
    """Pictures to embeddings in the space of texts; computes in and returns `dtype`."""

    config: CLIPVisionConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b p"]:
        """The `image_embeds` of transformers, of pixels normalised as the folder's preprocessor_config.json says.

        Raises:
          ValueError: the picture does not have the size of the positions.
        """
        pooled = CLIPVisionTransformer(self.config, self.dtype, name="vision_model")(pixels)
        project = nn.Dense(
            self.config.projection_dim, use_bias=False, dtype=self.dtype, name="visual_projection"
        )
        return project(pooled)
