"""Decoder of HunyuanVideo 1.5's autoencoder (github.com/Tencent-Hunyuan/HunyuanVideo-1.5): latents to clips.

Convolutions are causal over frames, and norms are those of a pixel, so that a clip can be decoded in chunks of frames.
Only attention, at the latents' resolution, is over all earlier frames. Channels are last, and names follow diffusers'
AutoencoderKLHunyuanVideo15. The encoder is not read: text-to-video models do not use it.
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.attention.attend import attend
from digen_jax.files import fields_of, number
from digen_jax.models.autoencoders.autoencoder_wan import in_chunks
from digen_jax.models.autoencoders.autoencoder_wan_layers import (
    Clip,
    FrameChunk,
    RMSNorm,
    conv_of_clip,
)
from digen_jax.models.family import Component

LISTS: tuple[str, ...] = ("up_blocks", "resnets", "attentions", "upsamplers")
# Logical axes of kernels (see `logical_axes`). Attention has one head, which is not sharded.
AXES = ((r"norm", (None,)), (".*", ("conv_in", "conv_out")))


@dataclasses.dataclass(frozen=True)
class AutoencoderKLHunyuanVideo15Config:
    """Fields of diffusers' config.json that the decoder has, with diffusers' defaults."""

    unread: ClassVar = ("in_channels", "downsample_match_channel")  # fields of the encoder

    out_channels: int = 3
    latent_channels: int = 32
    block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)
    layers_per_block: int = number(2, 1, 100)
    spatial_compression_ratio: int = 16
    temporal_compression_ratio: Literal[4] = 4
    upsample_match_channel: Literal[True] = True
    scaling_factor: float = number(1.03682, 1e-6, 1e6)

    def __post_init__(self):
        levels = len(self.block_out_channels)
        if levels < 3 or self.spatial_compression_ratio != 2 ** (levels - 1):
            raise ValueError(
                f"spatial_compression_ratio must double with each of the {levels} block_out_channels after the first,"
                f" at least twice, but is {self.spatial_compression_ratio}"
            )
        widths = self.widths
        for level, (width, above) in enumerate(itertools.pairwise(widths)):
            if width % self.factor(level) or 4 * above % width:
                raise ValueError(
                    f"block_out_channels {self.block_out_channels} cannot be upsampled by copies: {width} must be a"
                    f" multiple of {self.factor(level)}, and 4 times {above} one of {width}"
                )
        if widths[0] % self.latent_channels:
            raise ValueError(
                f"latent_channels must divide the last of block_out_channels, {widths[0]}, but is"
                f" {self.latent_channels}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AutoencoderKLHunyuanVideo15Config":
        """Reads the configuration from a diffusers config.json.

        Raises:
          ValueError: a field is unknown or has an unsupported value.
        """
        config = {name: value for name, value in config.items() if name not in cls.unread}
        return cls(**fields_of(cls, config, "an AutoencoderKLHunyuanVideo15"))

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the decoder's levels, lowest resolution first."""
        return self.block_out_channels[::-1]

    def factor(self, level: int) -> int:
        """Returns the pixels of a clip for one of the level; the first two levels also double frames."""
        return 8 if level < 2 else 4


def _conv_of_edges(x: Clip, kernel: Float[Array, "k p q c d"], *_: Any, **__: Any) -> Array:
    """Computes the convolution of an `nn.Conv` with copies of the edges around height and width, none over frames."""
    sides = [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)]
    return conv_of_clip(jnp.pad(x, sides, mode="edge"), kernel)


class CausalConv3d(nn.Module):
    """Convolution of 3 x 3 x 3 whose window ends at the output frame; copies of the first frame precede a clip."""

    channels: int

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t h w d"]:
        """Maps activations to `channels` channels."""
        x = chunk.behind_past(x, 2, jnp.repeat(x[:, :1], 2, axis=1))
        conv = nn.Conv(self.channels, (3,) * 3, conv_general_dilated=_conv_of_edges, name="conv")
        return conv(x)


class ResnetBlock(nn.Module):
    """Two normed convolutions and a residual connection."""

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Clip:
        """Maps activations to activations of the same shape."""
        channels = x.shape[-1]
        y = CausalConv3d(channels, name="conv1")(nn.silu(RMSNorm(name="norm1")(x)), chunk)
        y = CausalConv3d(channels, name="conv2")(nn.silu(RMSNorm(name="norm2")(y)), chunk)
        return x + y


class Attention(nn.Module):
    """Single-head attention of each pixel to those of its frame and of earlier ones, with a residual connection."""

    @nn.compact
    def __call__(self, x: Clip) -> Clip:
        """Maps activations to activations of the same shape."""
        b, t, h, w, c = x.shape
        normed = RMSNorm(name="norm")(x)
        q, k, v = (nn.Conv(c, (1,) * 3, name=name)(normed) for name in ("to_q", "to_k", "to_v"))
        k, v = (y.reshape(b, -1, 1, c) for y in (k, v))

        def of_frame(given: tuple[Array, Array]) -> Float[Array, "b n 1 c"]:
            frame, q = given
            return attend(q, k, v, jnp.full(b, (frame + 1) * h * w))

        frames = q.reshape(b, t, h * w, 1, c).swapaxes(0, 1)
        y = jax.lax.map(of_frame, (jnp.arange(t), frames)).swapaxes(0, 1)
        return x + nn.Conv(c, (1,) * 3, name="proj_out")(y.reshape(x.shape))


class MidBlock(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Clip:
        """Maps activations to activations of the same shape."""
        x = ResnetBlock(name="resnets_0")(x, chunk)
        x = Attention(name="attentions_0")(x)
        return ResnetBlock(name="resnets_1")(x, chunk)


class Upsample(nn.Module):
    """Doubles height and width, and with `frames` maps clips of 1 + n frames to 1 + 2 n.

    Channels of a convolution become pixels, and copies of the input's channels are added.
    """

    channels: int
    frames: bool

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 2*h 2*w d"]:
        """Maps activations to `channels` channels."""
        factor = 8 if self.frames else 4
        copies = factor * self.channels // x.shape[-1]
        y = CausalConv3d(factor * self.channels, name="conv")(x, chunk)
        if not self.frames:
            return _to_pixels(y, 1) + jnp.repeat(_to_pixels(x, 1), copies, axis=-1)
        first = 1 if chunk.begins else 0
        later = _to_pixels(y[:, first:], 2)
        later += jnp.repeat(_to_pixels(x[:, first:], 2), copies, axis=-1)
        if not first:
            return later
        # The first frame of a clip stays one frame, of the first half of the channels.
        begin = _to_pixels(y[:, :1], 1)[..., : self.channels]
        begin += jnp.repeat(_to_pixels(x[:, :1], 1), copies // 2, axis=-1)
        return jnp.concatenate([begin, later], axis=1)


def _to_pixels(x: Float[Array, "b t h w d"], frames: int) -> Float[Array, "b t2 2*h 2*w c"]:
    """Splits channels into `frames` frames of 2 x 2 pixels."""
    b, t, h, w, d = x.shape
    channels = d // (4 * frames)
    x = x.reshape(b, t, h, w, frames, 2, 2, channels)
    x = jnp.einsum("bthwfpqc->btfhpwqc", x)
    return x.reshape(b, frames * t, 2 * h, 2 * w, channels)


class UpBlock(nn.Module):
    """Residual blocks of one level, then an upsampling to `channels` channels, except at the last level."""

    blocks: int
    channels: int | None
    frames: bool

    @nn.compact
    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps activations to the next level."""
        for i in range(self.blocks):
            x = ResnetBlock(name=f"resnets_{i}")(x, chunk)
        if self.channels is None:
            return x
        return Upsample(self.channels, self.frames, name="upsamplers_0")(x, chunk)


class Decoder(nn.Module):
    """`lower` computes at the latents' resolution, `__call__` from there to pixels."""

    config: AutoencoderKLHunyuanVideo15Config

    def setup(self):
        """Creates the layers."""
        config, widths = self.config, self.config.widths
        self.conv_in = CausalConv3d(widths[0])
        self.mid_block = MidBlock()
        self.up_blocks = [
            UpBlock(config.layers_per_block + 1, channels, level < 2)
            for level, channels in enumerate((*widths[1:], None))
        ]
        self.norm_out = RMSNorm()
        self.conv_out = CausalConv3d(config.out_channels)

    def lower(self, latents: Float[Array, "b t h w c"]) -> Float[Array, "b t h w d"]:
        """Maps the raw latents of a clip to activations."""
        copies = self.config.widths[0] // self.config.latent_channels
        x = self.conv_in(latents, FrameChunk()) + jnp.repeat(latents, copies, axis=-1)
        return self.mid_block(x, FrameChunk())

    def __call__(self, x: Clip, chunk: FrameChunk) -> Float[Array, "b t2 h2 w2 rgb"]:
        """Maps a chunk of these activations to frames in [-1, 1], not clipped."""
        for block in self.up_blocks:
            x = block(x, chunk)
        return self.conv_out(nn.silu(self.norm_out(x)), chunk)


class AutoencoderKLHunyuanVideo15(nn.Module):
    """Decoder of clips, in float32."""

    config: AutoencoderKLHunyuanVideo15Config

    def setup(self):
        """Creates the decoder."""
        self.decoder = Decoder(self.config)

    def __call__(self, latents: Float[Array, "b t h w c"]) -> Float[Array, "b T H W rgb"]:
        """Decodes raw latents, a frame at a time, to clips of 1 + 4 (t - 1) frames in [-1, 1], not clipped."""
        return in_chunks(self.decoder, self.decoder.lower(latents), 1, 1)


def decode_clips(
    vae: AutoencoderKLHunyuanVideo15, params: Any, latents: Float[Array, "b t h w c"]
) -> Float[Array, "b T H W 3"]:
    """Decodes the transformer's latents to clips in [0, 1]."""
    clips: Any = vae.apply({"params": params}, latents / vae.config.scaling_factor)
    return jnp.clip(clips / 2 + 0.5, 0, 1)


def inputs(config: AutoencoderKLHunyuanVideo15Config) -> tuple[Float[Array, "1 1 1 1 c"]]:
    """Returns latents of one pixel of one frame, for `init`."""
    return (jnp.zeros((1, 1, 1, 1, config.latent_channels)),)


COMPONENT = Component(
    library="diffusers",
    classes=("AutoencoderKLHunyuanVideo15",),
    network=AutoencoderKLHunyuanVideo15,
    read_config=AutoencoderKLHunyuanVideo15Config.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    ignored=lambda network: ("encoder.*",),
)
