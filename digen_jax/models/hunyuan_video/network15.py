"""HunyuanVideo 1.5's transformer (github.com/Tencent-Hunyuan/HunyuanVideo-1.5), for text to video.

It has HunyuanVideo's dual blocks and text refiner, and no single blocks. Attribute names are those of diffusers'
`HunyuanVideo15Transformer3DModel`. The layers over an image's states exist, because the files have them, and compute
nothing: diffusers masks their tokens in text to video.
"""

import dataclasses
from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from digen_jax.files import number
from digen_jax.models import dual_block, layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.flux import network as flux
from digen_jax.models.hunyuan_video import network as hunyuan_video
from digen_jax.models.layers import NUM_TRAIN_TIMESTEPS, TIME_FEATURES, Remat, block_run
from digen_jax.models.rotary import Rotary, video_rotary

LISTS = ("refiner_blocks", *dual_block.LISTS)
# `target_modules` of Tencent-Hunyuan/UniRL, hunyuan_video15_t2v_dancegrpo_trainside.yaml (36547bd). They are suffixes
# of names, so the text's refiner has LoRA, too.
LORA_TARGETS = hunyuan_video.LORA_TARGETS.replace("(single_)?", "")
FROZEN = ("image_embedder/.*",)
# Tokens of quoted text, padding included, and the hidden width of their embedder.
GLYPH_TOKENS, GLYPH_HIDDEN = 256, 2048
AXES = (
    (r"^cond_type_embed$", (None, "embed")),
    (r"^(context_embedder_2/norm|image_embedder/norm_in)$", ("text",)),
    (r"^image_embedder/linear_1$", (None, "text")),
    (r"^image_embedder/linear_2$", ("text", "embed")),
    (r"^image_embedder/norm_out$", ("embed",)),
    (r"^context_embedder_2/linear_1$", ("text", "mlp")),
    (r"^context_embedder_2/linear_2$", (None, "mlp")),
    (r"^context_embedder_2/linear_3$", ("mlp", "embed")),
    *hunyuan_video.AXES,
)


@dataclasses.dataclass(frozen=True)
class HunyuanVideo15Config(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict."""

    title: ClassVar = "a HunyuanVideo 1.5 transformer"

    in_channels: int = 65
    out_channels: int = 32
    num_attention_heads: int = 16
    attention_head_dim: int = 128
    num_layers: int = number(54, 1, 1000)
    num_refiner_layers: int = number(2, 1, 1000)
    mlp_ratio: float = number(4.0, 4.0, 4.0)
    patch_size: int = number(1, 1, 1)
    patch_size_t: int = number(1, 1, 1)
    qk_norm: Literal["rms_norm"] = "rms_norm"
    text_embed_dim: int = 3584
    text_embed_2_dim: int = 1472
    image_embed_dim: int = 1152
    rope_theta: float = number(256.0, 1, 1e12)
    rope_axes_dim: tuple[int, ...] = (16, 56, 56)
    target_size: Literal[640, 960] = 640
    task_type: Literal["t2v", "i2v"] = "i2v"
    use_meanflow: Literal[False] = False

    def __post_init__(self):
        self.check_rope(axes=3, field="rope_axes_dim")


class GlyphProjection(nn.Module):
    """Embedder of the states of quoted text: a norm and three linear layers with GELU between."""

    dim: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n c"]) -> Float[Array, "b n d"]:
        """Embeds each token."""
        x = nn.LayerNorm(1e-5, jnp.float32, use_fast_variance=False, name="norm")(x)
        for place, width in enumerate((GLYPH_HIDDEN, GLYPH_HIDDEN, self.dim), start=1):
            x = layers.linear(width, self.dtype, f"linear_{place}")(x.astype(self.dtype))
            x = nn.gelu(x, approximate=False) if place < 3 else x
        return x


class ImageProjection(nn.Module):
    """Embedder of an image's states, whose parameters the files have."""

    dim: int

    @nn.compact
    def __call__(self, x: Float[Array, "b n c"]) -> Float[Array, "b n d"]:
        """Embeds each token."""
        x = nn.LayerNorm(1e-5, name="norm_in")(x)
        x = nn.gelu(layers.linear(x.shape[-1], jnp.float32, "linear_1")(x), approximate=False)
        return nn.LayerNorm(1e-5, name="norm_out")(
            layers.linear(self.dim, jnp.float32, "linear_2")(x)
        )


class TimeEmbed(nn.Module):
    """Embedding of the noise level, in float32."""

    dim: int

    @nn.compact
    def __call__(self, sigma: Float[Array, "b"]) -> Float[Array, "b d"]:
        """Returns the embedding."""
        features = layers.timestep_features(sigma * NUM_TRAIN_TIMESTEPS, TIME_FEATURES)
        return layers.Mlp(self.dim, name="timestep_embedder")(features)


class HunyuanVideo15Transformer(nn.Module):
    """Predicts the velocity of a clip's latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation and
    the embedding of time are always float32. `remat` controls rematerialization.
    """

    config: HunyuanVideo15Config
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b t h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b m c"],
        mask: Bool[Array, "b m"],
        glyphs: Float[Array, "b g e"],
        glyph_mask: Bool[Array, "b g"],
    ) -> Float[Array, "b t h w c"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        Args:
          latents: Latents.
          sigma: Noise levels.
          context: States of the prompts.
          mask: True for prompt tokens, at least one per row, False for trailing padding.
          glyphs: States of the prompts' quoted text.
          glyph_mask: True for its tokens, False for trailing padding.
        """
        config = self.config
        embedding = TimeEmbed(config.dim, name="time_embed")(sigma)
        # Neither an image nor its mask.
        rest = config.in_channels - config.out_channels
        x = jnp.pad(latents, [(0, 0)] * 4 + [(0, rest)])
        x = hunyuan_video.PatchEmbed(config.dim, self.dtype, config.patch_size, name="x_embedder")(
            x
        )
        ImageProjection(config.dim, name="image_embedder")(
            jnp.zeros((1, 1, config.image_embed_dim))
        )
        text, lengths = self._text(sigma, context, mask, glyphs, glyph_mask)
        _, frames, height, width, _ = latents.shape
        grid = frames, height, width
        of_video = video_rotary(config.rope_axes_dim, grid, config.rope_theta, np.float32)
        of_text = text.shape[1], config.attention_head_dim
        rotary = of_video, Rotary(jnp.ones(of_text), jnp.zeros(of_text))  # text is not rotated
        last = config.num_layers - 1
        block = block_run(dual_block.DualBlock, "transformer_blocks", 0, last, self.remat)
        blocks = block(config.num_attention_heads, flux.QK_NORM, self.dtype)
        (x, _), _ = blocks((x, text), embedding, rotary, x.shape[1] + lengths)
        modulation = layers.Modulation(2, name="norm_out")(embedding)
        x = layers.output(x, modulation, config.out_channels, self.dtype)
        return x.astype(jnp.float32).reshape(latents.shape)

    def _text(
        self, sigma: Array, context: Array, mask: Array, glyphs: Array, glyph_mask: Array
    ) -> tuple[Float[Array, "b n d"], Array]:
        """Returns tokens of quoted text and of the prompt, all padding last, and the number of tokens of each row."""
        config = self.config
        refiner = hunyuan_video.TokenRefiner(
            config, self.dtype, self.remat, name="context_embedder"
        )
        of_prompt = refiner(context, sigma, jnp.asarray(mask))
        of_glyphs = GlyphProjection(config.dim, self.dtype, name="context_embedder_2")(glyphs)
        kinds = nn.Embed(3, config.dim, dtype=self.dtype, name="cond_type_embed")(jnp.arange(2))
        tokens = jnp.concatenate([of_glyphs + kinds[1], of_prompt + kinds[0]], axis=1)
        valid = jnp.concatenate([glyph_mask, mask], axis=1)
        order = jnp.argsort(~valid, axis=1, stable=True)
        tokens = jnp.take_along_axis(tokens, order[..., None], axis=1)
        return tokens, valid.sum(axis=1).astype(jnp.int32)


def forward_flops(
    config: HunyuanVideo15Config, latent: tuple[int, int, int, int], text: int
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`); "image" is the video. Quoted text is counted, too."""
    d, blocks, refiners = config.dim, config.num_layers, config.num_refiner_layers
    frames, h, w, _ = latent
    video = frames * h * w
    block = 4 * d * d + 8 * d * d
    of_glyph = GLYPH_HIDDEN * (config.text_embed_2_dim + GLYPH_HIDDEN + d)
    modulations = blocks * 12 + refiners * 2 + 2  # the last is norm_out
    # Of time, and in the refiner of time and the mean of the text.
    embedders = 2 * (TIME_FEATURES + d) + config.text_embed_dim + d
    tokens = text + GLYPH_TOKENS
    products = {
        "image": video * (blocks * block + (config.in_channels + config.out_channels) * d),
        "text": tokens * blocks * block
        + GLYPH_TOKENS * of_glyph
        + text * (refiners * block + config.text_embed_dim * d),
        "attention": 2 * d * (blocks * (video + tokens) ** 2 + refiners * text**2),
        "modulation": (modulations * d + embedders) * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: HunyuanVideo15Config) -> tuple[Array, ...]:
    """Returns the inputs of a small clip of one frame, for `init`."""
    one, mask = jnp.ones(1), jnp.ones((1, 2), bool)
    context, glyphs = (
        jnp.zeros((1, 2, width)) for width in (config.text_embed_dim, config.text_embed_2_dim)
    )
    return jnp.zeros((1, 1, 1, 1, config.out_channels)), one, context, mask, glyphs, mask


TRANSFORMER = Component(
    library="diffusers",
    classes=("HunyuanVideo15Transformer3DModel",),
    network=HunyuanVideo15Transformer,
    read_config=HunyuanVideo15Config.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
