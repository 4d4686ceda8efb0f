"""AutoencoderKL, the convolutional autoencoder of SD3 and FLUX, channels last.

Latent diffusion (Rombach et al., arXiv 2112.10752). Names follow diffusers' AutoencoderKL.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from digen_jax.attention.attend import attend
from digen_jax.files import fields_of, number
from digen_jax.models.family import Component

LISTS: tuple[str, ...] = (
    "down_blocks",
    "up_blocks",
    "resnets",
    "attentions",
    "downsamplers",
    "upsamplers",
    "to_out",
)

# Logical axes of kernels (see `logical_axes`). Attention has one head, which is not sharded.
AXES = ((".*", ("conv_in", "conv_out")),)
EPSILON = 1e-6
BOOKKEEPING = ("force_upcast", "latents_mean", "latents_std")


@dataclasses.dataclass(frozen=True)
class AutoencoderKLConfig:
    """Fields of diffusers' config.json, with its defaults."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = number(1, 1, 100)
    act_fn: str = "silu"
    latent_channels: int = 4
    norm_num_groups: int = 32
    sample_size: int = 32
    scaling_factor: float = number(0.18215, 1e-6, 1e6)
    shift_factor: float | None = None
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self):
        levels = len(self.block_out_channels)
        for field, kind in (
            ("down_block_types", "DownEncoderBlock2D"),
            ("up_block_types", "UpDecoderBlock2D"),
        ):
            if getattr(self, field) != (kind,) * levels:
                raise ValueError(
                    f"{field} must be {levels} times {kind!r}, one for each of block_out_channels,"
                    f" but is {getattr(self, field)}"
                )
        if self.act_fn not in ("silu", "swish"):
            raise ValueError(f"act_fn must be 'silu' but is {self.act_fn!r}")
        for channels in self.block_out_channels:
            if channels % self.norm_num_groups:
                raise ValueError(
                    f"block_out_channels {self.block_out_channels} must be multiples of"
                    f" norm_num_groups {self.norm_num_groups}"
                )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AutoencoderKLConfig":
        """Reads the configuration from a diffusers config.json.

        Raises:
          ValueError: a field is unknown or has an unsupported value.
        """
        for name in ("latents_mean", "latents_std"):
            if config.get(name) is not None:
                raise ValueError(f"{name} must be null: latents are scaled by scaling_factor only")
        config = {name: value for name, value in config.items() if name not in BOOKKEEPING}
        return cls(**fields_of(cls, config, "an AutoencoderKL"))


def scale_latents(
    config: AutoencoderKLConfig, latents: Float[Array, "*b h w c"]
) -> Float[Array, "*b h w c"]:
    """Converts raw latents to the diffusion model's latents, of about unit variance."""
    return (latents - (config.shift_factor or 0.0)) * config.scaling_factor


def unscale_latents(
    config: AutoencoderKLConfig, latents: Float[Array, "*b h w c"]
) -> Float[Array, "*b h w c"]:
    """Converts the diffusion model's latents to raw latents; the inverse of `scale_latents`."""
    return latents / config.scaling_factor + (config.shift_factor or 0.0)


class GroupNorm(nn.Module):
    """Group normalization (Wu and He, arXiv 1803.08494) with float32 statistics.

    Replaces flax's, which on CPUs costs as much as a convolution, because it reduces over split channels. This one
    averages the pixels first, then the few channels of a group. It takes two passes, because E[x²] - E[x]² loses
    precision.
    """

    config: Any  # `AutoencoderKLConfig`, or another config with norm_num_groups
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b *size c"]) -> Float[Array, "b *size c"]:
        """Normalizes each group of channels to mean 0 and variance 1, then applies scale and bias."""
        channels, groups = x.shape[-1], self.config.norm_num_groups
        inner = tuple(range(1, x.ndim - 1))
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))

        def group_mean(values):
            grouped = values.mean(inner).reshape(-1, groups, channels // groups).mean(-1)
            return jnp.expand_dims(jnp.repeat(grouped, channels // groups, axis=-1), inner)

        x = x.astype(jnp.float32)
        x = x - group_mean(x)
        factor = jax.lax.rsqrt(group_mean(jnp.square(x)) + EPSILON) * scale
        return (x * factor + bias).astype(self.dtype)


def _conv(channels: int, dtype: DTypeLike, name: str) -> nn.Conv:
    return nn.Conv(channels, (3, 3), padding=1, dtype=dtype, name=name)


class ResnetBlock2D(nn.Module):
    """Two group-normed convolutions and a residual connection."""

    config: AutoencoderKLConfig
    channels: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w d"]:
        """Maps activations to `channels` channels."""
        y = nn.silu(GroupNorm(self.config, self.dtype, name="norm1")(x))
        y = _conv(self.channels, self.dtype, "conv1")(y)
        y = nn.silu(GroupNorm(self.config, self.dtype, name="norm2")(y))
        y = _conv(self.channels, self.dtype, "conv2")(y)
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), dtype=self.dtype, name="conv_shortcut")(x)
        return x + y


class Attention(nn.Module):
    """Single-head self-attention over all pixels, with a residual connection."""

    config: AutoencoderKLConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Maps activations to activations of the same shape."""
        batch, height, width, channels = x.shape
        tokens = GroupNorm(self.config, self.dtype, name="group_norm")(x)
        tokens = tokens.reshape(batch, height * width, 1, channels)
        q, k, v = (
            nn.Dense(channels, dtype=self.dtype, name=name)(tokens)
            for name in ("to_q", "to_k", "to_v")
        )
        y = attend(q, k, v)
        return x + nn.Dense(channels, dtype=self.dtype, name="to_out_0")(y).reshape(x.shape)


class Downsample2D(nn.Module):
    """Halves height and width."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c"]:
        """Downsamples with padding of one at the right and bottom only, as in training of the checkpoints."""
        conv = nn.Conv(
            x.shape[-1], (3, 3), 2, padding=((0, 1), (0, 1)), dtype=self.dtype, name="conv"
        )
        return conv(x)


class Upsample2D(nn.Module):
    """Doubles height and width."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b 2*h 2*w c"]:
        """Upsamples by nearest neighbor, then applies a convolution."""
        b, h, w, c = x.shape
        x = jnp.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c)).reshape(b, 2 * h, 2 * w, c)
        return _conv(c, self.dtype, "conv")(x)


class DownEncoderBlock2D(nn.Module):
    """Residual blocks of one level, then an optional downsampling."""

    config: AutoencoderKLConfig
    channels: int
    downsample: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 d"]:
        """Maps activations to `channels` channels."""
        for i in range(self.config.layers_per_block):
            x = ResnetBlock2D(self.config, self.channels, self.dtype, name=f"resnets_{i}")(x)
        return Downsample2D(self.dtype, name="downsamplers_0")(x) if self.downsample else x


class UpDecoderBlock2D(nn.Module):
    """Residual blocks of one level, then an optional upsampling."""

    config: AutoencoderKLConfig
    channels: int
    upsample: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 d"]:
        """Maps activations to `channels` channels."""
        for i in range(self.config.layers_per_block + 1):
            x = ResnetBlock2D(self.config, self.channels, self.dtype, name=f"resnets_{i}")(x)
        return Upsample2D(self.dtype, name="upsamplers_0")(x) if self.upsample else x


class UNetMidBlock2D(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    config: AutoencoderKLConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Maps activations to activations of the same shape."""
        x = ResnetBlock2D(self.config, x.shape[-1], self.dtype, name="resnets_0")(x)
        if self.config.mid_block_add_attention:
            x = Attention(self.config, self.dtype, name="attentions_0")(x)
        return ResnetBlock2D(self.config, x.shape[-1], self.dtype, name="resnets_1")(x)


class Encoder(nn.Module):
    """Encoder from images to the moments of latents."""

    config: AutoencoderKLConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b H W c"]) -> Float[Array, "b h w d"]:
        """Maps images in [-1, 1] to means and log variances, concatenated along the channels."""
        channels = self.config.block_out_channels
        x = _conv(channels[0], self.dtype, "conv_in")(x)
        for i, width in enumerate(channels):
            x = DownEncoderBlock2D(
                self.config, width, i < len(channels) - 1, self.dtype, name=f"down_blocks_{i}"
            )(x)
        x = UNetMidBlock2D(self.config, self.dtype, name="mid_block")(x)
        x = nn.silu(GroupNorm(self.config, self.dtype, name="conv_norm_out")(x))
        return _conv(2 * self.config.latent_channels, self.dtype, "conv_out")(x)


class Decoder(nn.Module):
    """Decoder from raw latents to images."""

    config: AutoencoderKLConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b H W d"]:
        """Maps raw latents to images in [-1, 1], not clipped."""
        channels = self.config.block_out_channels[::-1]
        x = _conv(channels[0], self.dtype, "conv_in")(x)
        x = UNetMidBlock2D(self.config, self.dtype, name="mid_block")(x)
        for i, width in enumerate(channels):
            x = UpDecoderBlock2D(
                self.config, width, i < len(channels) - 1, self.dtype, name=f"up_blocks_{i}"
            )(x)
        x = nn.silu(GroupNorm(self.config, self.dtype, name="conv_norm_out")(x))
        return _conv(self.config.out_channels, self.dtype, "conv_out")(x)


class AutoencoderKL(nn.Module):
    """Autoencoder of images; computes in `dtype`, returns float32."""

    config: AutoencoderKLConfig
    dtype: DTypeLike = jnp.float32

    def setup(self):
        """Creates encoder and decoder, and the 1x1 convolutions next to the latents in older models."""
        channels = self.config.latent_channels
        self.encoder = Encoder(self.config, self.dtype)
        self.decoder = Decoder(self.config, self.dtype)
        if self.config.use_quant_conv:
            self.quant_conv = nn.Conv(2 * channels, (1, 1), dtype=self.dtype)
        if self.config.use_post_quant_conv:
            self.post_quant_conv = nn.Conv(channels, (1, 1), dtype=self.dtype)

    def encode(
        self, images: Float[Array, "b H W rgb"]
    ) -> tuple[Float[Array, "b h w c"], Float[Array, "b h w c"]]:
        """Encodes images in [-1, 1] to mean and log variance (clipped to [-30, 20]) of raw latents."""
        moments = self.encoder(images)
        if self.config.use_quant_conv:
            moments = self.quant_conv(moments)
        mean, logvar = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return mean, jnp.clip(logvar, -30.0, 20.0)

    def decode(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b H W rgb"]:
        """Decodes raw latents to images in [-1, 1], not clipped."""
        if self.config.use_post_quant_conv:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents).astype(jnp.float32)

    def reconstruct(self, images: Float[Array, "b H W rgb"]) -> Float[Array, "b H W rgb"]:
        """Reconstructs images in [-1, 1] from the means of their latents; for `init`, because it runs all modules."""
        return self.decode(self.encode(images)[0])


def decode_images(
    vae: AutoencoderKL, params: Any, latents: Float[Array, "b h w c"]
) -> Float[Array, "b H W 3"]:
    """Decodes the transformer's latents to images in [0, 1]."""
    raw = unscale_latents(vae.config, latents)
    images: Any = vae.apply({"params": params}, raw, method="decode")
    return jnp.clip(images / 2 + 0.5, 0, 1)


def encode_images(
    vae: AutoencoderKL, params: Any, images: Float[Array, "b H W 3"]
) -> Float[Array, "b h w c"]:
    """Encodes images in [0, 1] to the transformer's latents: the means, without noise."""
    mean, _ = vae.apply({"params": params}, images * 2 - 1, method="encode")
    return scale_latents(vae.config, mean)


def inputs(config: Any) -> tuple[Float[Array, "1 H W 3"]]:
    """Returns a small image for `init`."""
    side = 2 ** len(config.block_out_channels)
    return (jnp.zeros((1, side, side, 3)),)


COMPONENT = Component(
    library="diffusers",
    classes=("AutoencoderKL",),
    network=AutoencoderKL,
    read_config=AutoencoderKLConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    method="reconstruct",
)
