"""Qwen-Image transformer (Qwen team, arXiv 2508.02324): dual blocks of image and text, joined in attention.

Attribute names are those of diffusers' `QwenImageTransformer2DModel`, so that a parameter's path is its tensor's name;
the blocks are scanned as one run (`transformer_blocks_0to59`).
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
from digen_jax.models.layers import SIDE, TIME_FEATURES, Remat, block_run
from digen_jax.models.rotary import Rotary, image_positions, rotary_table

LISTS = dual_block.QWEN_IMAGE_LISTS
# `target_modules` of verl-project/verl-omni, examples/flowgrpo_trainer/qwen_image/run_qwen_image_ocr_lora.sh (8b0f0f9),
# which are suffixes of names.
LORA_TARGETS = (
    r"transformer_blocks\.\d+\."
    r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|(img|txt)_mlp\.net\.(0\.proj|2))"
)
# Logical axes of kernels (see `logical_axes`).
AXES = (
    *dual_block.AXES,
    (r"timestep_embedder/linear_1$", (None, "mlp")),
    (r"timestep_embedder/linear_2$", ("mlp", "embed")),
    (r"^img_in$", ("channels", "embed")),
    (r"^txt_norm$", ("text",)),
    (r"^txt_in$", ("text", "embed")),
    (r"^proj_out$", ("embed", "channels")),
)
QK_NORM = "rms_norm"
THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class QwenImageConfig(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict.

    The last two fields are for models that generate layers.

    Attributes:
      in_channels: Channels per token, which has 2 x 2 latents.
      out_channels: Channels per latent.
      zero_cond_t: Whether the tokens of source images have the modulation of noise level 0.
    """

    title: ClassVar = "a Qwen-Image transformer"
    unread: ClassVar = ("pooled_projection_dim",)

    patch_size: int = number(layers.SIDE, layers.SIDE, layers.SIDE)
    in_channels: int = 64
    out_channels: int = 16
    num_layers: int = number(60, 1, 1000)
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 3584
    guidance_embeds: Literal[False] = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    zero_cond_t: bool = False
    use_additional_t_cond: Literal[False] = False
    use_layer3d_rope: Literal[False] = False

    def __post_init__(self):
        self.check_packed("in_channels")
        self.check_rope(axes=3)


def rotary_tables(
    widths: tuple[int, ...], height: int, width: int, text: int, *sources: tuple[int, int]
) -> tuple[Rotary, Rotary]:
    """Returns the tables of an image of height x width tokens and of the source images, and of `text` text tokens.

    Images are numbered from 0. Rows and columns are counted from the center of each image. A text token has the same
    position on all axes, counted from the end of the longest side.
    """
    grids = (height, width), *sources
    of_image = np.concatenate(
        [image_positions(h, w, i) - [0, h - h // 2, w - w // 2] for i, (h, w) in enumerate(grids)]
    )
    first = max(side // 2 for grid in grids for side in grid)
    of_text = np.repeat(np.arange(first, first + text)[:, None], 3, axis=1)
    image, words = (rotary_table(p, widths, THETA, np.float32) for p in (of_image, of_text))
    return image, words


class TimeEmbed(nn.Module):
    """diffusers' `QwenTimestepProjEmbeddings`: embedding of the noise level for the modulation, in float32."""

    dim: int

    @nn.compact
    def __call__(self, sigma: Float[Array, "b"]) -> Float[Array, "b d"]:
        """Embeds noise levels in [0, 1]."""
        features = layers.timestep_features(sigma, layers.TIME_FEATURES, layers.NUM_TRAIN_TIMESTEPS)
        return layers.Mlp(self.dim, name="timestep_embedder")(features)


class QwenImageTransformer(nn.Module):
    """Predicts the velocity of latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation,
    rotary positions and the embedding of time are always float32: diffusers rounds time to the network's dtype before
    multiplying by 1000, so that time 990 becomes 988 in bfloat16. `remat` controls rematerialization.
    """

    config: QwenImageConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b n d"],
        mask: Bool[Array, "b n"],
        source: Float[Array, "b s h2 w2 c"] | None = None,
    ) -> Float[Array, "b h w o"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        Args:
          latents: Latents with even sides.
          sigma: Noise levels.
          context: States of the prompts.
          mask: True for prompt tokens, False for trailing padding.
          source: Latents with even sides of source images to edit. None means that there are none.

        Raises:
          ValueError: a side of the latents is odd.
        """
        config, (batch, height, width, _) = self.config, latents.shape
        x = layers.pack(latents)
        own, sources = x.shape[1], []
        if source is not None:
            tokens = layers.pack(source.reshape(-1, *source.shape[2:]))
            x = jnp.concatenate([x, tokens.reshape(batch, -1, x.shape[-1])], axis=1)
            rows, columns = (side // layers.SIDE for side in source.shape[2:4])
            sources = [(rows, columns)] * source.shape[1]
        x = layers.linear(config.dim, self.dtype, "img_in")(x)
        norm = nn.RMSNorm(epsilon=layers.EPSILON, dtype=jnp.float32, name="txt_norm")
        context = norm(context).astype(self.dtype)
        context = layers.linear(config.dim, self.dtype, "txt_in")(context)
        embed, clean = TimeEmbed(config.dim, name="time_text_embed"), None
        if sources and config.zero_cond_t:
            noisy = jnp.concatenate([sigma, jnp.zeros_like(sigma)])
            embedding, clean = jnp.split(embed(noisy), 2)
        else:
            embedding = embed(sigma)

        grid = height // layers.SIDE, width // layers.SIDE
        rotary = rotary_tables(config.axes_dims_rope, *grid, context.shape[1], *sources)
        lengths = x.shape[1] + jnp.asarray(mask).sum(axis=1).astype(jnp.int32)
        blocks = self._blocks(x.shape[1] - own)
        (x, _), _ = blocks((x, context), embedding, rotary, lengths, clean)

        modulation, x = layers.Modulation(2, name="norm_out")(embedding), x[:, :own]
        x = layers.output(x, modulation, config.out_channels * layers.SIDE**2, self.dtype)
        return layers.unpack(x.astype(jnp.float32), height, width)

    def _blocks(self, sources: int) -> nn.Module:
        """Returns the blocks; the last `sources` image tokens are those of source images."""
        last = self.config.num_layers - 1
        block = block_run(dual_block.DualBlock, "transformer_blocks", 0, last, self.remat)
        heads = self.config.num_attention_heads
        return block(heads, QK_NORM, self.dtype, names=dual_block.QWEN_IMAGE, clean_tokens=sources)


def forward_flops(
    config: QwenImageConfig, latent: tuple[int, int, int], text: int, source: int = 0
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`).

    `source` is the number of tokens of all source images, which count as "image".
    """
    d, blocks = config.dim, config.num_layers
    h, w, _ = latent
    own = (h // SIDE) * (w // SIDE)
    image = own + source
    # Each stream has four linear layers of attention and two of a feed-forward network four times as wide.
    wide = blocks * (4 * d * d + 8 * d * d)
    output = config.out_channels * SIDE**2 * d
    # Those of the image stream are also computed for noise level 0. The last is norm_out.
    times = 2 if source and config.zero_cond_t else 1
    modulations = blocks * (6 * times + 6) + 2
    products = {
        "image": image * (wide + config.in_channels * d) + own * output,
        # Only keys and values of the last block are used, but the scan also computes the rest.
        "text": text * (wide + config.joint_attention_dim * d),
        "attention": 2 * d * blocks * (image + text) ** 2,
        "modulation": modulations * d * d + times * (TIME_FEATURES + d) * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: QwenImageConfig) -> tuple[Array, ...]:
    """Returns latents, sigma, context and mask of one small image, for `init`."""
    x = jnp.zeros((1, layers.SIDE, layers.SIDE, config.in_channels // layers.SIDE**2))
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    return x, jnp.ones(1), context, jnp.ones((1, 2), bool)


TRANSFORMER = Component(
    library="diffusers",
    classes=("QwenImageTransformer2DModel",),
    network=QwenImageTransformer,
    read_config=QwenImageConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
