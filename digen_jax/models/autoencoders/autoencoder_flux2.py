"""AutoencoderKLFlux2, FLUX.2's autoencoder: AutoencoderKL with latents that are normed by fixed statistics.

The diffusion model's latents are 2 x 2 patches of raw latents. Each channel of a patch is normed by the mean and
variance of a batch norm's running statistics (arXiv 1502.03167). Names follow diffusers' AutoencoderKLFlux2.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.files import fields_of, number
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.autoencoders.autoencoder_kl import (
    AutoencoderKL,
    AutoencoderKLConfig,
    Decoder,
    Encoder,
)

# LISTS is AutoencoderKL's; the statistics have no logical axes.
AXES = ((r"^bn$", (None,)), (".*", ("conv_in", "conv_out")))
# Counter of training steps in the checkpoint files.
IGNORED = ("bn.num_batches_tracked",)
# Fields used only for training and tiling.
BOOKKEEPING = ("batch_norm_momentum", "force_upcast", "sample_size")
LEVELS = 4


@dataclasses.dataclass(frozen=True)
class AutoencoderKLFlux2Config:
    """Fields of diffusers' config.json, with its defaults."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",) * LEVELS
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",) * LEVELS
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    decoder_block_out_channels: tuple[int, ...] | None = None  # None means block_out_channels
    layers_per_block: int = number(2, 1, 100)
    act_fn: str = "silu"
    latent_channels: int = 32
    norm_num_groups: int = 32
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    batch_norm_eps: float = number(1e-4, 0, 1)
    patch_size: tuple[int, ...] = (2, 2)

    def __post_init__(self):
        if self.patch_size != (2, 2):
            raise ValueError(f"patch_size must be [2, 2] but is {list(self.patch_size)}")
        own = self.decoder_block_out_channels
        if own is not None and len(own) != len(self.block_out_channels):
            raise ValueError(
                f"decoder_block_out_channels must have {len(self.block_out_channels)} entries, as many as"
                f" block_out_channels, but is {own}"
            )
        _ = self.encoder
        try:
            _ = self.decoder
        except ValueError as error:
            raise ValueError(f"decoder_block_out_channels: {error}") from error

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AutoencoderKLFlux2Config":
        """Reads the configuration from a diffusers config.json.

        Raises:
          ValueError: a field is unknown or has an unsupported value.
        """
        config = {name: value for name, value in config.items() if name not in BOOKKEEPING}
        return cls(**fields_of(cls, config, "an AutoencoderKLFlux2"))

    @property
    def encoder(self) -> AutoencoderKLConfig:
        """Returns AutoencoderKL's configuration with the same encoder."""
        shared = {field.name for field in dataclasses.fields(AutoencoderKLConfig)}
        fields = {name: value for name, value in vars(self).items() if name in shared}
        return AutoencoderKLConfig(**fields)

    @property
    def decoder(self) -> AutoencoderKLConfig:
        """Returns AutoencoderKL's configuration with the same decoder."""
        channels = self.decoder_block_out_channels or self.block_out_channels
        return dataclasses.replace(self.encoder, block_out_channels=channels)


class LatentStatistics(nn.Module):
    """Running mean and variance of each channel of patched latents, as in a batch norm."""

    channels: int
    epsilon: float

    def setup(self):
        """Creates the statistics, which are never updated."""
        self.running_mean = self.param("running_mean", nn.initializers.zeros, (self.channels,))
        self.running_var = self.param("running_var", nn.initializers.ones, (self.channels,))

    def norm(self, latents: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
        """Normalizes latents to mean 0 and variance 1."""
        return (latents - self.running_mean) / jnp.sqrt(self.running_var + self.epsilon)

    def undo(self, latents: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
        """Inverts `norm`."""
        return latents * jnp.sqrt(self.running_var + self.epsilon) + self.running_mean


class AutoencoderKLFlux2(AutoencoderKL):
    """Autoencoder of images; computes in `dtype`, returns float32.

    `encode` and `decode` are inherited from AutoencoderKL and use raw latents.
    """

    config: AutoencoderKLFlux2Config  # type: ignore[assignment]

    def setup(self):
        """Creates encoder, decoder, the 1x1 convolutions next to the latents, and the latents' statistics."""
        config = self.config
        self.encoder = Encoder(config.encoder, self.dtype)
        self.decoder = Decoder(config.decoder, self.dtype)
        if config.use_quant_conv:
            self.quant_conv = nn.Conv(2 * config.latent_channels, (1, 1), dtype=self.dtype)
        if config.use_post_quant_conv:
            self.post_quant_conv = nn.Conv(config.latent_channels, (1, 1), dtype=self.dtype)
        channels = config.latent_channels * math.prod(config.patch_size)
        self.bn = LatentStatistics(channels, config.batch_norm_eps)

    def scale_latents(self, latents: Float[Array, "b h w c"]) -> Float[Array, "b h//2 w//2 4*c"]:
        """Converts raw latents with even sides to the diffusion model's latents, of about unit variance."""
        return self.bn.norm(_patched(latents))

    def unscale_latents(self, latents: Float[Array, "b h w d"]) -> Float[Array, "b 2*h 2*w d//4"]:
        """Converts the diffusion model's latents to raw latents; the inverse of `scale_latents`."""
        return _unpatched(self.bn.undo(latents))

    def reconstruct(self, images: Float[Array, "b H W rgb"]) -> Float[Array, "b H W rgb"]:
        """Reconstructs images in [-1, 1] from the means of their latents; for `init`, because it runs all modules."""
        mean, _ = self.encode(images)
        return self.decode(self.unscale_latents(self.scale_latents(mean)))


def encode_images(
    vae: AutoencoderKLFlux2, params: Any, images: Float[Array, "b H W 3"]
) -> Float[Array, "b h w d"]:
    """Encodes images in [0, 1] to the transformer's latents: the means, without noise."""
    mean, _ = vae.apply({"params": params}, images * 2 - 1, method="encode")
    latents: Any = vae.apply({"params": params}, mean, method="scale_latents")
    return latents


def decode_images(
    vae: AutoencoderKLFlux2, params: Any, latents: Float[Array, "b h w d"]
) -> Float[Array, "b H W 3"]:
    """Decodes the transformer's latents to images in [0, 1]."""
    raw = vae.apply({"params": params}, latents, method="unscale_latents")
    images: Any = vae.apply({"params": params}, raw, method="decode")
    return jnp.clip(images / 2 + 0.5, 0, 1)


def _patched(latents: Float[Array, "b h w c"]) -> Float[Array, "b h//2 w//2 4*c"]:
    """Stacks the four latents of a patch along the channels, channel by channel."""
    b, h, w, c = latents.shape
    patches = latents.reshape(b, h // 2, 2, w // 2, 2, c)
    return jnp.einsum("bhpwqc->bhwcpq", patches).reshape(b, h // 2, w // 2, 4 * c)


def _unpatched(latents: Float[Array, "b h w d"]) -> Float[Array, "b 2*h 2*w d//4"]:
    b, h, w, d = latents.shape
    patches = latents.reshape(b, h, w, d // 4, 2, 2)
    return jnp.einsum("bhwcpq->bhpwqc", patches).reshape(b, 2 * h, 2 * w, d // 4)


COMPONENT = dataclasses.replace(
    autoencoder_kl.COMPONENT,
    classes=("AutoencoderKLFlux2",),
    network=AutoencoderKLFlux2,
    read_config=AutoencoderKLFlux2Config.from_config,
    axes=AXES,
    ignored=lambda network: IGNORED,
)
