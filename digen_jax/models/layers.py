"""Layers shared by transformer families, with diffusers' names, and rematerialization of their blocks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from digen_jax.attention.attend import RESIDUALS
from digen_jax.models.linear import Linear

# From most to least memory. "none": saves everything. "keep_products": saves block inputs, results of linear layers,
# and the residuals of attention; recomputes only norms, activation functions and similar. "keep_attention": also
# recomputes linear layers. "blocks": saves only block inputs.
Remat = Literal["none", "keep_products", "keep_attention", "blocks"]
PRODUCTS = "product"

_KEPT = {"blocks": (), "keep_attention": (RESIDUALS,), "keep_products": (RESIDUALS, PRODUCTS)}


def rematerialised(block: type[nn.Module], remat: Remat, scanned: bool) -> type[nn.Module]:
    """Wraps a block so that its backward pass recomputes everything that `remat` does not save.

    Args:
      block: Block whose products are marked by `product`.
      remat: See `Remat`.
      scanned: Whether the block is the body of a scan, which is compiled separately, so CSE cannot undo the remat.
    """
    if remat == "none":
        return block
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    return nn.remat(block, prevent_cse=not scanned, policy=policy)


def block_run(
    block: type[nn.Module], name: str, first: int, last: int, remat: Remat
) -> Callable[..., nn.Module]:
    """Returns the constructor of equal blocks first..last of a torch list as one module, scanned if there are several.

    Blocks take (carry, *others) and return (carry, None); all blocks share the others.
    """
    scanned = last > first
    block = rematerialised(block, remat, scanned)
    name = f"{name}_{first}"
    if scanned:
        name += f"to{last}"
        block = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=last - first + 1,
        )
    return functools.partial(block, name=name)


def product(y: Array) -> Array:
    """Marks the result of a linear layer for the remat policy."""
    return checkpoint_name(y, PRODUCTS)


EPSILON = 1e-6
TIME_FEATURES = 256
NUM_TRAIN_TIMESTEPS = 1000
SIDE = 2  # latents along each side of a packed token

linear_init = nn.initializers.xavier_uniform()
embedder_init = nn.initializers.normal(0.02)


def linear(
    features: int, dtype: DTypeLike, name: str, use_bias: bool = True, **options: Any
) -> nn.Dense:
    """Creates a linear layer in the calling module."""
    options = {"kernel_init": linear_init} | options
    return Linear(features, use_bias, dtype=dtype, name=name, **options)


def sincos_1d(positions: Float[np.ndarray, "n"], dim: int) -> Float[np.ndarray, "n dim"]:
    """Returns [sin, cos] of positions times dim/2 frequencies from 1 down to 1/10000, in float64."""
    frequencies = 1.0 / 10000 ** (np.arange(dim // 2, dtype=np.float64) / (dim / 2))
    angles = np.outer(positions, frequencies)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def sincos_2d_table(size: int, base_size: int, dim: int) -> Float[Array, "1 n dim"]:
    """Returns the sin-cos table of a size x size grid, row by row, with the spacing of a `base_size` grid of patches.

    An entry is [column embedding, row embedding] (diffusers' `get_2d_sincos_pos_embed`), so the table is two broadcasts
    of a one-dimensional one, and its abstract evaluation is free.
    """
    positions = np.arange(size, dtype=np.float32) / np.float32(size / base_size)
    line = jnp.asarray(sincos_1d(positions, dim // 2), jnp.float32)
    column = jnp.broadcast_to(line[None, :], (size, size, dim // 2))
    row = jnp.broadcast_to(line[:, None], (size, size, dim // 2))
    return jnp.concatenate([column, row], axis=-1).reshape(1, size * size, dim)


def timestep_features(
    timestep: Float[Array, "b"], dim: int, scale: int = 1
) -> Float[Array, "b dim"]:
    """Returns [cos, sin] features of `scale` * timestep in [0, 1000], float32 as in diffusers' `Timesteps`."""
    half = dim // 2
    exponent = np.arange(half, dtype=np.float32) * np.float32(-np.log(10000.0))
    # exp in float64: float32 results differ between libraries, and a timestep of 1000 multiplies the error
    frequencies = np.exp((exponent / np.float32(half)).astype(np.float64)).astype(np.float32)
    angles = scale * (timestep.astype(jnp.float32)[:, None] * frequencies)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def layer_norm(x: Float[Array, "b n d"], epsilon: float = EPSILON) -> Float[Array, "b n d"]:
    """Applies layer norm over the last axis without scale or bias; returns float32 also for bfloat16 input."""
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)


def modulate(
    normed: Float[Array, "b n d"],
    shift: Float[Array, "b 1 d"],
    scale: Float[Array, "b 1 d"],
    dtype: DTypeLike,
) -> Float[Array, "b n d"]:
    """Scales and shifts in float32, then rounds to the compute dtype."""
    return (normed * (1 + scale) + shift).astype(dtype)


def residual(
    x: Float[Array, "b n d"], gate: Float[Array, "b 1 d"], update: Float[Array, "b n d"]
) -> Float[Array, "b n d"]:
    """Adds an update times its gate in float32, and rounds to x's dtype."""
    return (x + gate * update).astype(x.dtype)


def modulation(
    embedding: Float[Array, "b d"], chunks: int, name: str, use_bias: bool = True
) -> Sequence[Float[Array, "b 1 d"]]:
    """Returns `chunks` float32 vectors from the conditioning, with shapes that broadcast over tokens.

    Uses a linear layer `name` of the calling module, initialized to zero (adaLN-Zero of DiT).
    """
    features = chunks * embedding.shape[-1]
    layer = linear(features, jnp.float32, name, use_bias, kernel_init=nn.initializers.zeros)
    return jnp.split(layer(nn.silu(embedding))[:, None], chunks, axis=-1)


class Modulation(nn.Module):
    """Linear layer of diffusers' adaptive layer norms."""

    chunks: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, embedding: Float[Array, "b d"]) -> Sequence[Float[Array, "b 1 d"]]:
        """Returns modulation vectors (see `modulation`)."""
        return modulation(embedding, self.chunks, "linear", self.use_bias)


class Mlp(nn.Module):
    """diffusers' TimestepEmbedding and PixArtAlphaTextProjection: linear, silu, linear; float32."""

    dim: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "b i"]) -> Float[Array, "b d"]:
        """Embeds each row of x in `dim` channels."""

        def embed(name: str) -> nn.Dense:
            return linear(self.dim, jnp.float32, name, self.use_bias, kernel_init=embedder_init)

        return embed("linear_2")(nn.silu(embed("linear_1")(x)))


class TimeTextEmbed(nn.Module):
    """Embedding of noise level, pooled text and optional guidance for the modulation, in float32."""

    dim: int

    @nn.compact
    def __call__(
        self,
        sigma: Float[Array, "b"],
        pooled: Float[Array, "b p"],
        guidance: Float[Array, "b"] | None = None,
    ) -> Float[Array, "b d"]:
        """Returns the sum of the embeddings; guidance corresponds to diffusers' `guidance_embeds`."""

        def embed(number: Float[Array, "b"], name: str) -> Float[Array, "b d"]:
            features = timestep_features(number * NUM_TRAIN_TIMESTEPS, TIME_FEATURES)
            return Mlp(self.dim, name=name)(features)

        embedding = embed(sigma, "timestep_embedder")
        if guidance is not None:
            embedding = embedding + embed(guidance, "guidance_embedder")
        return embedding + Mlp(self.dim, name="text_embedder")(pooled)


def gelu(x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """Computes the tanh approximation of GELU."""
    return nn.gelu(x, approximate=True)


class Projection(nn.Module):
    """Linear layer `proj`, then an activation."""

    dim: int
    dtype: DTypeLike
    activation: Callable[[Array], Array]

    @nn.compact
    def __call__(self, x: Float[Array, "b n i"]) -> Float[Array, "b n d"]:
        """Projects x to `dim` channels."""
        return self.activation(product(linear(self.dim, self.dtype, "proj")(x)))


class FeedForward(nn.Module):
    """diffusers' FeedForward, by default with a hidden layer that is four times as wide, and x's width at the end."""

    dtype: DTypeLike
    hidden: int | None = None
    activation: Callable[[Array], Array] = gelu
    out: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n o"]:
        """Applies the network to each token."""
        dim = x.shape[-1]
        x = Projection(self.hidden or 4 * dim, self.dtype, self.activation, name="net_0")(x)
        return product(linear(self.out or dim, self.dtype, "net_2")(x))


def pack(latents: Float[Array, "b h w c"]) -> Float[Array, "b n p"]:
    """Packs 2 x 2 latents into a token, as FLUX's and Qwen-Image's pipelines do.

    Tokens are ordered row by row, channels are outermost within a token. Raises ValueError if a side is odd.
    """
    batch, height, width, channels = latents.shape
    if height % SIDE or width % SIDE:
        raise ValueError(
            f"latents of {height} x {width} do not fit: both sides must be multiples of {SIDE}."
        )
    x = latents.reshape(batch, height // SIDE, SIDE, width // SIDE, SIDE, channels)
    x = jnp.einsum("bhpwqc->bhwcpq", x)
    return x.reshape(batch, height // SIDE * (width // SIDE), channels * SIDE * SIDE)


def unpack(tokens: Float[Array, "b n p"], height: int, width: int) -> Float[Array, "b h w c"]:
    """Inverts `pack`, for latents of `height` x `width`."""
    x = tokens.reshape(len(tokens), height // SIDE, width // SIDE, -1, SIDE, SIDE)
    x = jnp.einsum("bhwcpq->bhpwqc", x)
    return x.reshape(len(tokens), height, width, -1)


def patches(latents: Float[Array, "b h w c"], side: int) -> Float[Array, "b n p"]:
    """Packs side x side latents into a token; tokens, and latents within a token, are row by row, channels last."""
    b, height, width, c = latents.shape
    h, w = height // side, width // side
    x = jnp.einsum("bhpwqc->bhwpqc", latents.reshape(b, h, side, w, side, c))
    return x.reshape(b, h * w, side * side * c)


def unpatched(
    tokens: Float[Array, "b n p"], side: int, height: int, width: int
) -> Float[Array, "b h w c"]:
    """Inverts `patches`, for latents of `height` x `width`, in float32."""
    x = tokens.reshape(len(tokens), height // side, width // side, side, side, -1)
    x = jnp.einsum("bhwpqc->bhpwqc", x.astype(jnp.float32))
    return x.reshape(len(tokens), height, width, -1)


def output(
    x: Float[Array, "b n d"],
    modulation: Sequence[Float[Array, "b 1 d"]],
    features: int,
    dtype: DTypeLike,
    use_bias: bool = True,
    epsilon: float = EPSILON,
) -> Float[Array, "b n o"]:
    """Applies the last layers: a norm modulated by (scale, shift), and `proj_out`, initialized to zero."""
    scale, shift = modulation
    x = modulate(layer_norm(x, epsilon), shift, scale, dtype)
    return linear(features, dtype, "proj_out", use_bias, kernel_init=nn.initializers.zeros)(x)
