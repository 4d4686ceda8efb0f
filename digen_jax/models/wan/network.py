"""Wan's transformer (Wan Team, arXiv 2503.20314): video tokens that cross-attend to the text.

Attribute names are those of diffusers' `WanTransformer3DModel`, so that a parameter's path is its tensor's name; the
blocks are scanned as one run (`blocks_0to29`). Wan 2.1's image-to-video model also cross-attends to an image.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from digen_jax.attention.attend import attend
from digen_jax.files import number
from digen_jax.models import layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.layers import Remat, block_run, product
from digen_jax.models.linear import of_one_input, patch_product
from digen_jax.models.rotary import Rotary, rotate_pairs, video_rotary

LISTS = ("blocks", "to_out", "net")
# `lora_target_modules` of ModelTC/GenRL, config/longcat.yaml (82a867e), which are suffixes of names.
LORA_TARGETS = r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))"
# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"attn[12]/to_[qkv]$", ("embed", "heads")),
    (r"attn2/add_[kv]_proj$", ("embed", "heads")),
    (r"attn[12]/norm_(q|k|added_k)$", ("heads",)),
    (r"image_embedder/norm1$", ("text",)),
    (r"image_embedder/ff/net_0/proj$", ("text", "mlp")),
    (r"attn[12]/to_out_0$", ("heads", "embed")),
    (r"net_0/proj$", ("embed", "mlp")),
    (r"net_2$", ("mlp", "embed")),
    (r"/norm2$", ("embed",)),
    (r"time_embedder/linear_1$", (None, "mlp")),
    (r"text_embedder/linear_1$", ("text", "mlp")),
    (r"_embedder/linear_2$", ("mlp", "embed")),
    (r"/time_proj$", ("embed", "modulation")),
    (r"^patch_embedding$", ("channels", "embed")),
    (r"^proj_out$", ("embed", "channels")),
    (r"^(blocks_[^/]*)?$", ("embed",)),  # scale_shift_table
)
THETA = 10_000.0
IMAGE_EPSILON = 1e-5  # of the norms of an image's states
VECTORS = 6  # shift, scale and gate of the self-attention and of the feed-forward network


@dataclasses.dataclass(frozen=True)
class WanConfig(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict.

    `image_dim` and `added_kv_proj_dim` are for models that attend to an image.
    """

    title: ClassVar = "a Wan transformer"

    patch_size: tuple[int, ...] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = number(256, 2)
    ffn_dim: int = 13824
    num_layers: int = number(40, 1, 1000)
    cross_attn_norm: Literal[True] = True
    qk_norm: Literal["rms_norm_across_heads"] = "rms_norm_across_heads"
    eps: float = number(1e-6, 0, 1)
    rope_max_seq_len: int = 1024
    image_dim: int | None = None
    added_kv_proj_dim: int | None = None
    pos_embed_seq_len: Literal[None] = None

    def __post_init__(self):
        frames, *sides = self.patch_size if len(self.patch_size) == 3 else (0,)
        if frames != 1 or sides[0] != sides[1] or sides[0] < 1:
            raise ValueError(
                f"patch_size must be [1, n, n], one frame of n x n latents, not {list(self.patch_size)}."
            )
        if self.image_dim is None and self.added_kv_proj_dim is not None:
            raise ValueError("added_kv_proj_dim must be null, because image_dim is.")
        if self.image_dim is not None and self.added_kv_proj_dim != self.dim:
            raise ValueError(
                f"image_dim must be null, or added_kv_proj_dim the width {self.dim}, not {self.added_kv_proj_dim}."
            )
        for name in ("attention_head_dim", "freq_dim"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even, not {getattr(self, name)}.")
        if self.attention_head_dim < 6:
            raise ValueError(
                f"attention_head_dim must be at least 6, a pair of channels for frame, row and column, not "
                f"{self.attention_head_dim}."
            )

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return self.patch_size[1]

    @property
    def axes_dims(self) -> tuple[int, int, int]:
        """Channels of a head rotated by each axis: frame, row, column."""
        side = 2 * (self.attention_head_dim // 6)
        return self.attention_head_dim - 2 * side, side, side


class Attention(nn.Module):
    """Attention of x to itself, or to a context, with RMS norms of queries and keys over all heads."""

    config: WanConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        context: Float[Array, "b m d"] | None = None,
        image: Float[Array, "b i d"] | None = None,
        rotary: Rotary | None = None,
    ) -> Float[Array, "b n d"]:
        """Returns the attended x; `context` is attended to completely. Without it, `rotary` rotates x.

        The result of a second attention, to the tokens of an image, is added.
        """
        config = self.config

        def linear(name: str) -> nn.Dense:
            return layers.linear(config.dim, self.dtype, name)

        def heads(x: Float[Array, "b n d"], norm: str | None = None) -> Float[Array, "b n h e"]:
            x = product(x)
            if norm:
                x = nn.RMSNorm(epsilon=config.eps, dtype=jnp.float32, name=norm)(x)
            x = x.reshape(*x.shape[:2], config.num_attention_heads, -1)
            if norm and rotary is not None:
                x = rotate_pairs(x, rotary)
            return x.astype(self.dtype)

        if context is None:
            q, k, v = of_one_input([linear(name) for name in ("to_q", "to_k", "to_v")], x)
        else:
            q = linear("to_q")(x)
            k, v = of_one_input([linear(name) for name in ("to_k", "to_v")], context)
        queries = heads(q, "norm_q")
        y = attend(queries, heads(k, "norm_k"), heads(v))
        if image is not None:
            k, v = of_one_input([linear(name) for name in ("add_k_proj", "add_v_proj")], image)
            y = y + attend(queries, heads(k, "norm_added_k"), heads(v))
        return product(linear("to_out_0")(y.reshape(x.shape)))


class Block(nn.Module):
    """Modulated self-attention, cross-attention to the text, and a modulated feed-forward network."""

    config: WanConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        context: Float[Array, "b m d"],
        modulation: Float[Array, "b k 6 d"],
        first: Bool[Array, "n"],
        image: Float[Array, "b i d"] | None,
        rotary: Rotary,
    ) -> tuple[Float[Array, "b n d"], None]:
        """Updates the tokens; the second result is for `nn.scan`, which collects nothing."""
        config = self.config
        table = self.param("scale_shift_table", _table_init, (1, VECTORS, config.dim))
        shift, scale, gate, *of_mlp = _of_tokens(table + modulation, first)

        def modulated(shift: Array, scale: Array) -> Float[Array, "b n d"]:
            return layers.modulate(layers.layer_norm(x, config.eps), shift, scale, self.dtype)

        y = Attention(config, self.dtype, name="attn1")(modulated(shift, scale), rotary=rotary)
        x = layers.residual(x, gate, y)
        norm = nn.LayerNorm(config.eps, jnp.float32, use_fast_variance=False, name="norm2")
        y = norm(x).astype(self.dtype)
        x = x + Attention(config, self.dtype, name="attn2")(y, context, image)
        shift, scale, gate = of_mlp
        feed_forward = layers.FeedForward(self.dtype, config.ffn_dim, name="ffn")
        return layers.residual(x, gate, feed_forward(modulated(shift, scale))), None


class TextProjection(nn.Module):
    """diffusers' `PixArtAlphaTextProjection` with `gelu_tanh`: linear, GELU, linear."""

    dim: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, context: Float[Array, "b m c"]) -> Float[Array, "b m d"]:
        """Projects each token's state."""
        x = product(layers.linear(self.dim, self.dtype, "linear_1")(context.astype(self.dtype)))
        return product(
            layers.linear(self.dim, self.dtype, "linear_2")(nn.gelu(x, approximate=True))
        )


class ImageProjection(nn.Module):
    """diffusers' `WanImageEmbedding`: linear, GELU, linear, between two norms in float32."""

    dim: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, image: Float[Array, "b i e"]) -> Float[Array, "b i d"]:
        """Projects each state of the image."""

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(IMAGE_EPSILON, jnp.float32, use_fast_variance=False, name=name)

        gelu = functools.partial(nn.gelu, approximate=False)
        network = layers.FeedForward(self.dtype, image.shape[-1], gelu, self.dim, name="ff")
        return norm("norm2")(network(norm("norm1")(image).astype(self.dtype))).astype(self.dtype)


class ConditionEmbedder(nn.Module):
    """diffusers' `WanTimeTextImageEmbedding`; time and modulation are always float32."""

    config: WanConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        time: Float[Array, "b k"],
        context: Float[Array, "b m c"],
        image: Float[Array, "b i e"] | None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Returns the embedding of each time [b k d], the modulation of all blocks [b k 6 d], and text and image."""
        dim = self.config.dim
        features = layers.timestep_features(time.ravel(), self.config.freq_dim)
        features = features.reshape(*time.shape, -1)
        embedding = layers.Mlp(dim, name="time_embedder")(features)
        modulation = layers.linear(VECTORS * dim, jnp.float32, "time_proj")(nn.silu(embedding))
        text = TextProjection(dim, self.dtype, name="text_embedder")(context)
        if image is not None:
            image = ImageProjection(dim, self.dtype, name="image_embedder")(image)
        return embedding, modulation.reshape(*time.shape, VECTORS, dim), text, image


class WanTransformer(nn.Module):
    """Predicts the velocity of a clip's latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation,
    rotary positions and the embedding of time are always float32, as diffusers' `_keep_in_fp32_modules` has most of
    them. `remat` controls rematerialization.
    """

    config: WanConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b t h w c"],
        time: Float[Array, "b"] | Float[Array, "b 2"],
        context: Float[Array, "b m c"],
        image: Float[Array, "b i e"] | None = None,
    ) -> Float[Array, "b t h w o"]:
        """Predicts the velocity eps - x0, in float32.

        Args:
          latents: Latents with sides that are multiples of the patch's.
          time: Times in [0, 1000]; diffusers' pipeline passes integers. Two are those of the first frame's tokens and
            of the others.
          context: States of the prompts, zeros after their ends, which are attended to like any other.
          image: States of an image, for a network with `image_dim`.

        Raises:
          ValueError: the latents have a side that is no multiple of the patch's, or more tokens along an axis than
            there are positions.
        """
        config, patch = self.config, self.config.patch
        batch, frames, height, width, _ = latents.shape
        grid = frames, height // patch, width // patch
        if height % patch or width % patch or max(grid) > config.rope_max_seq_len:
            raise ValueError(
                f"latents of {frames} x {height} x {width} do not fit: height and width must be multiples of the "
                f"patch's size {patch}, and there are positions for {config.rope_max_seq_len} tokens along each axis "
                "(rope_max_seq_len)."
            )
        x = nn.Conv(
            config.dim,
            config.patch_size,
            config.patch_size,
            "VALID",
            dtype=self.dtype,
            conv_general_dilated=patch_product,
            name="patch_embedding",
        )(latents)
        x = x.reshape(batch, math.prod(grid), config.dim)
        embedder = ConditionEmbedder(config, self.dtype, name="condition_embedder")
        inputs = time.reshape(batch, -1), context, image
        embedding, modulation, context, image = embedder(*inputs)
        first = jnp.arange(x.shape[1]) < math.prod(grid[1:])
        block = block_run(Block, "blocks", 0, config.num_layers - 1, self.remat)
        x, _ = block(config, self.dtype)(
            x, context, modulation, first, image, video_rotary(config.axes_dims, grid, THETA)
        )

        table = self.param("scale_shift_table", _table_init, (1, 2, config.dim))
        shift, scale = _of_tokens(table + embedding[:, :, None], first)
        features = config.out_channels * patch**2
        x = layers.output(x, (scale, shift), features, self.dtype, epsilon=config.eps)
        x = x.reshape(batch * frames, -1, features)
        return layers.unpatched(x, patch, height, width).reshape(*latents.shape[:4], -1)


def _of_tokens(
    vectors: Float[Array, "b k v d"], first: Bool[Array, "n"]
) -> Sequence[Float[Array, "b 1 d"] | Float[Array, "b n d"]]:
    """Returns v vectors for the tokens; of two times the first is for tokens where `first` is True."""
    parts = [vectors[:, :, i] for i in range(vectors.shape[2])]
    if vectors.shape[1] == 1:
        return parts
    return [jnp.where(first[:, None], one[:, :1], one[:, 1:]) for one in parts]


def _table_init(key: Array, shape: tuple[int, ...]) -> Float[Array, "1 v d"]:
    return nn.initializers.normal(shape[-1] ** -0.5)(key, shape)


def forward_flops(
    config: WanConfig, latent: tuple[int, int, int, int], text: int, states: int = 0
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`); "image" is the video.

    `states` is the number of an image's states, which count as "text".
    """
    d, blocks, patch = config.dim, config.num_layers, config.patch
    frames, h, w, _ = latent
    video = frames * (h // patch) * (w // patch)
    # Four linear layers of the self-attention and the feed-forward network's two; queries and output of the
    # cross-attention are of the video, its keys and values of the text.
    wide = blocks * (6 * d * d + 2 * d * config.ffn_dim)
    of_a_token = patch**2 * (config.in_channels + config.out_channels)
    of_a_state = (config.image_dim or 0) * ((config.image_dim or 0) + d)
    products = {
        "image": video * (wide + of_a_token * d),
        "text": text * (config.text_dim * d + d * d)
        + states * of_a_state
        + (text + states) * blocks * 2 * d * d,
        "attention": 2 * d * blocks * video * (video + text + states),
        "modulation": (config.freq_dim + d) * d + VECTORS * d * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: WanConfig) -> tuple[Array, ...]:
    """Returns latents, time and context of a small clip of one frame, for `init`."""
    latents = jnp.zeros((1, 1, config.patch, config.patch, config.in_channels))
    image = () if config.image_dim is None else (jnp.zeros((1, 2, config.image_dim)),)
    return latents, jnp.ones(1), jnp.zeros((1, 2, config.text_dim)), *image


TRANSFORMER = Component(
    library="diffusers",
    classes=("WanTransformer3DModel",),
    network=WanTransformer,
    read_config=WanConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    # Queries' norm of an image, which some files have and diffusers does not read.
    ignored=lambda network: ("*norm_added_q*",),
    flops=forward_flops,
)
