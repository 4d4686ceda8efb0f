"""FLUX.1 transformer (Black Forest Labs; github.com/black-forest-labs/flux, src/flux/model.py).

Attribute names are those of diffusers' `FluxTransformer2DModel`, so that a parameter's path is its tensor's name; dual
blocks are scanned as one run (`transformer_blocks_0to18`), and single blocks as another.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.files import number
from digen_jax.models import dual_block, layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.layers import SIDE, TIME_FEATURES, Remat, block_run, product
from digen_jax.models.rotary import Rotary, image_positions, joined, rotary_table

LISTS = ("single_transformer_blocks", *dual_block.LISTS)
# `target_modules` of yifan123/flow_grpo, scripts/train_flux.py (74db691). They are suffixes of names, so single blocks
# have LoRA only in their attention.
LORA_TARGETS = (
    r"(single_)?transformer_blocks\.\d+\."
    r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2))"
)
# Logical axes of kernels (see `logical_axes`).
AXES = (
    *dual_block.AXES,
    (r"proj_mlp$", ("embed", "mlp")),
    # Rows are the heads followed by the hidden layer.
    (r"^single.*/proj_out$", ("mlp", "embed")),
    (r"(timestep|guidance)_embedder/linear_1$", (None, "mlp")),
    (r"text_embedder/linear_1$", ("text", "mlp")),
    (r"_embedder/linear_2$", ("mlp", "embed")),
    (r"^context_embedder$", ("text", "embed")),
    (r"^x_embedder$", ("channels", "embed")),
    (r"^proj_out$", ("embed", "channels")),
)
QK_NORM = "rms_norm"
THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class FluxConfig(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict.

    `in_channels` is per token, which has 2 x 2 latents.
    """

    title: ClassVar = "a FLUX transformer"
    absent: ClassVar = {"out_channels": None}

    patch_size: int = number(1, 1, 1)
    in_channels: int = 64
    out_channels: int = 64
    num_layers: int = number(19, 1, 1000)
    num_single_layers: int = number(38, 1, 1000)
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def __post_init__(self):
        self.check_packed("in_channels", "out_channels")
        self.check_rope(axes=3)


def _image_tokens(
    latents: Float[Array, "b h w c"], source: Float[Array, "b h2 w2 c"] | None
) -> tuple[Float[Array, "b n t"], Int[np.ndarray, "n 3"]]:
    """Returns the tokens of an image, followed by those of the source image, and their positions."""
    images = [latents] if source is None else [latents, source]
    positions = [
        image_positions(image.shape[1] // layers.SIDE, image.shape[2] // layers.SIDE, index)
        for index, image in enumerate(images)
    ]
    tokens = [layers.pack(image) for image in images]
    if source is None:
        return tokens[0], positions[0]
    return jnp.concatenate(tokens, axis=1), np.concatenate(positions)


class SingleBlock(nn.Module):
    """Parallel attention and feed-forward network (arXiv 2302.05442) over all tokens, with one output projection."""

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        embedding: Float[Array, "b d"],
        rotary: Rotary,
        lengths: Int[Array, "b"] | None = None,
    ) -> tuple[Float[Array, "b n d"], None]:
        """Updates the tokens; the second result is for `nn.scan`, which collects nothing.

        `lengths` is the number of tokens that each row attends to. None means all.
        """
        dim = x.shape[-1]
        shift, scale, gate = layers.Modulation(3, name="norm")(embedding)
        normed = layers.modulate(layers.layer_norm(x), shift, scale, self.dtype)
        attention = dual_block.JointAttention(
            self.heads, QK_NORM, self.dtype, pre_only=True, name="attn"
        )
        attended, _ = attention(normed, rotary=(rotary,), lengths=lengths)
        projected = layers.linear(4 * dim, self.dtype, "proj_mlp")(normed)
        hidden = nn.gelu(product(projected), approximate=True)
        together = jnp.concatenate([attended, hidden], axis=-1)
        update = layers.linear(dim, self.dtype, "proj_out")(together)
        return layers.residual(x, gate, product(update)), None


class FluxTransformer(nn.Module):
    """Predicts the velocity of latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation, and
    the embedding of time, guidance and pooled text are always float32: diffusers rounds time and guidance to the
    network's dtype before multiplying by 1000, so that time 990 becomes 988 in bfloat16. `remat` controls
    rematerialization.
    """

    config: FluxConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b m d"],
        pooled: Float[Array, "b p"],
        guidance: Float[Array, "b"] | None = None,
        source: Float[Array, "b h2 w2 c"] | None = None,
    ) -> Float[Array, "b h w o"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        `source` contains the latents of a source image to edit (FLUX.1 Kontext, arXiv 2506.15742). Its tokens are
        attended to like those of the image, with a separate index among the positions.

        Raises:
          ValueError: a side of the latents is odd, or `guidance` does not fit `config.guidance_embeds`.
        """
        config = self.config
        if config.guidance_embeds != (guidance is not None):
            need = "needs" if config.guidance_embeds else "takes no"
            raise ValueError(
                f"a transformer with guidance_embeds {config.guidance_embeds} {need} guidance"
            )
        height, width = latents.shape[1:3]
        tokens, of_image = _image_tokens(latents, source)
        x = layers.linear(config.dim, self.dtype, "x_embedder")(tokens)
        context = layers.linear(config.dim, self.dtype, "context_embedder")(context)
        embed = layers.TimeTextEmbed(config.dim, name="time_text_embed")
        embedding = embed(sigma, pooled, guidance)

        rotary = (self._rotary(of_image), self._rotary(np.zeros((context.shape[1], 3), int)))
        (x, context), _ = self._dual_blocks()((x, context), embedding, rotary)
        table = joined(*rotary)
        tokens = jnp.concatenate([x, context], axis=1)
        tokens, _ = self._single_blocks()(tokens, embedding, table)
        own = height * width // layers.SIDE**2  # without source tokens
        x = tokens[:, :own]
        modulation = layers.Modulation(2, name="norm_out")(embedding)
        x = layers.output(x, modulation, config.out_channels, self.dtype)
        return layers.unpack(x.astype(jnp.float32), height, width)

    def _rotary(self, positions: np.ndarray) -> Rotary:
        return rotary_table(positions, self.config.axes_dims_rope, THETA)

    def _dual_blocks(self) -> nn.Module:
        last = self.config.num_layers - 1
        block = block_run(dual_block.DualBlock, "transformer_blocks", 0, last, self.remat)
        return block(self.config.num_attention_heads, QK_NORM, self.dtype)

    def _single_blocks(self) -> nn.Module:
        last = self.config.num_single_layers - 1
        block = block_run(SingleBlock, "single_transformer_blocks", 0, last, self.remat)
        return block(self.config.num_attention_heads, self.dtype)


def forward_flops(
    config: FluxConfig, latent: tuple[int, int, int], text: int, source: int = 0
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`).

    `source` is the number of tokens of a source image, which count as "image".
    """
    d, blocks, singles = config.dim, config.num_layers, config.num_single_layers
    h, w, _ = latent
    own = (h // SIDE) * (w // SIDE)
    image = own + source
    # A dual block has, for each stream, four linear layers of attention and two of a feed-forward network four times as
    # wide. A single block has the same for all tokens.
    wide = (blocks + singles) * (4 * d * d + 8 * d * d)
    modulations = blocks * 12 + singles * 3 + 2  # the last is norm_out
    numbers = 2 if config.guidance_embeds else 1  # time, guidance
    embedders = (numbers * (TIME_FEATURES + d) + config.pooled_projection_dim + d) * d
    products = {
        "image": image * (wide + config.in_channels * d) + own * config.out_channels * d,
        "text": text * (wide + config.joint_attention_dim * d),
        "attention": 2 * d * (blocks + singles) * (image + text) ** 2,
        "modulation": modulations * d * d + embedders,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: FluxConfig) -> tuple[Array | None, ...]:
    """Returns latents, sigma, context, pooled text and guidance of one small image, for `init`."""
    x = jnp.zeros((1, layers.SIDE, layers.SIDE, config.in_channels // layers.SIDE**2))
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    pooled = jnp.zeros((1, config.pooled_projection_dim))
    return x, jnp.ones(1), context, pooled, jnp.ones(1) if config.guidance_embeds else None


TRANSFORMER = Component(
    library="diffusers",
    classes=("FluxTransformer2DModel",),
    network=FluxTransformer,
    read_config=FluxConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
