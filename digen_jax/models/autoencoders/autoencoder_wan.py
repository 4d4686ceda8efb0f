"""Autoencoders of Wan (arXiv 2503.20314) and Qwen-Image (arXiv 2508.02324): clips to latents and back.

Channels are last; an image is a clip of one frame. Qwen-Image's autoencoder is Wan 2.1's with another decoder:
diffusers' AutoencoderKLWan and AutoencoderKLQwenImage are the same network with the same tensor names. Wan 2.2's 5B
model has one with `is_residual` and `patch_size`.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.files import fields_of, number
from digen_jax.models.autoencoders.autoencoder_wan_layers import (
    CausalConv3d,
    Decoder3d,
    Encoder3d,
    FrameChunk,
)
from digen_jax.models.family import Component

LISTS: tuple[str, ...] = (
    "down_blocks",
    "up_blocks",
    "resnets",
    "attentions",
    "upsamplers",
    "resample",
)

# Logical axes of kernels (see `logical_axes`); scales of norms have none.
AXES = ((r"norm", (None,)), (".*", ("conv_in", "conv_out")))

# Latent statistics of Wan 2.1 and Qwen-Image.
MEAN: tuple[float, ...] = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
STD: tuple[float, ...] = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)

# Fields of diffusers' config.json that support a single value, and the reason.
FIXED = {
    "attn_scales": ((), "attention is in the middle blocks only"),
}
# Fields used only for training of the autoencoder, and one that diffusers does not read: it always clips.
BOOKKEEPING = ("dropout", "clip_output")


@dataclasses.dataclass(frozen=True)
class AutoencoderKLWanConfig:
    """Fields of diffusers' config.json of both classes, with its defaults."""

    base_dim: int = 96
    decoder_base_dim: int | None = None  # None means base_dim
    z_dim: int = 16
    dim_mult: tuple[int, ...] = number((1, 2, 4, 4), 1, 1000)
    num_res_blocks: int = number(2, 1, 100)
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    in_channels: int = 3
    out_channels: int = 3
    is_residual: bool = False  # Wan 2.2: averages and copies next to the levels
    patch_size: int | None = number(
        None, 1, 100
    )  # Wan 2.2: side of the squares of pixels that are a position's channels
    latents_mean: tuple[float, ...] = number(MEAN, -1e6, 1e6)
    latents_std: tuple[float, ...] = number(STD, 1e-6, 1e6)
    # Used by diffusers' pipelines to compute sizes. None means derived from the network.
    scale_factor_temporal: int | None = None
    scale_factor_spatial: int | None = None

    def __post_init__(self):
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temperal_downsample must have {len(self.dim_mult) - 1} entries, one fewer than dim_mult, but is"
                f" {self.temperal_downsample}"
            )
        for field in ("latents_mean", "latents_std"):
            if len(getattr(self, field)) != self.z_dim:
                raise ValueError(
                    f"{field} must have {self.z_dim} numbers, as many as z_dim, but has"
                    f" {len(getattr(self, field))}"
                )
        squares = (self.patch_size or 1) ** 2
        for field in ("in_channels", "out_channels"):
            if getattr(self, field) % squares:
                raise ValueError(
                    f"{field} must be a multiple of patch_size squared, {squares}, but is {getattr(self, field)}"
                )
        for field, factor in (
            ("scale_factor_temporal", self.frames_factor),
            ("scale_factor_spatial", self.side_factor),
        ):
            if getattr(self, field) not in (None, factor):
                raise ValueError(
                    f"{field} must be {factor}, as dim_mult and temperal_downsample have it, but is"
                    f" {getattr(self, field)}"
                )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AutoencoderKLWanConfig":
        """Reads the configuration from a diffusers config.json of either class.

        Raises:
          ValueError: a field is unknown or has an unsupported value.
        """
        config = {name: value for name, value in config.items() if name not in BOOKKEEPING}
        for name, (only, reason) in FIXED.items():
            value = config.pop(name, only)
            if (tuple(value) if isinstance(value, list) else value) != only:
                raise ValueError(f"{name} must be {list(only)} but is {value!r}: {reason}")
        if "input_channels" in config:  # AutoencoderKLQwenImage has one field for both
            config["in_channels"] = config["out_channels"] = config.pop("input_channels")
        kind = config.get("_class_name", "AutoencoderKLWan")
        return cls(**fields_of(cls, config, f"an {kind}"))

    @property
    def side_factor(self) -> int:
        """Pixels per latent along height and width."""
        return 2 ** len(self.temperal_downsample) * (self.patch_size or 1)

    @property
    def frames_factor(self) -> int:
        """Frames per frame of latents after the first, which is one frame."""
        return 2 ** sum(self.temperal_downsample)


def scale_latents(
    config: AutoencoderKLWanConfig, latents: Float[Array, "*b h w c"]
) -> Float[Array, "*b h w c"]:
    """Converts raw latents to the diffusion model's latents, of about unit variance."""
    return (latents - jnp.asarray(config.latents_mean)) / jnp.asarray(config.latents_std)


def unscale_latents(
    config: AutoencoderKLWanConfig, latents: Float[Array, "*b h w c"]
) -> Float[Array, "*b h w c"]:
    """Converts the diffusion model's latents to raw latents; the inverse of `scale_latents`."""
    return latents * jnp.asarray(config.latents_std) + jnp.asarray(config.latents_mean)


def encode_clips(
    vae: "AutoencoderKLWan", params: Any, clips: Float[Array, "b T H W 3"]
) -> Float[Array, "b t h w c"]:
    """Encodes clips in [0, 1] to the transformer's latents: the means, without noise."""
    mean, _ = vae.apply({"params": params}, clips * 2 - 1, method="encode")
    return scale_latents(vae.config, mean)


def decode_images(
    vae: "AutoencoderKLWan", params: Any, latents: Float[Array, "b h w c"]
) -> Float[Array, "b 1 H W 3"]:
    """Decodes the transformer's latents to clips of one frame in [0, 1]."""
    return decode_clips(vae, params, latents[:, None])


def decode_clips(
    vae: "AutoencoderKLWan", params: Any, latents: Float[Array, "b t h w c"]
) -> Float[Array, "b T H W 3"]:
    """Decodes the transformer's latents to clips in [0, 1], one frame of latents at a time."""
    raw = unscale_latents(vae.config, latents)
    clips: Any = vae.apply({"params": params}, raw, method="decode")
    return clips / 2 + 0.5


class AutoencoderKLWan(nn.Module):
    """Autoencoder of clips, in float32."""

    config: AutoencoderKLWanConfig

    def setup(self):
        """Creates encoder, decoder and the 1x1 convolutions next to the latents."""
        config = self.config
        channels = 2 * config.z_dim
        widths = [config.base_dim * factor for factor in config.dim_mult]
        self.encoder = Encoder3d(
            tuple(widths),
            config.num_res_blocks,
            config.temperal_downsample,
            channels,
            config.is_residual,
        )
        base = config.decoder_base_dim or config.base_dim
        self.decoder = Decoder3d(
            tuple(base * factor for factor in config.dim_mult[::-1]),
            config.num_res_blocks + 1,
            config.temperal_downsample[::-1],
            config.out_channels,
            config.is_residual,
        )
        self.quant_conv = CausalConv3d(channels, (1, 1, 1))
        self.post_quant_conv = CausalConv3d(config.z_dim, (1, 1, 1))

    def encode(
        self, clips: Float[Array, "b T H W rgb"], at_once: int = 1
    ) -> tuple[Float[Array, "b t h w c"], Float[Array, "b t h w c"]]:
        """Encodes clips in [-1, 1] to mean and log variance (clipped to [-30, 20]) of raw latents.

        Args:
          clips: Clips of 1 + n * `frames_factor` frames; sides are multiples of `side_factor`.
          at_once: Frames of latents computed together. Affects memory, not results.

        Raises:
          ValueError: the number of frames is not 1 + n * `frames_factor`.
        """
        factor = self.config.frames_factor
        frames = clips.shape[1]
        if frames % factor != 1 % factor:
            raise ValueError(
                f"a clip must have 1 frame more than a multiple of {factor}, not {frames}: leave out the last"
                f" {(frames - 1) % factor}"
            )
        if patch := self.config.patch_size:
            b, t, h, w, c = clips.shape
            clips = clips.reshape(b, t, h // patch, patch, w // patch, patch, c)
            clips = jnp.einsum("bthpwqc->bthwcqp", clips)
            clips = clips.reshape(b, t, h // patch, w // patch, c * patch**2)
        first = _first(1 + (frames - 1) // factor, at_once)
        moments = in_chunks(self.encoder, clips, 1 + (first - 1) * factor, at_once * factor)
        mean, logvar = jnp.split(self.quant_conv(moments, FrameChunk()), 2, axis=-1)
        return mean, jnp.clip(logvar, -30.0, 20.0)

    def decode(
        self, latents: Float[Array, "b t h w c"], at_once: int = 1
    ) -> Float[Array, "b T H W rgb"]:
        """Decodes raw latents to clips of 1 + (t - 1) * `frames_factor` frames, clipped to [-1, 1] as in diffusers.

        Args:
          latents: Raw latents; one frame for an image.
          at_once: Frames of latents decoded together. Affects memory, not results.
        """
        x = self.post_quant_conv(latents, FrameChunk())
        clips = in_chunks(self.decoder, x, _first(x.shape[1], at_once), at_once)
        if patch := self.config.patch_size:
            b, t, h, w, c = clips.shape
            clips = clips.reshape(b, t, h, w, c // patch**2, patch, patch)
            clips = jnp.einsum("bthwcqp->bthpwqc", clips)
            clips = clips.reshape(b, t, h * patch, w * patch, c // patch**2)
        return jnp.clip(clips, -1.0, 1.0)

    def reconstruct(self, clips: Float[Array, "b T H W rgb"]) -> Float[Array, "b T H W rgb"]:
        """Reconstructs clips in [-1, 1] from the means of their latents; for `init`, because it runs all modules."""
        return self.decode(self.encode(clips)[0])


def _first(frames: int, at_once: int) -> int:
    """Returns the size of the first chunk, such that all later chunks have `at_once` frames."""
    return 1 + (frames - 1) % at_once


def in_chunks(network: nn.Module, x: Array, first: int, size: int) -> Float[Array, "b t h w c"]:
    """Runs the network on a clip in chunks: `first` frames, then `size` at a time."""
    chunk = FrameChunk()
    y = network(x[:, :first], chunk)
    if x.shape[1] == first:
        return y

    def step(network: nn.Module, past: list[Array], frames: Array) -> tuple[list[Array], Array]:
        chunk = FrameChunk(past)
        y = network(frames, chunk)
        return chunk.kept, y

    later = x[:, first:].reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)
    scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
    _, ys = scan(network, chunk.kept, later)
    ys = ys.swapaxes(0, 1).reshape(y.shape[0], -1, *y.shape[2:])
    return jnp.concatenate([y, ys], axis=1)


def inputs(config: AutoencoderKLWanConfig) -> tuple[Float[Array, "1 1 H W c"]]:
    """Returns a small clip of one frame for `init`."""
    channels = config.in_channels // (config.patch_size or 1) ** 2
    return (jnp.zeros((1, 1, config.side_factor, config.side_factor, channels)),)


COMPONENT = Component(
    library="diffusers",
    classes=("AutoencoderKLQwenImage",),
    network=AutoencoderKLWan,
    read_config=AutoencoderKLWanConfig.from_config,
    inputs=inputs,
    lists=LISTS,
    axes=AXES,
    method="reconstruct",
)
