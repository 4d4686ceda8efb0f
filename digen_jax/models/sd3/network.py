"""Stable Diffusion 3 and 3.5 transformer (MMDiT, Esser et al., arXiv 2403.03206).

Attribute names are those of diffusers' `SD3Transformer2DModel`, so that a parameter's path is its tensor's name; runs
of equal blocks are scanned (`transformer_blocks_0to12`).
"""

import dataclasses
import itertools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from digen_jax.files import number
from digen_jax.models import dual_block, layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.layers import TIME_FEATURES, Remat, block_run
from digen_jax.models.linear import patch_product

LISTS = dual_block.LISTS
FROZEN = ("pos_embed/pos_embed",)
# Linear layers of the joint attention, without the second attention over the image: `target_modules` of
# yifan123/flow_grpo, scripts/train_sd3.py (ac4c86e), and of NVlabs/DiffusionNFT, scripts/train_nft_sd3.py (24af555).
LORA_TARGETS = r"transformer_blocks\.\d+\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
# Logical axes of kernels (see `logical_axes`).
AXES = (
    *dual_block.AXES,
    (r"timestep_embedder/linear_1$", (None, "mlp")),
    (r"text_embedder/linear_1$", ("text", "mlp")),
    (r"_embedder/linear_2$", ("mlp", "embed")),
    (r"^context_embedder$", ("text", "embed")),
    (r"^pos_embed/proj$", ("channels", "embed")),
    (r"^pos_embed$", ("positions", "embed")),
    (r"^proj_out$", ("embed", "channels")),
)


@dataclasses.dataclass(frozen=True)
class SD3Config(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict."""

    title: ClassVar = "an SD3 transformer"

    sample_size: int = 128
    patch_size: int = 2
    in_channels: int = 16
    num_layers: int = number(18, 1, 1000)
    attention_head_dim: int = 64
    num_attention_heads: int = 18
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1152
    pooled_projection_dim: int = 2048
    out_channels: int = 16
    pos_embed_max_size: int = number(96, 1, 10_000)
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: str | None = None

    def __post_init__(self):
        if self.qk_norm not in (None, "rms_norm"):
            raise ValueError(f"qk_norm must be null or 'rms_norm', not {self.qk_norm!r}.")
        if self.caption_projection_dim != self.dim:
            raise ValueError(
                f"caption_projection_dim must equal num_attention_heads * attention_head_dim = "
                f"{self.dim}, not {self.caption_projection_dim}."
            )
        if self.dim % 4:
            raise ValueError(
                f"num_attention_heads * attention_head_dim must be a multiple of 4 (the position "
                f"table has four parts), not {self.dim}."
            )
        outside = [i for i in self.dual_attention_layers if not 0 <= i < self.num_layers]
        if outside:
            raise ValueError(
                f"dual_attention_layers must be in 0..{self.num_layers - 1}, but has {outside}."
            )


def segments(config: SD3Config) -> list[tuple[int, int, bool]]:
    """Returns runs of equal consecutive blocks as (first, last, dual attention); the last block is a separate run."""

    def kind(i: int) -> tuple[bool, bool]:
        return i in config.dual_attention_layers, i == config.num_layers - 1

    runs = [list(run) for _, run in itertools.groupby(range(config.num_layers), key=kind)]
    return [(run[0], run[-1], kind(run[0])[0]) for run in runs]


class PatchEmbed(nn.Module):
    """Patches to tokens, plus the center crop of a frozen position table."""

    config: SD3Config
    dtype: DTypeLike

    @nn.compact
    def __call__(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Returns tokens row by row; raises ValueError if latents do not fit the patches or the table."""
        config, patch, size = self.config, self.config.patch_size, self.config.pos_embed_max_size
        height, width = latents.shape[1:3]
        if height % patch or width % patch or max(height, width) > size * patch:
            raise ValueError(
                f"latents of {height} x {width} do not fit: height and width must be multiples of "
                f"patch_size {patch} and at most {size * patch} (pos_embed_max_size {size})."
            )
        h, w = height // patch, width // patch
        stride = (patch, patch)
        proj = nn.Conv(
            config.dim,
            stride,
            stride,
            "VALID",
            dtype=self.dtype,
            conv_general_dilated=patch_product,
            name="proj",
        )
        base_size = config.sample_size // patch
        table = self.param(
            "pos_embed", lambda _: layers.sincos_2d_table(size, base_size, config.dim)
        )
        top, left = (size - h) // 2, (size - w) // 2
        table = jax.lax.stop_gradient(table).reshape(size, size, config.dim)
        x = proj(latents) + table[top : top + h, left : left + w]
        return x.astype(self.dtype).reshape(x.shape[0], h * w, config.dim)


class SD3Transformer(nn.Module):
    """Predicts the velocity of latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation and
    the embedding of time and pooled text are always float32. `remat` controls rematerialization.
    """

    config: SD3Config
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b n d"],
        pooled: Float[Array, "b p"],
        null_tokens: int = 0,
    ) -> Float[Array, "b h w o"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        `null_tokens` all-zero tokens are appended to the context, as in diffusers' pipeline (256 by default) without a
        T5. Context tokens have no position, so n equal tokens are equivalent to one whose attention score is log n
        higher: one token is appended, with that weight.
        """
        config = self.config
        x = PatchEmbed(config, self.dtype, name="pos_embed")(latents)
        embedding = layers.TimeTextEmbed(config.dim, name="time_text_embed")(sigma, pooled)
        if null_tokens:
            context = jnp.pad(context, ((0, 0), (0, 1), (0, 0)))
        context = layers.linear(config.dim, self.dtype, "context_embedder")(context)
        streams = (x, context)
        for first, last, dual in segments(config):
            streams, _ = self._blocks(first, last, dual, null_tokens)(streams, embedding)
        modulation = layers.Modulation(2, name="norm_out")(embedding)
        features = config.patch_size**2 * config.out_channels
        x = layers.output(streams[0], modulation, features, self.dtype)
        return layers.unpatched(x, config.patch_size, *latents.shape[1:3])

    def _blocks(self, first: int, last: int, dual: bool, null_tokens: int) -> nn.Module:
        """Returns blocks first..last, scanned if there are several; the last context token counts as `null_tokens`."""
        config = self.config
        block = block_run(dual_block.DualBlock, "transformer_blocks", first, last, self.remat)
        return block(
            config.num_attention_heads,
            config.qk_norm,
            self.dtype,
            dual_attention=dual,
            context_pre_only=last == config.num_layers - 1,
            last_counts=max(1, null_tokens),
        )


def forward_flops(config: SD3Config, latent: tuple[int, int, int], text: int) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`).

    One token of `text` represents all null tokens.
    """
    d, patch = config.dim, config.patch_size
    h, w, _ = latent
    image = (h // patch) * (w // patch)
    patches = patch * patch * (config.in_channels + config.out_channels)
    blocks, dual = config.num_layers, len(set(config.dual_attention_layers))
    # Linear layers of a block: four of attention, two of a feed-forward network four times as wide. The last block does
    # not update the text, for which it needs only keys and values.
    attention, feed_forward = 4 * d * d, 8 * d * d
    wide = blocks * (attention + feed_forward)
    modulations = blocks * 6 + dual * 3 + (blocks - 1) * 6 + 2 + 2  # the last is norm_out
    embedders = (TIME_FEATURES + config.pooled_projection_dim + 2 * d) * d
    tokens = image + text
    products = {
        "image": image * (wide + dual * attention + patches * d),
        "text": text * (wide - 2 * d * d - feed_forward + config.joint_attention_dim * d),
        "attention": 2 * d * ((blocks - 1) * tokens**2 + image * tokens + dual * image**2),
        "modulation": modulations * d * d + embedders,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: SD3Config) -> tuple[Array, ...]:
    """Returns latents, sigma, context and pooled text of one small image, for `init`."""
    side = 2 * config.patch_size
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    pooled = jnp.zeros((1, config.pooled_projection_dim))
    return jnp.zeros((1, side, side, config.in_channels)), jnp.ones(1), context, pooled


TRANSFORMER = Component(
    library="diffusers",
    classes=("SD3Transformer2DModel",),
    network=SD3Transformer,
    read_config=SD3Config.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
