"""CLIP with both towers: embeds images and texts in one space.

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

from digen_jax.files import LARGEST, check_values, number
from digen_jax.models.family import Component
from digen_jax.models.linear import patch_product
from digen_jax.models.text import clip_text
from digen_jax.models.text.clip_text import (
    CLIPEncoder,
    CLIPTextConfig,
    CLIPTextTransformer,
    check_layers,
    check_length,
    norm,
)

LISTS = clip_text.LISTS

# Logical axes of kernels (see `logical_axes`).
VISION_AXES = (
    (r"/patch_embedding$", ("channels", "embed")),
    (r"/position_embedding$", ("positions", "embed")),
    (r"vision_model/embeddings$", ("embed",)),
    *clip_text.LAYER_AXES,
    (r"lay(e)?r_?norm", ("embed",)),
    (r"^visual_projection$", ("embed", "text")),
)

# Buffer that old versions of transformers saved with the parameters.
VISION_PREFIXES = "vision_model.", "visual_projection."
VISION_IGNORED: tuple[str, ...] = ("vision_model.embeddings.position_ids",)


@dataclasses.dataclass(frozen=True)
class CLIPVisionConfig:
    """Fields of transformers' config.json that change the network, with its defaults."""

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
        """Reads the configuration from a transformers config.json, whose other fields are about training.

        Raises:
          ValueError: a field has an unsupported value.
        """
        if config.get("model_type", "clip_vision_model") != "clip_vision_model":
            raise ValueError(
                f"model_type must be 'clip_vision_model' but is {config['model_type']!r}"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        check_values(cls, config)
        return cls(**{name: value for name, value in config.items() if name in known})


class CLIPVisionEmbeddings(nn.Module):
    """Class token and patch tokens, with positions."""

    config: CLIPVisionConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Maps pixels to tokens: the class first, then patches row by row.

        Raises:
          ValueError: the image size does not match the positions.
        """
        config, dtype, width = self.config, self.dtype, self.config.hidden_size
        if pixels.shape[1:3] != (config.image_size, config.image_size):
            raise ValueError(
                f"images are {pixels.shape[1]} x {pixels.shape[2]} pixels but image_size is {config.image_size}: "
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
    penultimate: bool = False

    @nn.compact
    def __call__(
        self, pixels: Float[Array, "b h w 3"]
    ) -> Float[Array, "b d"] | Float[Array, "b n d"]:
        """Maps pixels to the normed last state of the class token, transformers' `pooler_output`.

        If `penultimate`, returns the input of the last layer, transformers' `hidden_states[-2]`.
        """
        config, dtype = self.config, self.dtype
        x = CLIPVisionEmbeddings(config, dtype, name="embeddings")(pixels)
        x = norm(config, dtype, "pre_layrnorm")(x)
        encoder = CLIPEncoder(config, dtype, causal=False, name="encoder")
        x, kept = encoder(x, config.num_hidden_layers - self.penultimate)
        if self.penultimate:
            return kept
        return norm(config, dtype, "post_layernorm")(x[:, 0])


class CLIPVisionModelWithProjection(nn.Module):
    """Image encoder that projects into the joint space with texts; computes in and returns `dtype`."""

    config: CLIPVisionConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b p"]:
        """Returns transformers' `image_embeds`, of pixels normalized by the folder's preprocessor_config.json.

        Raises:
          ValueError: the image size does not match the positions.
        """
        pooled = CLIPVisionTransformer(self.config, self.dtype, name="vision_model")(pixels)
        project = nn.Dense(
            self.config.projection_dim, use_bias=False, dtype=self.dtype, name="visual_projection"
        )
        return project(pooled)


class CLIPVisionModel(nn.Module):
    """Image encoder for conditioning of a diffusion model; computes in and returns `dtype`."""

    config: CLIPVisionConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Returns the penultimate states of the class and of all patches."""
        return CLIPVisionTransformer(self.config, self.dtype, True, name="vision_model")(pixels)


def vision_inputs(config: CLIPVisionConfig) -> tuple[Float[Array, "1 h w 3"]]:
    """Returns a black image, for `init`."""
    return (jnp.zeros((1, config.image_size, config.image_size, 3)),)


VISION = Component(
    library="transformers",
    classes=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    network=CLIPVisionModel,
    read_config=CLIPVisionConfig.from_config,
    inputs=vision_inputs,
    lists=LISTS,
    axes=VISION_AXES,
    # Layers after the penultimate states, other than the last one.
    ignored=lambda network: (*VISION_IGNORED, "*.post_layernorm.*", "visual_projection.*"),
    # transformers 5 saves a CLIPVisionModel without a prefix.
    renamed=lambda name: name if name.startswith(VISION_PREFIXES) else f"vision_model.{name}",
)

# Logical axes of kernels (see `logical_axes`); the scale has no dimension.
AXES = (*VISION_AXES, *clip_text.AXES, (r"^$", ()))
IGNORED = (*VISION_IGNORED, *clip_text.IGNORED)

# transformers' default width of the joint embedding space.
PROJECTION = 512


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
    """Configurations of both towers, which share `projection_dim`."""

    text: CLIPTextConfig
    vision: CLIPVisionConfig

    def __post_init__(self):
        if self.text.projection_dim != self.vision.projection_dim:
            raise ValueError(
                f"projection_dim of texts, {self.text.projection_dim}, must be that of images, "
                f"{self.vision.projection_dim}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CLIPConfig":
        """Reads the configuration from the config.json of a transformers CLIPModel.

        The towers' `projection_dim` is not read, as in transformers. Old files have some fields in `text_config_dict`
        and `vision_config_dict`, which have priority, as in transformers.

        Raises:
          ValueError: a field has an unsupported value.
        """
        if config.get("model_type", "clip") != "clip":
            raise ValueError(f"model_type must be 'clip' but is {config['model_type']!r}")
        width = config.get("projection_dim", PROJECTION)
        if isinstance(width, bool) or not isinstance(width, int) or not 0 < width <= LARGEST:
            raise ValueError(f"projection_dim must be an integer from 1, not {width!r}")
        return cls(
            text=CLIPTextConfig.from_config(_tower(config, "text_config", width)),
            vision=CLIPVisionConfig.from_config(_tower(config, "vision_config", width)),
        )


def _tower(config: Mapping[str, Any], name: str, width: int) -> dict[str, Any]:
    """Returns the fields of one tower; raises ValueError if they are not an object."""
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
        """Creates the towers and their projections."""

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
        """Returns the cosine similarity of each image and its text, and the scale from cosines to logits.

        Raises:
          ValueError: there are more tokens than positions, or the image size does not match the network.
        """
        images, texts = map(unit, (self.image_embeddings(pixels), self.text_embeddings(ids)))
        return jnp.sum(images * texts, axis=-1), jnp.exp(self.logit_scale.astype(jnp.float32))

    def image_embeddings(self, pixels: Float[Array, "b h w 3"]) -> Float[Array, "b p"]:
        """Returns transformers' `get_image_features`."""
        return self.visual_projection(self.vision_model(pixels))

    def text_embeddings(self, ids: Int[Array, "b n"]) -> Float[Array, "b p"]:
        """Returns transformers' `get_text_features`; padding is not masked, but follows the end token."""
        check_length(ids, self.config.text)
        return self.text_projection(self.text_model(ids, self.config.text.num_hidden_layers)[1])


def unit(x: Float[Array, "b p"]) -> Float32[Array, "b p"]:
    """Normalizes vectors to length 1, in float32."""
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def shapes(model: CLIPModel) -> dict[str, Any]:
    """Returns the parameter tree as `jax.ShapeDtypeStruct`."""
    size = model.config.vision.image_size
    inputs = jnp.zeros((1, size, size, 3)), jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
