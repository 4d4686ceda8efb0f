"""FLUX.1 dev and schnell as a family: prompts -> conditioning, velocity, latents -> images.

The context of a prompt is that of the T5, padding included, which diffusers' `FluxPipeline` does not mask; the state of
CLIP's end token modulates the blocks. dev is given a guidance scale as a number, and may have a second pass without the
prompt; schnell has neither.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from digen_jax.diffusion.schedule import SchedulerConfig
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.family import Guidance, Params, Record
from digen_jax.models.flux import network as flux
from digen_jax.models.image_family import ImageFamily
from digen_jax.models.linear import exact_products
from digen_jax.models.text import clip_text, t5
from digen_jax.models.text.tokenizers import longer, padded


class Conditioning(NamedTuple):
    """The transformer's inputs from a prompt."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """The ids of each prompt from CLIP's tokenizer and from the T5's."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b m"] | Int[np.ndarray, "b m"]


@dataclasses.dataclass(frozen=True)
class Flux(ImageFamily):
    """The networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      max_sequence_length: tokens of the T5.
    """

    transformer: flux.FluxTransformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoder: clip_text.CLIPTextModel
    text_encoder_2: t5.T5EncoderModel
    tokenizer: Any  # CLIPTokenizer
    tokenizer_2: Any  # T5Tokenizer
    scheduler: SchedulerConfig
    max_sequence_length: int = 512

    pipeline: ClassVar = "FluxPipeline"
    parts: ClassVar = {
        "transformer": flux.TRANSFORMER,
        "vae": autoencoder_kl.COMPONENT,
        "text_encoder": clip_text.WITHOUT_PROJECTION,
        "text_encoder_2": t5.COMPONENT,
    }
    widths: ClassVar = (
        ("text_encoder", "hidden_size", "pooled_projection_dim"),
        ("text_encoder_2", "d_model", "joint_attention_dim"),
        ("vae", "latent_channels", "in_channels / 4"),
        ("transformer", "out_channels", "in_channels"),
    )
    default_tokens: ClassVar = 512
    most_tokens: ClassVar = 512
    # Of diffusers' pipeline; the makers of schnell sample it in 4.
    default_steps: ClassVar[int] = 28
    encoded_prompts: ClassVar[int] = 32
    lora_targets: ClassVar[str] = flux.LORA_TARGETS

    @property
    def guidance(self) -> Guidance:
        """Returns "both" for dev, whose inputs include a guidance, and "none" for schnell.

        The pipeline makes a second pass if `true_cfg_scale` is above 1 and a negative prompt is given, which can be
        empty. Here a true guidance above 1 suffices, and the negative prompt is empty by default. The pipeline takes a
        `true_cfg_scale` for schnell, too. Here schnell has none: it is distilled to be sampled without guidance, and
        with "classifier-free" each run of it would encode and keep a null conditioning that nothing reads.
        """
        return "both" if self.transformer.config.guidance_embeds else "none"

    @property
    def default_guidance(self) -> float:
        """That of diffusers' pipeline, which a model without guidance ignores."""
        return 3.5 if self.transformer.config.guidance_embeds else 1.0

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Ids, padded or truncated to each text encoder's length."""
        prompts = [record["prompt"] for record in records]
        first, _ = padded(self.tokenizer, prompts, self.tokenizer.model_max_length)
        second, _ = padded(self.tokenizer_2, prompts, self.max_sequence_length)
        return TokenIds(first, second)

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Which prompts have more tokens than the T5's input.

        CLIP's is shorter, but only a summary of the prompt comes from there.
        """
        return longer([(self.tokenizer_2, self.max_sequence_length)], prompts)

    @exact_products
    def encode(self, params: Params, ids: TokenIds) -> Conditioning:
        """The T5's states, padding included, and the state of CLIP's end token."""
        pooled = self.text_encoder.apply({"params": params["text_encoder"]}, ids.first)
        context = self.text_encoder_2.apply({"params": params["text_encoder_2"]}, ids.second)
        return Conditioning(context, pooled)

    def network_inputs(
        self, conditioning: Sequence[Array], guidance: Float[Array, "b"] | None
    ) -> tuple[Any, ...]:
        """Context, pooled text, guidance, and in FLUX.1 Kontext the latents of a source image."""
        context, pooled, *source = conditioning
        return context, pooled, guidance, *source

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self.vae.config.latent_channels
