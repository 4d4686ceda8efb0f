"""Decoder of HunyuanVideo's autoencoder (arXiv 2412.03603): latents to clips, channels last.

Convolutions are causal over frames, but group norms average over all frames that are decoded together. So the result
depends on the chunks: they are diffusers' tiles of five frames of latents, whose ends are blended. Names follow
diffusers' AutoencoderKLHunyuanVideo. The encoder is not read: text-to-video models do not use it.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from digen_jax.attention.attend import attend
from digen_jax.files import fields_of, number
from digen_jax.models.autoencoders.autoencoder_kl import GroupNorm
from digen_jax.models.autoencoders.autoencoder_wan_layers import Clip, conv_of_clip
from digen_jax.models.family import Component

LISTS: tuple[str, ...] = ("up_blocks", "resnets", "attentions", "upsamplers", "to_out")
# Logical axes of kernels (see `logical_axes`). Attention has one head, which is not sharded.
AXES = ((".*", ("conv_in", "conv_out")),)
FRAMES_FACTOR = 4  # frames of a clip for one of latents, after the first
# Frames of latents of a tile, and from one tile to the next. A tile's first frame is that of a clip, so it is dropped,
# and the next BLEND frames are blended with the last ones of the tile before.
TILE, STRIDE = 5, 3
BLEND = (TILE - 1 - STRIDE) * FRAMES_FACTOR


@dataclasses.dataclass(frozen=True)
class AutoencoderKLHunyuanVideoConfig:
    """Fields of diffusers' config.json that the decoder has, with diffusers' defaults."""

    unread: ClassVar = ("in_channels", "down_block_types")  # fields of the encoder

    out_channels: int = 3
    latent_channels: int = 16
    up_block_types: tuple[str, ...] = ("HunyuanVideoUpBlock3D",) * 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = number(2, 1, 100)
    act_fn: Literal["silu", "swish"] = "silu"
    norm_num_groups: int = 32
    scaling_factor: float = number(0.476986, 1e-6, 1e6)
    spatial_compression_ratio: int = 8
    temporal_compression_ratio: Literal[4] = 4
    mid_block_add_attention: Literal[True] = True

    def __post_init__(self):
        levels = len(self.block_out_channels)
        if self.up_block_types != ("HunyuanVideoUpBlock3D",) * levels:
            raise ValueError(
                f"up_block_types must be {levels} times 'HunyuanVideoUpBlock3D', one for each of block_out_channels,"
                f" but is {self.up_block_types}"
            )
        if levels < 3 or self.spatial_compression_ratio != 2 ** (levels - 1):
            raise ValueError(
                f"spatial_compression_ratio must double with each of the {levels} block_out_channels after the first,"
                f" at least twice, but is {self.spatial_compression_ratio}"
            )
        for channels in self.block_out_channels:
            if channels % self.norm_num_groups:
                raise ValueError(
                    f"block_out_channels {self.block_out_channels} must be multiples of norm_num_groups"
                    f" {self.norm_num_groups}"
                )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AutoencoderKLHunyuanVideoConfig":
        """Reads the configuration from a diffusers config.json.

        Raises:
          ValueError: a field is unknown or has an unsupported value.
        """
        config = {name: value for name, value in config.items() if name not in cls.unread}
        return cls(**fields_of(cls, config, "an AutoencoderKLHunyuanVideo"))


def _causal_conv(x: Clip, kernel: Float[Array, "k p q c d"], *_: Any, **__: Any) -> Array:
    """Computes the convolution of an `nn.Conv`, whose window ends at the output frame, after copies of the edges."""
    frames, height, width = (size - 1 for size in kernel.shape[:3])
    sides = (height // 2, height // 2), (width // 2, width // 2)
    return conv_of_clip(jnp.pad(x, ((0, 0), (frames, 0), *sides, (0, 0)), mode="edge"), kernel)


class CausalConv3d(nn.Module):
    """Causal convolution that keeps the size of a clip, with a cubic window."""

    channels: int
    window: int = 3

    @nn.compact
    def __call__(self, x: Clip) -> Float[Array, "b t h w d"]:
        """Maps activations to `channels` channels."""
        window = (self.window,) * 3
        conv = nn.Conv(self.channels, window, conv_general_dilated=_causal_conv, name="conv")
        return conv(x)


class ResnetBlock(nn.Module):
    """Two group-normed convolutions and a residual connection."""

    config: AutoencoderKLHunyuanVideoConfig
    channels: int

    @nn.compact
    def __call__(self, x: Clip) -> Float[Array, "b t h w d"]:
        """Maps activations to `channels` channels."""
        y = nn.silu(GroupNorm(self.config, jnp.float32, name="norm1")(x))
        y = CausalConv3d(self.channels, name="conv1")(y)
        y = nn.silu(GroupNorm(self.config, jnp.float32, name="norm2")(y))
        y = CausalConv3d(self.channels, name="conv2")(y)
        if x.shape[-1] != self.channels:
            x = CausalConv3d(self.channels, 1, name="conv_shortcut")(x)
        return x + y


class Attention(nn.Module):
    """Single-head attention of each pixel to those of its frame and of earlier ones, with a residual connection."""

    config: AutoencoderKLHunyuanVideoConfig

    @nn.compact
    def __call__(self, x: Clip) -> Clip:
        """Maps activations to activations of the same shape."""
        b, t, h, w, c = x.shape
        tokens = GroupNorm(self.config, jnp.float32, name="group_norm")(x)
        tokens = tokens.reshape(b, t * h * w, 1, c)
        q, k, v = (nn.Dense(c, name=name)(tokens) for name in ("to_q", "to_k", "to_v"))
        ends = [h * w * (frame + 1) for frame in range(t)]
        y = [attend(q[:, end - h * w : end], k[:, :end], v[:, :end]) for end in ends]
        return x + nn.Dense(c, name="to_out_0")(jnp.concatenate(y, axis=1)).reshape(x.shape)


class MidBlock(nn.Module):
    """Residual block, attention, residual block at the lowest resolution."""

    config: AutoencoderKLHunyuanVideoConfig

    @nn.compact
    def __call__(self, x: Clip) -> Clip:
        """Maps activations to activations of the same shape."""
        x = ResnetBlock(self.config, x.shape[-1], name="resnets_0")(x)
        x = Attention(self.config, name="attentions_0")(x)
        return ResnetBlock(self.config, x.shape[-1], name="resnets_1")(x)


class Upsample(nn.Module):
    """Doubles height and width, and with `frames` maps clips of 1 + n frames to 1 + 2 n; then a convolution."""

    frames: bool

    @nn.compact
    def __call__(self, x: Clip) -> Float[Array, "b t2 2*h 2*w c"]:
        """Upsamples by nearest neighbor."""
        if self.frames:
            x = jnp.concatenate([x[:, :1], jnp.repeat(x[:, 1:], 2, axis=1)], axis=1)
        b, t, h, w, c = x.shape
        x = jnp.broadcast_to(x[:, :, :, None, :, None], (b, t, h, 2, w, 2, c))
        return CausalConv3d(c, name="conv")(x.reshape(b, t, 2 * h, 2 * w, c))


class UpBlock(nn.Module):
    """Residual blocks of one level, then an upsampling except at the last level.

    Attributes:
      config: Config of the autoencoder.
      channels: Channels of the blocks.
      frames: Whether frames are upsampled, too. None means no upsampling.
    """

    config: AutoencoderKLHunyuanVideoConfig
    channels: int
    frames: bool | None

    @nn.compact
    def __call__(self, x: Clip) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps activations to `channels` channels."""
        for i in range(self.config.layers_per_block + 1):
            x = ResnetBlock(self.config, self.channels, name=f"resnets_{i}")(x)
        return x if self.frames is None else Upsample(self.frames, name="upsamplers_0")(x)


class Decoder(nn.Module):
    """Decoder of one tile; the last two of its upsamplings are also over frames."""

    config: AutoencoderKLHunyuanVideoConfig

    @nn.compact
    def __call__(self, x: Clip) -> Float[Array, "b t2 h2 w2 d"]:
        """Maps the output of `post_quant_conv` to frames in [-1, 1], not clipped."""
        widths = self.config.block_out_channels[::-1]
        x = CausalConv3d(widths[0], name="conv_in")(x)
        x = MidBlock(self.config, name="mid_block")(x)
        last = len(widths) - 1
        for level, width in enumerate(widths):
            frames = None if level == last else level >= last - 2
            x = UpBlock(self.config, width, frames, name=f"up_blocks_{level}")(x)
        x = nn.silu(GroupNorm(self.config, jnp.float32, name="conv_norm_out")(x))
        return CausalConv3d(self.config.out_channels, name="conv_out")(x)


class AutoencoderKLHunyuanVideo(nn.Module):
    """Decoder of clips and the convolution before it, in float32."""

    config: AutoencoderKLHunyuanVideoConfig

    def setup(self):
        """Creates the decoder and the 1x1 convolution next to the latents."""
        self.post_quant_conv = nn.Conv(self.config.latent_channels, (1, 1, 1))
        self.decoder = Decoder(self.config)

    def __call__(self, latents: Float[Array, "b t h w c"]) -> Float[Array, "b T H W rgb"]:
        """Decodes raw latents to clips of 1 + 4 (t - 1) frames in [-1, 1], not clipped.

        Tiles are decoded one after another, so that memory for activations does not depend on the number of frames.
        Height and width are not tiled, as in diffusers without `enable_tiling`.
        """
        if latents.shape[1] < TILE:
            return self._tile(latents)
        # All tiles have TILE frames but the last one, which has 2 to 4. diffusers has another one of a single frame
        # after one of 4: nothing is left of it.
        count = (latents.shape[1] - TILE) // STRIDE + 1
        starts = range(0, count * STRIDE, STRIDE)
        tiles = jnp.stack([latents[:, start : start + TILE] for start in starts])
        ramp = np.arange(BLEND, dtype=np.float32) / BLEND
        # The first tile is blended with no other.
        weights = np.stack([np.ones_like(ramp)] + [ramp] * (count - 1))

        def step(model: "AutoencoderKLHunyuanVideo", end: Array, given: Any) -> tuple[Array, Array]:
            clip = model._tile(given[0])
            blended = _blend(end, clip[:, 1 : 1 + BLEND], given[1])
            kept = 1 + STRIDE * FRAMES_FACTOR
            frames = jnp.concatenate([clip[:, :1], blended, clip[:, 1 + BLEND : kept]], axis=1)
            return clip[:, kept:], frames

        b, _, h, w, _ = latents.shape
        side = self.config.spatial_compression_ratio
        end = jnp.zeros((b, BLEND, side * h, side * w, self.config.out_channels))
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        end, clips = scan(self, end, (tiles, weights))
        last = self._tile(latents[:, count * STRIDE :])
        blended = _blend(end, last[:, 1 : 1 + BLEND], ramp)
        frames = clips[:, :, 1:].swapaxes(0, 1).reshape(b, -1, *clips.shape[3:])
        return jnp.concatenate([clips[0, :, :1], frames, blended, last[:, 1 + BLEND :]], axis=1)

    def _tile(self, latents: Float[Array, "b t h w c"]) -> Float[Array, "b T H W rgb"]:
        return self.decoder(self.post_quant_conv(latents))


def _blend(before: Clip, after: Clip, weights: Float[Array, "t"] | Float[np.ndarray, "t"]) -> Clip:
    """Mixes frames of two tiles; `weights` are those of the later tile."""
    weights = weights[:, None, None, None]
    return before * (1 - weights) + after * weights


def decode_clips(
    vae: AutoencoderKLHunyuanVideo, params: Any, latents: Float[Array, "b t h w c"]
) -> Float[Array, "b T H W 3"]:
    """Decodes the transformer's latents to clips in [0, 1]."""
    clips: Any = vae.apply({"params": params}, latents / vae.config.scaling_factor)
    return jnp.clip(clips / 2 + 0.5, 0, 1)


def inputs(config: AutoencoderKLHunyuanVideoConfig) -> tuple[Float[Array, "1 1 1 1 c"]]:
    """Returns latents of one pixel of one frame, for `init`."""
    return (jnp.zeros((1, 1, 1, 1, config.latent_channels)),)


COMPONENT = Component(
    library="diffusers",
    classes=("AutoencoderKLHunyuanVideo",),
    network=AutoencoderKLHunyuanVideo,
    read_config=AutoencoderKLHunyuanVideoConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    ignored=lambda network: ("encoder.*", "quant_conv.*"),
)
