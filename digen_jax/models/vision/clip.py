"""CLIP with both towers: embeddings of pictures and of texts in one space.

Radford et al., arXiv 2103.00020. Names follow transformers' CLIPModel.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from digen_jax.json_fields import LARGEST
from digen_jax.models import clip_layers
from digen_jax.models.text import clip_text
from digen_jax.models.text.clip_text import CLIPTextConfig, CLIPTextTransformer, check_length
from digen_jax.models.vision import clip_vision
from digen_jax.models.vision.clip_vision import CLIPVisionConfig, CLIPVisionTransformer

LISTS = clip_layers.LISTS
# The logical axes of kernels, see `logical_axes`; the scale has no dimension.
AXES = (*clip_vision.AXES, *clip_text.AXES, (r"^$", ()))
IGNORED = (*clip_vision.IGNORED, *clip_text.IGNORED)

# transformers' default width of the embeddings' space.
PROJECTION = 512


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """Both towers' configurations, whose `projection_dim` is the same."""

    text: CLIPTextConfig
    vision: CLIPVisionConfig

    def __post_init__(self):
        if self.text.projection_dim != self.vision.projection_dim:
            raise ValueError(
                f"projection_dim of texts, {self.text.projection_dim}, must be that of pictures, "
                f"{self.vision.projection_dim}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CLIPConfig":
        """The configuration in the config.json of a transformers CLIPModel.

        The towers' own `projection_dim` is not read, as in transformers. Old files have some fields in
        `text_config_dict` and `vision_config_dict`, which have priority there, too.

        Raises:
          ValueError: a field has a value that this network does not support.
        """
        if config.get("model_type", "clip") != "clip":
            raise ValueError(f"model_type must be 'clip' but is {config['model_type']!r}")
        width = config.get("projection_dim", PROJECTION)
        if isinstance(width, bool) or not isinstance(width, int) or not 0 < width <= LARGEST:
            raise ValueError(f"projection_dim must be a whole number from 1, not {width!r}")
        return cls(
            text=CLIPTextConfig.from_config(_tower(config, "text_config", width)),
            vision=CLIPVisionConfig.from_config(_tower(config, "vision_config", width)),
        )


def _tower(config: Mapping[str, Any], name: str, width: int) -> dict[str, Any]:
    """The fields of one tower; raises ValueError if they are no object."""
    fields: dict[str, Any] = {}
    for key in (name, f"{name}_dict"):
        found = config.get(key) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{key} must be an object of fields, not a {type(found).__name__}")
        fields |= found
    return fields | {"projection_dim": width}


class CLIPModel(nn.Module):
    """Both towers; they compute in `dtype`."""

    config: CLIPConfig
    dtype: DTypeLike = jnp.float32

    def setup(self):
        """The towers and their projections."""

        def project() -> nn.Dense:
            width = self.config.vision.projection_dim
            return nn.Dense(width, use_bias=False, dtype=self.dtype)

        self.vision_model = CLIPVisionTransformer(self.config.vision, self.dtype)
        self.visual_projection = project()
        self.text_model = CLIPTextTransformer(self.config.text, self.dtype)
        self.text_projection = project()
        self.logit_scale = self.param(
            "logit_scale", nn.initializers.constant(math.log(1 / 0.07)), ()
        )

    def __call__(
        self, pixels: Float[Array, "b h w 3"], ids: Int[Array, "b n"]
    ) -> tuple[Float32[Array, "b"], Float32[Array, ""]]:
        """The cosine of each picture with its own text, and the factor that makes logits of cosines.

        Raises:
          ValueError: there are more tokens than positions, or pictures do not have the size of the network.
        """
        images, texts = map(unit, (self.image_embeddings(pixels), self.text_embeddings(ids)))
        return jnp.sum(images * texts, axis=-1), jnp.exp(self.logit_scale.astype(jnp.float32))

    def image_embeddings(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b p"]:
        """As `get_image_features` of transformers."""
        return self.visual_projection(self.vision_model(pixels))

    def text_embeddings(self, ids: Int[Array, "b n"]) -> Float[Array, "b p"]:
        """As `get_text_features` of transformers; padding is not masked, but comes behind the end token."""
        check_length(ids, self.config.text)
        return self.text_projection(self.text_model(ids, self.config.text.num_hidden_layers)[1])


def unit(x: Float[Array, "b p"]) -> Float32[Array, "b p"]:
    """Vectors of length 1, in float32."""
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def shapes(model: CLIPModel) -> dict[str, Any]:
    """The tree of its parameters as `jax.ShapeDtypeStruct`."""
    size = model.config.vision.image_size
    inputs = jnp.zeros((1, size, size, 3)), jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
