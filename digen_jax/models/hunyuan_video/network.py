"""HunyuanVideo's text-to-video transformer (arXiv 2412.03603): FLUX's blocks over a video and refined text.

Attribute names are those of diffusers' `HunyuanVideoTransformer3DModel`, so that a parameter's path is its tensor's
name; dual blocks are scanned as one run (`transformer_blocks_0to19`), and single blocks as another. Models that read an
image have further inputs, which are not here.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from digen_jax.files import number
from digen_jax.models import dual_block, layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.flux import network as flux
from digen_jax.models.layers import SIDE, TIME_FEATURES, Remat, block_run
from digen_jax.models.linear import patch_product
from digen_jax.models.rotary import Rotary, joined, video_rotary

LISTS = ("refiner_blocks", *flux.LISTS)
# `target_modules` of Tencent-Hunyuan/UniRL, examples/diffusion/hunyuan_video10/hunyuan_video10_t2v_trainside.yaml
# (c37b6ac). They are suffixes of names, so the text's refiner has LoRA, too, and single blocks only in their attention.
LORA_TARGETS = (
    r"(context_embedder\.token_refiner\.refiner_blocks|(single_)?transformer_blocks)\.\d+\."
    r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2))"
)
# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"^x_embedder/proj$", ("channels", "embed")),
    (r"^context_embedder/proj_in$", ("text", "embed")),
    (r"refiner_blocks[^/]*/norm[12]$", ("embed",)),
    *flux.AXES,
)


@dataclasses.dataclass(frozen=True)
class HunyuanVideoConfig(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict."""

    title: ClassVar = "a HunyuanVideo transformer"

    in_channels: int = 16
    out_channels: int = 16
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    num_layers: int = number(20, 1, 1000)
    num_single_layers: int = number(40, 1, 1000)
    num_refiner_layers: int = number(2, 1, 1000)
    mlp_ratio: float = number(4.0, 4.0, 4.0)
    patch_size: int = number(SIDE, SIDE, SIDE)
    patch_size_t: int = number(1, 1, 1)
    qk_norm: Literal["rms_norm"] = "rms_norm"
    guidance_embeds: Literal[True] = True
    text_embed_dim: int = 4096
    pooled_projection_dim: int = 768
    rope_theta: float = number(256.0, 1, 1e12)
    rope_axes_dim: tuple[int, ...] = (16, 56, 56)
    image_condition_type: Literal[None] = None

    def __post_init__(self):
        self.check_rope(axes=3, field="rope_axes_dim")


class RefinerBlock(nn.Module):
    """Self-attention and feed-forward network over the text, each with a gate but no modulated norm."""

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], embedding: Float[Array, "b d"], lengths: Int[Array, "b"]
    ) -> tuple[Float[Array, "b n d"], None]:
        """Updates the tokens; the second result is for `nn.scan`, which collects nothing."""

        def normed(x: Float[Array, "b n d"], name: str) -> Float[Array, "b n d"]:
            norm = nn.LayerNorm(layers.EPSILON, jnp.float32, use_fast_variance=False, name=name)
            return norm(x).astype(self.dtype)

        gate, gate_of_mlp = layers.Modulation(2, name="norm_out")(embedding)
        attention = dual_block.JointAttention(self.heads, None, self.dtype, name="attn")
        update, _ = attention(normed(x, "norm1"), lengths=lengths)
        x = layers.residual(x, gate, update)
        feed_forward = layers.FeedForward(self.dtype, activation=nn.silu, name="ff")
        return layers.residual(x, gate_of_mlp, feed_forward(normed(x, "norm2"))), None


class RefinerBlocks(nn.Module):
    """The refiner's blocks, as diffusers' `HunyuanVideoIndividualTokenRefiner`."""

    config: Any  # as of the refiner
    dtype: DTypeLike
    remat: Remat

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], embedding: Float[Array, "b d"], lengths: Int[Array, "b"]
    ) -> Float[Array, "b n d"]:
        """Updates the tokens."""
        last = self.config.num_refiner_layers - 1
        block = block_run(RefinerBlock, "refiner_blocks", 0, last, self.remat)
        return block(self.config.num_attention_heads, self.dtype)(x, embedding, lengths)[0]


class TokenRefiner(nn.Module):
    """Text embedder with a small transformer, which depends on the noise level and the mean of the states."""

    config: Any  # `HunyuanVideoConfig`, or that of 1.5
    dtype: DTypeLike
    remat: Remat

    @nn.compact
    def __call__(
        self, context: Float[Array, "b n c"], sigma: Float[Array, "b"], mask: Bool[Array, "b n"]
    ) -> Float[Array, "b n d"]:
        """Returns the text's tokens.

        Padding attends to the prompt here, and only to its first token in diffusers. Nothing attends to padding.
        """
        lengths = mask.sum(axis=1).astype(jnp.int32)
        # A prompt has at least the end of the chat's turn.
        states = jnp.where(mask[..., None], context.astype(jnp.float32), 0)
        mean = states.sum(axis=1) / lengths[:, None]
        embedding = layers.TimeTextEmbed(self.config.dim, name="time_text_embed")(sigma, mean)
        x = layers.linear(self.config.dim, self.dtype, "proj_in")(context.astype(self.dtype))
        refiner = RefinerBlocks(self.config, self.dtype, self.remat, name="token_refiner")
        return refiner(x, embedding, lengths)


class PatchEmbed(nn.Module):
    """Linear layer of a frame's patches, stored as a convolution."""

    dim: int
    dtype: DTypeLike
    side: int = SIDE

    @nn.compact
    def __call__(self, latents: Float[Array, "b t h w c"]) -> Float[Array, "b n d"]:
        """Returns the tokens, frame by frame and row by row."""
        patch = (1, self.side, self.side)
        conv = nn.Conv(
            self.dim,
            patch,
            patch,
            "VALID",
            dtype=self.dtype,
            conv_general_dilated=patch_product,
            name="proj",
        )
        return conv(latents).reshape(len(latents), -1, self.dim)


class HunyuanVideoTransformer(nn.Module):
    """Predicts the velocity of a clip's latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation, and
    the embedding of time, guidance and pooled text are always float32: diffusers rounds guidance to the network's dtype
    before embedding it, so that 6000 becomes 6016 in bfloat16. `remat` controls rematerialization.
    """

    config: HunyuanVideoConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b t h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b m c"],
        mask: Bool[Array, "b m"],
        pooled: Float[Array, "b p"],
        guidance: Float[Array, "b"],
    ) -> Float[Array, "b t h w o"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        Args:
          latents: Latents with even sides.
          sigma: Noise levels.
          context: States of the prompts.
          mask: True for prompt tokens, at least one per row, False for trailing padding.
          pooled: CLIP's states of the prompts' ends.
          guidance: Guidance scale of each row.

        Raises:
          ValueError: a side of the latents is odd.
        """
        config = self.config
        batch, frames, height, width, _ = latents.shape
        if height % SIDE or width % SIDE:
            raise ValueError(
                f"latents of {height} x {width} do not fit: both sides must be multiples of {SIDE}."
            )
        embed = layers.TimeTextEmbed(config.dim, name="time_text_embed")
        embedding = embed(sigma, pooled, guidance)
        x = PatchEmbed(config.dim, self.dtype, name="x_embedder")(latents)
        refiner = TokenRefiner(config, self.dtype, self.remat, name="context_embedder")
        context = refiner(context, sigma, mask)

        lengths = x.shape[1] + mask.sum(axis=1).astype(jnp.int32)
        grid = frames, height // SIDE, width // SIDE
        of_video = video_rotary(config.rope_axes_dim, grid, config.rope_theta, np.float32)
        of_text = context.shape[1], config.attention_head_dim
        rotary = of_video, Rotary(jnp.ones(of_text), jnp.zeros(of_text))  # text is not rotated
        (x, context), _ = self._dual_blocks()((x, context), embedding, rotary, lengths)
        tokens = jnp.concatenate([x, context], axis=1)
        tokens, _ = self._single_blocks()(tokens, embedding, joined(*rotary), lengths)

        modulation = layers.Modulation(2, name="norm_out")(embedding)
        features = config.out_channels * SIDE**2
        x = layers.output(tokens[:, : x.shape[1]], modulation, features, self.dtype)
        x = x.astype(jnp.float32).reshape(batch * frames, -1, features)
        return layers.unpack(x, height, width).reshape(*latents.shape[:4], -1)

    def _dual_blocks(self) -> nn.Module:
        last = self.config.num_layers - 1
        block = block_run(dual_block.DualBlock, "transformer_blocks", 0, last, self.remat)
        return block(self.config.num_attention_heads, flux.QK_NORM, self.dtype)

    def _single_blocks(self) -> nn.Module:
        last = self.config.num_single_layers - 1
        block = block_run(flux.SingleBlock, "single_transformer_blocks", 0, last, self.remat)
        return block(self.config.num_attention_heads, self.dtype)


def forward_flops(
    config: HunyuanVideoConfig, latent: tuple[int, int, int, int], text: int
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`); "image" is the video."""
    d, dual, single = config.dim, config.num_layers, config.num_single_layers
    refiners = config.num_refiner_layers
    frames, h, w, _ = latent
    video = frames * (h // SIDE) * (w // SIDE)
    # Each stream of a dual block, a single block and a refiner's block have four linear layers of attention and two of
    # a feed-forward network four times as wide.
    block = 4 * d * d + 8 * d * d
    of_a_token = SIDE**2 * (config.in_channels + config.out_channels)
    modulations = dual * 12 + single * 3 + refiners * 2 + 2  # the last is norm_out
    # Of time, guidance and pooled text, and in the refiner of time and the mean of the text.
    embedders = 3 * (TIME_FEATURES + d) + config.pooled_projection_dim + config.text_embed_dim
    products = {
        "image": video * ((dual + single) * block + of_a_token * d),
        "text": text * ((dual + single + refiners) * block + config.text_embed_dim * d),
        "attention": 2 * d * ((dual + single) * (video + text) ** 2 + refiners * text**2),
        "modulation": (modulations * d + embedders + 2 * d) * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: HunyuanVideoConfig) -> tuple[Array, ...]:
    """Returns the inputs of a small clip of one frame, for `init`."""
    latents = jnp.zeros((1, 1, SIDE, SIDE, config.in_channels))
    context, pooled = jnp.zeros((1, 2, config.text_embed_dim)), config.pooled_projection_dim
    return (
        latents,
        jnp.ones(1),
        context,
        jnp.ones((1, 2), bool),
        jnp.zeros((1, pooled)),
        jnp.ones(1),
    )


TRANSFORMER = Component(
    library="diffusers",
    classes=("HunyuanVideoTransformer3DModel",),
    network=HunyuanVideoTransformer,
    read_config=HunyuanVideoConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
