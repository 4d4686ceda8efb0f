"""FLUX.2 klein as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is a user turn of a chat with Qwen3. Its states at three depths, concatenated along the channels, condition the
transformer, padding included. Base models are guided by a second pass with the empty prompt; distilled models are not
guided. Source images to edit are encoded by the autoencoder, and the transformer attends to their latents as tokens.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8
from PIL import Image

from digen_jax.checkpoints import folder as weights
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.models.autoencoders import autoencoder_flux2
from digen_jax.models.chat_family import ChatFamily, Tokens
from digen_jax.models.family import Guidance, Params, Record, Size, check_image
from digen_jax.models.flux2 import network as flux2
from digen_jax.models.linear import exact_products
from digen_jax.models.text import language_model

# Default `text_encoder_out_layers` of diffusers' pipeline.
STATES = (9, 18, 27)
# Lines (slope, offset) of mu over the tokens of an image, for 10 and for 200 steps, and the number of tokens above
# which the second applies to any number of steps: `compute_empirical_mu` of diffusers' pipeline_flux2_klein.py.
FEW, OF_FEW = 10, (8.73809524e-05, 1.89833333)
MANY, OF_MANY = 200, (0.00016927, 0.45666666)
LARGE = 4300
# Pixels above which diffusers' pipeline makes a source image smaller.
LARGEST_SOURCE = 1024 * 1024


class Conditioning(NamedTuple):
    """Transformer input of a prompt: states of its tokens and of trailing padding, all attended to."""

    context: Float[Array, "b n d"]


class EditConditioning(NamedTuple):
    """Transformer inputs of a prompt and its source images."""

    context: Float[Array, "b n d"]
    source: Float[Array, "b s h w c"]  # latents


class EditTokens(NamedTuple):
    """Token ids of each prompt's chat, their mask, and the prompt's source images."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]
    images: UInt8[Array, "b s h w 3"] | UInt8[np.ndarray, "b s h w 3"]


@dataclasses.dataclass(frozen=True)
class Flux2Klein(ChatFamily):
    """Networks and tokenizer of one pipeline folder, for prompts with or without source images.

    All source images have the size `source`, because a program is compiled for one shape; the pipeline chooses a size
    for each (see `source_size`).

    Attributes:
      distilled: `is_distilled` of model_index.json; a distilled model is not guided.
      max_sequence_length: Tokens of a prompt's chat, including the template.
    """

    transformer: flux2.Flux2Transformer
    vae: autoencoder_flux2.AutoencoderKLFlux2
    text_encoder: language_model.LanguageModel
    tokenizer: Any
    scheduler: SchedulerConfig
    distilled: bool = False
    max_sequence_length: int = ChatFamily.default_tokens
    source: Size | None = None
    sources: int = 1

    pipeline: ClassVar = "Flux2KleinPipeline"
    parts: ClassVar = {
        "transformer": flux2.TRANSFORMER,
        "vae": autoencoder_flux2.COMPONENT,
        "text_encoder": language_model.component(("Qwen3ForCausalLM", "Qwen3Model"), STATES),
    }
    widths: ClassVar = (
        ("text_encoder", f"hidden_size times {len(STATES)}", "joint_attention_dim"),
        ("vae", "latent_channels times 4", "in_channels"),
        ("transformer", "out_channels", "in_channels"),
    )
    masked: ClassVar = {}
    thinking: ClassVar = False
    default_side: ClassVar[int] = 1024
    edits: ClassVar[bool] = True
    lora_targets: ClassVar[str] = flux2.LORA_TARGETS

    def __post_init__(self):
        if self.source is not None:
            check_image(self.source, self.factor)

    @classmethod
    def from_folder(cls, folder: pathlib.Path, *args: Any, **options: Any) -> Self:
        """Builds the family (see `PipelineFamily.from_folder`)."""
        family = super().from_folder(folder, *args, **options)
        return dataclasses.replace(family, distilled=_is_distilled(folder))

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises ValueError if the language model has fewer layers than `STATES` requires."""
        layers = configs["text_encoder"].num_hidden_layers
        if layers < max(STATES):
            raise ValueError(
                f"{folder / 'text_encoder' / 'config.json'}: num_hidden_layers must be {max(STATES)} or more, as the "
                f"states of layers {', '.join(map(str, STATES))} are read, and is {layers}"
            )

    @property
    def guidance(self) -> Guidance:
        """Returns "none" for a distilled model, otherwise "classifier-free"."""
        return "none" if self.distilled else "classifier-free"

    @property
    def default_guidance(self) -> float:
        """Default of diffusers' pipeline, which a distilled model ignores."""
        return 1.0 if self.distilled else 4.0

    @property
    def encoded_prompts(self) -> int:
        """Maximum prompts encoded together."""
        return self.encoded_with_images(ChatFamily.encoded_prompts)

    def tokenize(self, records: Sequence[Record]) -> Tokens | EditTokens:
        """Returns token ids of each prompt's chat, padded or truncated, and source images.

        Raises:
          ValueError: a source image is missing, unreadable, or unexpected because `source` is None.
        """
        tokens, images = super().tokenize(records), self.source_images(records)
        return tokens if images is None else EditTokens(*tokens, images)

    @exact_products
    def encode(
        self, params: Params, tokens: Tokens | EditTokens
    ) -> Conditioning | EditConditioning:
        """Returns the states of each prompt's chat at three depths, concatenated, and the source images' latents."""
        states = self.states(params, Tokens(tokens.ids, tokens.mask))
        context = jnp.concatenate(states, axis=-1)
        if self.source is None:
            return Conditioning(context)
        images: Any = cast(EditTokens, tokens).images
        flat = images.reshape(-1, *images.shape[2:]).astype(jnp.float32) / 255
        latents = autoencoder_flux2.encode_images(self.vae, params["vae"], flat)
        return EditConditioning(context, latents.reshape(*images.shape[:2], *latents.shape[1:]))

    def source_size(self, height: int, width: int, clip: Size) -> Size:
        """Returns a size of at most `LARGEST_SOURCE` pixels and the same aspect ratio, cut to whole latents."""
        height, width = _limited(height, width)
        return Size(height // self.factor * self.factor, width // self.factor * self.factor)

    def fit_source(self, image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the center of a source image in the size `source`.

        The image keeps its aspect ratio. It is scaled like in diffusers' pipeline if that chooses the same size, and to
        cover the size otherwise.
        """
        size = cast(Size, self.source)
        height, width = _limited(image.height, image.width)
        if self.source_size(image.height, image.width, size) != size._replace(frames=1):
            scale = max(size.height / image.height, size.width / image.width)
            height, width = round(image.height * scale), round(image.width * scale)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        left, top = (width - size.width) // 2, (height - size.height) // 2
        return np.asarray(image.crop((left, top, left + size.width, top + size.height)))

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns the transformer's FLOPs by stream, including source image tokens (see `flux2.forward_flops`)."""
        tokens = 0
        if self.source is not None:
            tokens = self.sources * math.prod(self.latent_shape(self.source)[:2])
        config, latent = self.transformer.config, cast(Any, self.latent_shape(size))
        found = flux2.forward_flops(config, latent, self.max_sequence_length, tokens)
        return {"transformer": found}

    @property
    def factor(self) -> int:
        """Pixels along each side of a latent, which is a 2 x 2 patch of the autoencoder's latents."""
        return 2 ** len(self.vae.config.block_out_channels)

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return 1

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns sigmas from 1 to 1/steps before the shift, by `empirical_mu` unless the scheduler's is static."""
        h, w, _ = self.latent_shape(size)
        return make_sigmas(self.scheduler, steps, spacing="uniform", mu=empirical_mu(h * w, steps))

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Returns images in [0, 1], each a clip of one frame."""
        return autoencoder_flux2.decode_images(self.vae, params["vae"], latents)[:, None]

    @exact_products
    def encode_images(
        self, params: Params, images: Float[Array, "b H W 3"]
    ) -> Float[Array, "b h w c"]:
        """Returns the latents of images in [0, 1]: the means, without noise."""
        return autoencoder_flux2.encode_images(self.vae, params["vae"], images)


def _limited(height: int, width: int) -> tuple[int, int]:
    """Returns (height, width) with at most `LARGEST_SOURCE` pixels."""
    if height * width <= LARGEST_SOURCE:
        return height, width
    scale = math.sqrt(LARGEST_SOURCE / (width * height))
    return int(height * scale), int(width * scale)


def empirical_mu(tokens: int, steps: int) -> float:
    """Returns the shift of an image of `tokens` tokens in `steps` steps, linear in the steps."""
    many = OF_MANY[0] * tokens + OF_MANY[1]
    if tokens > LARGE:
        return many
    few = OF_FEW[0] * tokens + OF_FEW[1]
    slope = (many - few) / (MANY - FEW)
    return slope * steps + (many - MANY * slope)


def _is_distilled(folder: pathlib.Path) -> bool:
    """Returns `is_distilled` of model_index.json, which diffusers omits if it is false."""
    found = weights.read_model_index(folder).get("is_distilled", False)
    if not isinstance(found, bool):
        raise ValueError(
            f"{folder / weights.INDEX}: is_distilled must be true or false, not {found!r}"
        )
    return found
