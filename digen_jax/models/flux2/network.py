"""FLUX.2 transformer (Black Forest Labs; github.com/black-forest-labs/flux2, src/flux2/model.py), for klein.

Unlike FLUX.1, all blocks of a kind share their modulation, feed-forward networks are gated, a single block has one
input and one output matrix, the text has positions, and no layer has a bias. Attribute names are those of diffusers'
`Flux2Transformer2DModel`, so that a parameter's path is its tensor's name; dual blocks are scanned as one run
(`transformer_blocks_0to4`), and single blocks as another.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from digen_jax.attention.attend import attend, normed
from digen_jax.files import number
from digen_jax.models import dual_block, layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.layers import EPSILON, TIME_FEATURES, Remat, block_run, product
from digen_jax.models.rotary import Rotary, image_positions, joined, rotary_table, rotate_pairs


@dataclasses.dataclass(frozen=True)
class Flux2Config(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults except guidance; raises ValueError if they conflict.

    FLUX.2-dev, with guidance as a network input (`guidance_embeds`) and another text encoder, is not supported.

    Attributes:
      in_channels: Channels per token, which is one of the autoencoder's normed patches.
      mlp_ratio: Width of a feed-forward network's hidden layer, relative to the transformer's width.
      axes_dims_rope: Channels of a head rotated by a token's image, row, column, and text position.
    """

    title: ClassVar = "a FLUX.2 transformer"
    # diffusers' defaults; klein's files override the second.
    absent: ClassVar = {"out_channels": None, "guidance_embeds": True}

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
        self.check_rope(axes=4)
        if self.hidden < 1:
            raise ValueError(f"mlp_ratio times {self.dim} must be 1 or more, not {self.mlp_ratio}.")

    @property
    def hidden(self) -> int:
        """Width of a feed-forward network's hidden layer."""
        return int(self.dim * self.mlp_ratio)


LISTS = ("single_transformer_blocks", *dual_block.LISTS)
# `default_target_modules` of X-GenGroup/Flow-Factory, src/flow_factory/models/flux/flux2_klein.py (3e615ee). They are
# suffixes of names: its `attn.to_out.0` does not match single blocks, where diffusers names that layer `attn.to_out`.
LORA_TARGETS = (
    r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.linear_(in|out))"
    r"|single_transformer_blocks\.\d+\.attn\.to_qkv_mlp_proj"
)
# Logical axes of kernels (see `logical_axes`).
AXES = (
    *dual_block.AXES,
    (r"ff(_context)?/linear_in$", ("embed", "mlp")),
    (r"ff(_context)?/linear_out$", ("mlp", "embed")),
    # Columns, or rows, are the heads followed by the hidden layer.
    (r"^single.*/attn/to_qkv_mlp_proj$", ("embed", "mlp")),
    (r"^single.*/attn/to_out$", ("mlp", "embed")),
    (r"_modulation(_img|_txt)?/linear$", ("embed", "modulation")),
    (r"timestep_embedder/linear_1$", (None, "mlp")),
    (r"timestep_embedder/linear_2$", ("mlp", "embed")),
    (r"^context_embedder$", ("text", "embed")),
    (r"^x_embedder$", ("channels", "embed")),
    (r"^proj_out$", ("embed", "channels")),
)
QK_NORM = "rms_norm"
# Index of the first source image among the positions, and the distance to the next: `_prepare_image_ids` of diffusers'
# pipeline_flux2_klein.py.
SOURCE_INDEX = 10

# Shifts, scales and gates of a stream, each [b 1 d] in float32.
Vectors = Sequence[Float[Array, "b 1 d"]]


_linear = functools.partial(layers.linear, use_bias=False)


def gated(x: Float[Array, "b n _"]) -> Float[Array, "b n m"]:
    """Applies SwiGLU (arXiv 2002.05202) to a projection whose first half is the gate."""
    gate, value = jnp.split(x, 2, axis=-1)
    return nn.silu(gate) * value


class FeedForward(nn.Module):
    """Gated feed-forward network with one matrix for gate and value."""

    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies the network to each token."""
        y = gated(product(_linear(2 * self.hidden, self.dtype, "linear_in")(x)))
        return product(_linear(x.shape[-1], self.dtype, "linear_out")(y))


class DualBlock(nn.Module):
    """Updates two streams, image and text, with separate weights, joined in attention."""

    heads: int
    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        streams: tuple[Float[Array, "b n d"], Float[Array, "b m d"]],
        modulations: tuple[Vectors, Vectors],
        rotary: tuple[Rotary, Rotary],
    ) -> tuple[tuple[Float[Array, "b n d"], Float[Array, "b m d"]], None]:
        """Updates (image, text) with six modulation vectors each; the second result is for `nn.scan`."""

        def modulated(x: Array, shift: Array, scale: Array) -> Array:
            return layers.modulate(layers.layer_norm(x), shift, scale, self.dtype)

        image, text = (modulated(x, *v[:2]) for x, v in zip(streams, modulations, strict=True))
        attention = dual_block.JointAttention(
            self.heads, QK_NORM, self.dtype, use_bias=False, name="attn"
        )
        updates = attention(image, text, rotary=rotary)
        results = []
        for name, x, update, vectors in zip(
            ("ff", "ff_context"), streams, updates, modulations, strict=True
        ):
            x = layers.residual(x, vectors[2], cast(Array, update))
            update = FeedForward(self.hidden, self.dtype, name=name)(modulated(x, *vectors[3:5]))
            results.append(layers.residual(x, vectors[5], update))
        return (results[0], results[1]), None


class ParallelAttention(nn.Module):
    """Parallel attention and gated feed-forward network (arXiv 2302.05442), with one input and one output matrix."""

    heads: int
    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"], rotary: Rotary) -> Float[Array, "b n d"]:
        """Returns the update of each token."""
        dim = x.shape[-1]
        width = 3 * dim + 2 * self.hidden
        projected = product(_linear(width, self.dtype, "to_qkv_mlp_proj")(x))
        q, k, v, hidden = jnp.split(projected, [dim, 2 * dim, 3 * dim], axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], self.heads, -1) for a in (q, k, v))
        q, k = (
            rotate_pairs(normed(a, dual_block.HeadScale(name=name)(a.shape[-1])), rotary)
            for a, name in ((q, "norm_q"), (k, "norm_k"))
        )
        attended = attend(q, k, v).reshape(x.shape)
        together = jnp.concatenate([attended, gated(hidden)], axis=-1)
        return product(_linear(dim, self.dtype, "to_out")(together))


class SingleBlock(nn.Module):
    """Updates all tokens with `ParallelAttention`."""

    heads: int
    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], modulation: Vectors, rotary: Rotary
    ) -> tuple[Float[Array, "b n d"], None]:
        """Updates tokens with three modulation vectors; the second result is for `nn.scan`, which collects nothing."""
        shift, scale, gate = modulation
        modulated = layers.modulate(layers.layer_norm(x), shift, scale, self.dtype)
        attention = ParallelAttention(self.heads, self.hidden, self.dtype, name="attn")
        return layers.residual(x, gate, attention(modulated, rotary)), None


class TimeEmbed(nn.Module):
    """Embedding of the noise level, in float32."""

    dim: int

    @nn.compact
    def __call__(self, sigma: Float[Array, "b"]) -> Float[Array, "b d"]:
        """Embeds noise levels in [0, 1]."""
        features = layers.timestep_features(
            sigma * layers.NUM_TRAIN_TIMESTEPS, layers.TIME_FEATURES
        )
        return layers.Mlp(self.dim, use_bias=False, name="timestep_embedder")(features)


def text_positions(tokens: int) -> Int[np.ndarray, "n 4"]:
    """Returns (image, row, column, position) of text tokens, which differ only in the last."""
    return np.pad(np.arange(tokens)[:, None], ((0, 0), (3, 0)))


class Flux2Transformer(nn.Module):
    """Predicts the velocity of latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation, and
    the embedding of time are always float32: diffusers rounds time to the network's dtype before multiplying by 1000,
    so that time 990 becomes 988 in bfloat16. `remat` controls rematerialization.
    """

    config: Flux2Config
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b m d"],
        source: Float[Array, "b n h2 w2 c"] | None = None,
    ) -> Float[Array, "b h w o"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        `source` contains the latents of n source images to edit. All tokens are attended to, so padding of the context
        counts as text.
        """
        config, (batch, height, width, _) = self.config, latents.shape
        embedding = TimeEmbed(config.dim, name="time_guidance_embed")(sigma)

        def vectors(chunks: int, name: str) -> Vectors:
            return layers.Modulation(chunks, use_bias=False, name=name)(embedding)

        streams = (
            vectors(6, "double_stream_modulation_img"),
            vectors(6, "double_stream_modulation_txt"),
        )
        x, of_image = latents.reshape(batch, height * width, -1), image_positions(height, width)
        if source is not None:
            x = jnp.concatenate([x, source.reshape(batch, -1, source.shape[-1])], axis=1)
            _, count, rows, columns, _ = source.shape
            others = [image_positions(rows, columns, SOURCE_INDEX * (1 + i)) for i in range(count)]
            of_image = np.concatenate([of_image, *others])
        x = _linear(config.dim, self.dtype, "x_embedder")(x)
        context = _linear(config.dim, self.dtype, "context_embedder")(context)

        rotary = tuple(
            rotary_table(positions, config.axes_dims_rope, float(config.rope_theta))
            for positions in (np.pad(of_image, ((0, 0), (0, 1))), text_positions(context.shape[1]))
        )
        (x, context), _ = self._run(DualBlock, "transformer_blocks", config.num_layers)(
            (x, context), streams, rotary
        )
        table = joined(*rotary)
        tokens = jnp.concatenate([x, context], axis=1)
        singles = self._run(SingleBlock, "single_transformer_blocks", config.num_single_layers)
        tokens, _ = singles(tokens, vectors(3, "single_stream_modulation"), table)

        modulation = vectors(2, "norm_out")
        x = tokens[:, : height * width]
        x = layers.output(x, modulation, config.out_channels, self.dtype, use_bias=False)
        return x.astype(jnp.float32).reshape(batch, height, width, -1)

    def _run(self, block: type[nn.Module], name: str, count: int) -> nn.Module:
        """Returns `count` equal blocks of a torch list."""
        config = self.config
        run = block_run(block, name, 0, count - 1, self.remat)
        return run(config.num_attention_heads, config.hidden, self.dtype)


def forward_flops(
    config: Flux2Config, latent: tuple[int, int, int], text: int, source: int = 0
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`).

    `source` is the number of tokens of all source images, which count as "image".
    """
    d, blocks = config.dim, config.num_layers + config.num_single_layers
    h, w, _ = latent
    own = h * w
    image = own + source
    # A dual block has, for each stream, four linear layers of attention and three matrices of a gated feed-forward
    # network, two of them fused. A single block has the same for all tokens, in two matrices.
    wide = blocks * (4 * d * d + 3 * d * config.hidden)
    modulations = 2 * 6 + 3 + 2  # streams, single blocks, norm_out
    products = {
        "image": image * (wide + config.in_channels * d) + own * config.out_channels * d,
        "text": text * (wide + config.joint_attention_dim * d),
        "attention": 2 * d * blocks * (image + text) ** 2,
        "modulation": modulations * d * d + (TIME_FEATURES + d) * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: Flux2Config) -> tuple[Array, ...]:
    """Returns latents, sigma and context of one small image, for `init`."""
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    return jnp.zeros((1, 1, 1, config.in_channels)), jnp.ones(1), context


TRANSFORMER = Component(
    library="diffusers",
    classes=("Flux2Transformer2DModel",),
    network=Flux2Transformer,
    read_config=Flux2Config.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
