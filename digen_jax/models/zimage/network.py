"""Z-Image transformer (Z-Image Team, arXiv 2511.22699), a single stream of image and caption tokens.

Attribute names are those of diffusers' `ZImageTransformer2DModel`, so that a parameter's path is its tensor's name;
runs of equal blocks are scanned (`layers_0to29`).

    image   [patches, x_pad_token ..]  -> noise_refiner   -\\
                                                            layers -> all_final_layer -> velocity
    caption [states, cap_pad_token ..] -> context_refiner -/

Both are padded to a multiple of 32 tokens, each row's caption separately. These pad tokens are attended to.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from digen_jax.attention.attend import attend
from digen_jax.files import number
from digen_jax.models import layers
from digen_jax.models.family import Component, TransformerConfig
from digen_jax.models.layers import Remat, block_run, product
from digen_jax.models.linear import of_one_input
from digen_jax.models.rotary import Rotary, rotate_pairs, turned_by

# Constants of diffusers' transformer_z_image.py.
MULTIPLE = 32  # SEQ_MULTI_OF
EMBEDDING = 256  # ADALN_EMBED_DIM


@dataclasses.dataclass(frozen=True)
class ZImageConfig(TransformerConfig):
    """Fields of diffusers' config.json, with its defaults; raises ValueError if they conflict.

    Attributes:
      axes_dims: Channels of a head rotated by each axis: caption position, row, column.
      axes_lens: Number of positions along each axis.
    """

    title: ClassVar = "a Z-Image transformer"

    all_patch_size: tuple[int, ...] = (2,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = number(30, 1, 1000)
    n_refiner_layers: int = number(2, 1, 1000)
    n_heads: int = 30
    n_kv_heads: int = 30
    norm_eps: float = number(1e-5, 0, 1)
    qk_norm: Literal[True] = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: Literal[None] = None  # of reference images, which only Omni models read
    rope_theta: float = number(256.0, 1, 1e12)
    t_scale: float = number(1000.0, 0)
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def __post_init__(self):
        if len(self.all_patch_size) != 1 or self.all_patch_size[0] < 1:
            raise ValueError(f"all_patch_size must be one number, not {list(self.all_patch_size)}.")
        if tuple(self.all_f_patch_size) != (1,):
            raise ValueError(f"all_f_patch_size must be [1], not {list(self.all_f_patch_size)}.")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"n_kv_heads must equal n_heads = {self.n_heads}, not {self.n_kv_heads}."
            )
        widths = self.axes_dims
        even = all(width > 0 and width % 2 == 0 for width in widths)
        if len(widths) != 3 or not even or sum(widths) * self.n_heads != self.dim:
            raise ValueError(
                f"axes_dims must be three even numbers whose sum is dim / n_heads = "
                f"{self.dim} / {self.n_heads}, not {list(widths)}."
            )
        if len(self.axes_lens) != 3 or min(self.axes_lens) < 1:
            raise ValueError(f"axes_lens must be three numbers from 1, not {list(self.axes_lens)}.")

    @property
    def num_attention_heads(self) -> int:
        """Number of heads, under the name in other transformers."""
        return self.n_heads

    @property
    def attention_head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.n_heads

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return self.all_patch_size[0]

    @property
    def hidden(self) -> int:
        """Width of a feed-forward network's hidden layer."""
        return int(self.dim / 3 * 8)

    @property
    def embedding(self) -> int:
        """Width of the time embedding."""
        return min(self.dim, EMBEDDING)

    @property
    def longest_caption(self) -> int:
        """Maximum caption tokens that leave a position for the image."""
        return (self.axes_lens[0] - 2) // MULTIPLE * MULTIPLE


def filled_up(tokens: int | Int[Array, "b"]) -> int | Int[Array, "b"]:
    """Returns the number of tokens of an image or caption with pad tokens."""
    return tokens + -tokens % MULTIPLE


def caption_rotary(config: ZImageConfig, tokens: int) -> Rotary:
    """Returns the rotary table of captions of `tokens` tokens, which is the same for all rows."""
    still = np.zeros((tokens, sum(config.axes_dims[1:]) // 2), np.float32)
    return turned_by(np.concatenate([_angles(config, 0, tokens + 1)[1:], still], axis=1))


def image_rotary(
    config: ZImageConfig, grid: tuple[int, int], tokens: int, lengths: Int[Array, "b"]
) -> Rotary:
    """Returns the rotary table of each row's image, whose position follows its caption.

    Args:
      config: Config of the transformer.
      grid: Rows and columns of patches.
      tokens: Image tokens with pad tokens.
      lengths: Length of each caption with pad tokens.
    """
    rows, columns = (index.reshape(-1) for index in np.indices(grid))
    angles = [_angles(config, 1, grid[0])[rows], _angles(config, 2, grid[1])[columns]]
    inside = np.pad(np.concatenate(angles, axis=1), ((0, tokens - rows.size), (0, 0)))
    behind = turned_by(_angles(config, 0, config.longest_caption + 2))
    filling = np.arange(tokens) >= rows.size
    places = jnp.where(filling, 0, lengths[:, None] + 1)
    first = Rotary(*(jnp.asarray(table)[places] for table in behind))
    return Rotary(
        *(
            jnp.concatenate([a, jnp.broadcast_to(b, (*a.shape[:2], b.shape[-1]))], axis=-1)
            for a, b in zip(first, turned_by(inside), strict=True)
        )
    )


def joined(image: Rotary, caption: Rotary) -> Rotary:
    """Concatenates both tables, the image first."""
    return Rotary(
        *(
            jnp.concatenate([i, jnp.broadcast_to(c, (len(i), *c.shape))], axis=1)
            for i, c in zip(image, caption, strict=True)
        )
    )


def _angles(config: ZImageConfig, axis: int, positions: int) -> Float[np.ndarray, "n half"]:
    """Returns angles of an axis's channel pairs by position; float64 rounded to float32, as in diffusers."""
    width = config.axes_dims[axis]
    pairs = 1 / config.rope_theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    return np.outer(np.arange(positions), pairs).astype(np.float32)


LISTS = (
    "layers",
    "noise_refiner",
    "context_refiner",
    "to_out",
    "adaLN_modulation",
    "mlp",
    "cap_embedder",
)
# `default_target_modules` of X-GenGroup/Flow-Factory, src/flow_factory/models/z_image/z_image.py (5405453). They are
# suffixes of names, so the refiners have LoRA, too.
LORA_TARGETS = (
    r"(layers|noise_refiner|context_refiner)\.\d+\."
    r"(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])"
)
# Logical axes of kernels (see `logical_axes`).
AXES = (
    (r"attention/to_[qkv]$", ("embed", "heads")),
    (r"attention/norm_[qk]$", ("head_dim",)),
    (r"attention/to_out_0$", ("heads", "embed")),
    (r"feed_forward/w[13]$", ("embed", "mlp")),
    (r"feed_forward/w2$", ("mlp", "embed")),
    (r"(attention|ffn)_norm[12]$", ("embed",)),
    (r"/adaLN_modulation_0$", (None, "modulation")),
    (r"/adaLN_modulation_1$", (None, "embed")),
    (r"^t_embedder/mlp_0$", (None, "mlp")),
    (r"^t_embedder/mlp_2$", ("mlp", None)),
    (r"^cap_embedder_0$", ("text",)),
    (r"^cap_embedder_1$", ("text", "embed")),
    (r"^all_x_embedder/", ("channels", "embed")),
    (r"^all_final_layer/.*/linear$", ("embed", "channels")),
    (r"^$", ("embed",)),  # pad tokens
)
TIME_FEATURES, TIME_HIDDEN = 256, 1024
HEAD_EPSILON = 1e-5  # of the heads' norms, regardless of `norm_eps`


class FeedForward(nn.Module):
    """Gated feed-forward network, SwiGLU (arXiv 2002.05202)."""

    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Applies the network to each token."""

        def linear(features: int, name: str) -> nn.Dense:
            return layers.linear(features, self.dtype, name, use_bias=False)

        gate, up = of_one_input([linear(self.hidden, name) for name in ("w1", "w3")], x)
        return product(linear(x.shape[-1], "w2")(nn.silu(product(gate)) * product(up)))


class Attention(nn.Module):
    """Self-attention with RMS norms of heads and rotary positions."""

    heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], rotary: Rotary, lengths: Int[Array, "b"] | None
    ) -> Float[Array, "b n d"]:
        """Attends to each row's first `lengths` tokens. None means all tokens."""
        dim = x.shape[-1]

        def linear(name: str) -> nn.Dense:
            return layers.linear(dim, self.dtype, name, use_bias=False)

        def turned(x: Float[Array, "b n h d"], name: str) -> Float[Array, "b n h d"]:
            norm = nn.RMSNorm(epsilon=HEAD_EPSILON, dtype=jnp.float32, name=name)
            return rotate_pairs(norm(x), rotary).astype(self.dtype)

        projected = of_one_input([linear(name) for name in ("to_q", "to_k", "to_v")], x)
        q, k, v = (product(y).reshape(*x.shape[:2], self.heads, -1) for y in projected)
        y = attend(turned(q, "norm_q"), turned(k, "norm_k"), v, lengths)
        return product(linear("to_out_0")(y.reshape(x.shape)))


class Block(nn.Module):
    """Attention and a feed-forward network, normed before and after; `modulated` by the time embedding."""

    config: ZImageConfig
    modulated: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b n d"],
        embedding: Float[Array, "b e"] | None,
        rotary: Rotary,
        lengths: Int[Array, "b"] | None,
    ) -> tuple[Float[Array, "b n d"], None]:
        """Updates the tokens; the second result is for `nn.scan`, which collects nothing."""
        config = self.config
        scale, gate, mlp_scale, mlp_gate = self._factors(embedding)
        y = (self._norm("attention_norm1")(x) * scale).astype(self.dtype)
        y = Attention(config.n_heads, self.dtype, name="attention")(y, rotary, lengths)
        x = (x + gate * self._norm("attention_norm2")(y)).astype(self.dtype)
        y = (self._norm("ffn_norm1")(x) * mlp_scale).astype(self.dtype)
        y = FeedForward(config.hidden, self.dtype, name="feed_forward")(y)
        return (x + mlp_gate * self._norm("ffn_norm2")(y)).astype(self.dtype), None

    def _norm(self, name: str) -> nn.RMSNorm:
        return nn.RMSNorm(epsilon=self.config.norm_eps, dtype=jnp.float32, name=name)

    def _factors(
        self, embedding: Float[Array, "b e"] | None
    ) -> list[Float[Array, "b 1 d"] | float]:
        """Returns the input scale and output gate of attention, and of the feed-forward network."""
        if not self.modulated:
            return [1.0] * 4
        zeros = nn.initializers.zeros
        linear = layers.linear(
            4 * self.config.dim, jnp.float32, "adaLN_modulation_0", kernel_init=zeros
        )
        scale, gate, mlp_scale, mlp_gate = jnp.split(linear(embedding)[:, None], 4, axis=-1)
        return [1 + scale, jnp.tanh(gate), 1 + mlp_scale, jnp.tanh(mlp_gate)]


class TimeEmbedder(nn.Module):
    """Embedding of time in float32, for the modulation."""

    features: int

    @nn.compact
    def __call__(self, time: Float[Array, "b"]) -> Float[Array, "b e"]:
        """Embeds a time in [0, `t_scale`]."""

        def linear(features: int, name: str) -> nn.Dense:
            return layers.linear(features, jnp.float32, name, kernel_init=layers.embedder_init)

        hidden = linear(TIME_HIDDEN, "mlp_0")(layers.timestep_features(time, TIME_FEATURES))
        return linear(self.features, "mlp_2")(nn.silu(hidden))


class PatchEmbedders(nn.Module):
    """Dictionary of linear layers by patch size, as in diffusers; it has one entry."""

    config: ZImageConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Maps patches to tokens row by row; raises ValueError if latents do not fit the patches or the positions."""
        height, width = latents.shape[1:3]
        patch, (_, rows, columns) = self.config.patch, self.config.axes_lens
        h, w = height // patch, width // patch
        if height % patch or width % patch or h > rows or w > columns:
            raise ValueError(
                f"latents of {height} x {width} do not fit: height and width must be multiples of the patch's size "
                f"{patch}, and at most {rows * patch} and {columns * patch} (axes_lens)."
            )
        tokens = layers.patches(latents, patch)
        return layers.linear(self.config.dim, self.dtype, _key(self.config))(tokens)


class FinalLayer(nn.Module):
    """Maps tokens to the values of their patches, with a norm scaled by the time embedding."""

    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], embedding: Float[Array, "b e"]
    ) -> Float[Array, "b n p"]:
        """Applies the layer to each token."""
        zeros = nn.initializers.zeros
        scale = layers.linear(x.shape[-1], jnp.float32, "adaLN_modulation_1", kernel_init=zeros)
        x = layers.layer_norm(x) * (1 + scale(nn.silu(embedding))[:, None])
        return layers.linear(self.features, self.dtype, "linear", kernel_init=zeros)(
            x.astype(self.dtype)
        )


class FinalLayers(nn.Module):
    """Dictionary of final layers by patch size, as in diffusers; it has one entry."""

    config: ZImageConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], embedding: Float[Array, "b e"], height: int, width: int
    ) -> Float[Array, "b h w c"]:
        """Maps the image's tokens to latents of `height` x `width`, in float32."""
        patch, channels = self.config.patch, self.config.in_channels
        final = FinalLayer(patch * patch * channels, self.dtype, name=_key(self.config))
        tokens = final(x, embedding).astype(jnp.float32)
        return layers.unpatched(tokens, patch, height, width)


class ZImageTransformer(nn.Module):
    """Predicts the velocity of latents under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation,
    rotary positions and the embedding of time are always float32. `remat` controls rematerialization.
    """

    config: ZImageConfig
    dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        latents: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        context: Float[Array, "b n d"],
        mask: Bool[Array, "b n"],
    ) -> Float[Array, "b h w c"]:
        """Predicts the velocity eps - x0, in float32, of latents at noise level sigma in [0, 1].

        The network itself predicts x0 - eps at time 1 - sigma.

        Args:
          latents: Latents with sides that are multiples of the patch's.
          sigma: Noise levels.
          context: States of the captions.
          mask: True for a caption's tokens, at least one per row, False for trailing padding.

        Raises:
          ValueError: latents or captions have more tokens than there are positions.
        """
        config = self.config
        height, width = latents.shape[1:3]
        embedding = TimeEmbedder(config.embedding, name="t_embedder")((1 - sigma) * config.t_scale)
        x, captions = self._image(latents), self._captions(context, mask)
        lengths: Any = filled_up(mask.sum(axis=1).astype(jnp.int32))
        grid = height // config.patch, width // config.patch
        of_image = image_rotary(config, grid, x.shape[1], lengths)
        of_caption = caption_rotary(config, captions.shape[1])
        x, _ = self._blocks("noise_refiner")(x, embedding, of_image, None)
        captions, _ = self._blocks("context_refiner")(captions, None, of_caption, lengths)
        rotary = joined(of_image, of_caption)
        tokens = jnp.concatenate([x, captions], axis=1)
        tokens, _ = self._blocks("layers")(tokens, embedding, rotary, x.shape[1] + lengths)
        final = FinalLayers(config, self.dtype, name="all_final_layer")
        return -final(tokens[:, : grid[0] * grid[1]], embedding, height, width)

    def _blocks(self, name: str) -> nn.Module:
        count = self.config.n_layers if name == "layers" else self.config.n_refiner_layers
        block = block_run(Block, name, 0, count - 1, self.remat)
        return block(self.config, name != "context_refiner", self.dtype)

    def _filler(self, name: str) -> Float[Array, "1 d"]:
        return self.param(name, layers.embedder_init, (1, self.config.dim)).astype(self.dtype)

    def _image(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Returns the image's tokens with pad tokens."""
        x = PatchEmbedders(self.config, self.dtype, name="all_x_embedder")(latents)
        batch, tokens, dim = x.shape
        shape = (batch, filled_up(tokens) - tokens, dim)
        filling = jnp.broadcast_to(self._filler("x_pad_token"), shape)
        return jnp.concatenate([x, filling], axis=1)

    def _captions(
        self, context: Float[Array, "b n d"], mask: Bool[Array, "b n"]
    ) -> Float[Array, "b m w"]:
        """Returns the captions' tokens with pad tokens, some of which are beyond a row's length and not attended to."""
        config = self.config
        more = filled_up(context.shape[1]) - context.shape[1]
        if context.shape[1] + more > config.longest_caption:
            raise ValueError(
                f"a caption of {context.shape[1]} tokens does not fit: it may have {config.longest_caption} "
                "(axes_lens)."
            )
        context = jnp.pad(context, ((0, 0), (0, more), (0, 0)))
        mask = jnp.pad(mask, ((0, 0), (0, more)))
        norm = nn.RMSNorm(epsilon=config.norm_eps, dtype=jnp.float32, name="cap_embedder_0")
        linear = layers.linear(config.dim, self.dtype, "cap_embedder_1")
        x = linear(norm(context).astype(self.dtype))
        return jnp.where(mask[..., None], x, self._filler("cap_pad_token"))


def _key(config: ZImageConfig) -> str:
    """Returns diffusers' key of a patch size: pixels along the sides, and frames."""
    return f"{config.patch}-1"


def forward_flops(
    config: ZImageConfig, latent: tuple[int, int, int], text: int
) -> dict[str, float]:
    """Returns FLOPs by stream (see `Component.flops`)."""
    d, patch = config.dim, config.patch
    h, w, _ = latent
    patches = (h // patch) * (w // patch)
    image, captions = int(filled_up(patches)), int(filled_up(text))
    numbers = patch * patch * config.in_channels
    refiners, blocks = config.n_refiner_layers, config.n_layers
    block = 4 * d * d + 3 * d * config.hidden
    wide = (refiners + blocks) * block
    time = TIME_FEATURES * TIME_HIDDEN + TIME_HIDDEN * config.embedding
    modulations = 4 * (refiners + blocks) + 1  # the last is the final layer's
    products = {
        "image": image * wide + patches * 2 * numbers * d,
        "text": captions * (wide + config.cap_feat_dim * d),
        "attention": 2
        * d
        * (refiners * (image**2 + captions**2) + blocks * (image + captions) ** 2),
        "modulation": modulations * config.embedding * d + time,
    }
    return {stream: 2.0 * count for stream, count in products.items()}


def inputs(config: ZImageConfig) -> tuple[Array, ...]:
    """Returns latents, sigma, context and mask of one small image, for `init`."""
    x = jnp.zeros((1, config.patch, config.patch, config.in_channels))
    context = jnp.zeros((1, 2, config.cap_feat_dim))
    return x, jnp.ones(1), context, jnp.ones((1, 2), bool)


TRANSFORMER = Component(
    library="diffusers",
    classes=("ZImageTransformer2DModel",),
    network=ZImageTransformer,
    read_config=ZImageConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    flops=forward_flops,
)
