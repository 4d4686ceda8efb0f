"""The Z-Image transformer (Z-Image Team, arXiv 2511.22699), a single stream of image and caption tokens.

Attribute names are those of diffusers' `ZImageTransformer2DModel`, so that a parameter's path is its tensor's name;
runs of equal blocks are scanned (`layers_0to29`).

    image   [patches, x_pad_token ..]  -> noise_refiner   -\\
                                                            layers -> all_final_layer -> velocity
    caption [states, cap_pad_token ..] -> context_refiner -/

Both are filled up to a multiple of 32 tokens, each row's caption by itself, and what fills them up is attended to.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from digen_jax.attention.attend import attend
from digen_jax.models import layers
from digen_jax.models.linear import Linear, of_one_input
from digen_jax.models.remat import Remat, block_run, product
from digen_jax.models.rotary import Rotary, rotate_pairs
from digen_jax.models.zimage.config import ZImageConfig, filled_up
from digen_jax.models.zimage.positions import caption_rotary, image_rotary, joined

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
# ends of names, so the refiners have LoRA, too.
LORA_TARGETS = (
    r"(layers|noise_refiner|context_refiner)\.\d+\."
    r"(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])"
)
# The logical axes of kernels, see `logical_axes`.
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
    (r"^$", ("embed",)),  # the tokens that fill up
)
# Constants of diffusers' transformer_z_image.py.
TIME_FEATURES, TIME_HIDDEN = 256, 1024
HEAD_EPSILON = 1e-5  # of the heads' norms, whatever `norm_eps` is


class FeedForward(nn.Module):
    """A gated feed-forward network, SwiGLU (arXiv 2002.05202)."""

    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Apply to each token."""

        def linear(features: int, name: str) -> nn.Dense:
            return _linear(features, self.dtype, name, use_bias=False)

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
        """Attends to each row's first `lengths` tokens; None: to all."""
        dim = x.shape[-1]

        def linear(name: str) -> nn.Dense:
            return _linear(dim, self.dtype, name, use_bias=False)

        def turned(x: Float[Array, "b n h d"], name: str) -> Float[Array, "b n h d"]:
            norm = nn.RMSNorm(epsilon=HEAD_EPSILON, dtype=jnp.float32, name=name)
            return rotate_pairs(norm(x), rotary).astype(self.dtype)

        projected = of_one_input([linear(name) for name in ("to_q", "to_k", "to_v")], x)
        q, k, v = (product(y).reshape(*x.shape[:2], self.heads, -1) for y in projected)
        y = attend(turned(q, "norm_q"), turned(k, "norm_k"), v, lengths)
        return product(linear("to_out_0")(y.reshape(x.shape)))


class Block(nn.Module):
    """Attention and a feed-forward network, normed before and behind; `modulated`: by the embedding of time."""

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
        """Of what goes into attention, what comes out, and the same of the feed-forward network."""
        if not self.modulated:
            return [1.0] * 4
        zeros = nn.initializers.zeros
        linear = _linear(4 * self.config.dim, jnp.float32, "adaLN_modulation_0", kernel_init=zeros)
        scale, gate, mlp_scale, mlp_gate = jnp.split(linear(embedding)[:, None], 4, axis=-1)
        return [1 + scale, jnp.tanh(gate), 1 + mlp_scale, jnp.tanh(mlp_gate)]


class TimeEmbedder(nn.Module):
    """Embedding of time in float32, for the modulation."""

    features: int

    @nn.compact
    def __call__(self, time: Float[Array, "b"]) -> Float[Array, "b e"]:
        """Of a time in [0, `t_scale`]."""

        def linear(features: int, name: str) -> nn.Dense:
            return _linear(features, jnp.float32, name, kernel_init=layers.embedder_init)

        hidden = linear(TIME_HIDDEN, "mlp_0")(layers.timestep_features(time, TIME_FEATURES))
        return linear(self.features, "mlp_2")(nn.silu(hidden))


class PatchEmbedders(nn.Module):
    """diffusers' dictionary of linear layers by the patch's size, which has one."""

    config: ZImageConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Patches to tokens row by row; raises ValueError if latents do not fit the patches or the positions."""
        batch, height, width, channels = latents.shape
        patch, (_, rows, columns) = self.config.patch, self.config.axes_lens
        h, w = height // patch, width // patch
        if height % patch or width % patch or h > rows or w > columns:
            raise ValueError(
                f"latents of {height} x {width} do not fit: height and width must be multiples of the patch's size "
                f"{patch}, and at most {rows * patch} and {columns * patch} (axes_lens)."
            )
        x = latents.reshape(batch, h, patch, w, patch, channels)
        x = jnp.einsum("bhpwqc->bhwpqc", x).reshape(batch, h * w, patch * patch * channels)
        return _linear(self.config.dim, self.dtype, _key(self.config))(x)


class FinalLayer(nn.Module):
    """Tokens to the numbers of their patches, with a norm that the embedding of time scales."""

    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], embedding: Float[Array, "b e"]
    ) -> Float[Array, "b n p"]:
        """Apply to each token."""
        zeros = nn.initializers.zeros
        scale = _linear(x.shape[-1], jnp.float32, "adaLN_modulation_1", kernel_init=zeros)
        x = layers.layer_norm(x) * (1 + scale(nn.silu(embedding))[:, None])
        return _linear(self.features, self.dtype, "linear", kernel_init=zeros)(x.astype(self.dtype))


class FinalLayers(nn.Module):
    """diffusers' dictionary of final layers by the patch's size, which has one."""

    config: ZImageConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "b n d"], embedding: Float[Array, "b e"], height: int, width: int
    ) -> Float[Array, "b h w c"]:
        """The image's tokens to latents of `height` x `width`, in float32."""
        patch, channels = self.config.patch, self.config.in_channels
        final = FinalLayer(patch * patch * channels, self.dtype, name=_key(self.config))
        x = final(x, embedding).astype(jnp.float32)
        x = x.reshape(len(x), height // patch, width // patch, patch, patch, channels)
        return jnp.einsum("bhwpqc->bhpwqc", x).reshape(len(x), height, width, channels)


class ZImageTransformer(nn.Module):
    """Velocity of a latent image under text conditioning.

    Parameters are float32; `dtype` is that of the blocks' matrix products and streams. Norms, softmax, modulation,
    rotary positions and the embedding of time are always float32.
    `remat` says what the backward pass recomputes.
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

        The network itself is one of x0 - eps at time 1 - sigma.

        Args:
          latents: with sides that are multiples of the patch's.
          sigma: noise levels.
          context: a caption's states.
          mask: True for a caption's tokens, of which each row has some, False for the padding behind them.

        Raises:
          ValueError: latents or captions have more tokens than there are positions.
        """
        config = self.config
        height, width = latents.shape[1:3]
        embedding = TimeEmbedder(config.embedding, name="t_embedder")((1 - sigma) * config.t_scale)
        x, captions = self._image(latents), self._captions(context, mask)
        lengths = filled_up(mask.sum(axis=1).astype(jnp.int32))
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
        """The image's tokens, filled up."""
        x = PatchEmbedders(self.config, self.dtype, name="all_x_embedder")(latents)
        batch, tokens, dim = x.shape
        shape = (batch, filled_up(tokens) - tokens, dim)
        filling = jnp.broadcast_to(self._filler("x_pad_token"), shape)
        return jnp.concatenate([x, filling], axis=1)

    def _captions(
        self, context: Float[Array, "b n d"], mask: Bool[Array, "b n"]
    ) -> Float[Array, "b m w"]:
        """The captions' tokens, filled up; behind these are some that nothing attends to."""
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
        linear = _linear(config.dim, self.dtype, "cap_embedder_1")
        x = linear(norm(context).astype(self.dtype))
        return jnp.where(mask[..., None], x, self._filler("cap_pad_token"))


def _linear(features: int, dtype: DTypeLike, name: str, **options: Any) -> nn.Dense:
    options = {"kernel_init": layers.linear_init} | options
    return Linear(features, dtype=dtype, name=name, **options)


def _key(config: ZImageConfig) -> str:
    """The key of a patch's size: along the sides, and in frames, as diffusers writes it."""
    return f"{config.patch}-1"
