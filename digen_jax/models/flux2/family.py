"""FLUX.2 klein as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is a user turn of a chat with Qwen3. Its states at three depths, concatenated along the channels, condition the
transformer, padding included. Base models are guided by a second pass with the empty prompt; distilled models are not
guided. The pipeline's image editing is not supported.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from digen_jax.checkpoints import folder as weights
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.models.autoencoders import autoencoder_flux2
from digen_jax.models.chat_family import ChatFamily, Tokens
from digen_jax.models.family import Guidance, Params, Size
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


class Conditioning(NamedTuple):
    """Transformer input of a prompt: states of its tokens and of trailing padding, all attended to."""

    context: Float[Array, "b n d"]


@dataclasses.dataclass(frozen=True)
class Flux2Klein(ChatFamily):
    """Networks and tokenizer of one pipeline folder; parameters are passed to each call.

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
    lora_targets: ClassVar[str] = flux2.LORA_TARGETS

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

    @exact_products
    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """Returns the states of each prompt's chat at three depths, concatenated along the channels."""
        return Conditioning(jnp.concatenate(self.states(params, tokens), axis=-1))

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
