"""FLUX.1 dev and schnell as a family: prompts -> conditioning, velocity, latents -> images.

The context of a prompt is the T5's states, padding included, which diffusers' `FluxPipeline` does not mask; the state
of CLIP's end token modulates the blocks. dev takes a guidance scale as a network input and can run a second pass
without the prompt. schnell supports neither.
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
from digen_jax.models.linear import exact_products
from digen_jax.models.pipeline_family import PipelineFamily
from digen_jax.models.text import clip_text, t5
from digen_jax.models.text.tokenizers import longer, padded


class Conditioning(NamedTuple):
    """Transformer inputs of a prompt."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """Token ids of each prompt from CLIP's tokenizer and from the T5's."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b m"] | Int[np.ndarray, "b m"]


@dataclasses.dataclass(frozen=True)
class Flux(PipelineFamily):
    """Networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      max_sequence_length: Tokens of the T5.
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
    # Default of diffusers' pipeline; the authors of schnell sample it in 4 steps.
    default_steps: ClassVar[int] = 28
    encoded_prompts: ClassVar[int] = 32
    lora_targets: ClassVar[str] = flux.LORA_TARGETS

    @property
    def guidance(self) -> Guidance:
        """Returns "both" for dev, whose inputs include a guidance, and "none" for schnell.

        The pipeline runs a second pass if `true_cfg_scale` is above 1 and a negative prompt is given, which may be
        empty. Here a `true_cfg_scale` above 1 suffices, and the negative prompt is empty by default. The pipeline also
        accepts `true_cfg_scale` for schnell. Here schnell has none: it is distilled for sampling without guidance, and
        "classifier-free" would make every run encode and keep an unused null conditioning.
        """
        return "both" if self.transformer.config.guidance_embeds else "none"

    @property
    def default_guidance(self) -> float:
        """Default of diffusers' pipeline, which a model without guidance ignores."""
        return 3.5 if self.transformer.config.guidance_embeds else 1.0

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Returns token ids, padded or truncated to each text encoder's length."""
        prompts = [record["prompt"] for record in records]
        first, _ = padded(self.tokenizer, prompts, self.tokenizer.model_max_length)
        second, _ = padded(self.tokenizer_2, prompts, self.max_sequence_length)
        return TokenIds(first, second)

    def is_truncated(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Returns which prompts exceed the T5's input length.

        CLIP's is shorter, but only provides the pooled state of the prompt.
        """
        return longer([(self.tokenizer_2, self.max_sequence_length)], prompts)

    @exact_products
    def encode(self, params: Params, ids: TokenIds) -> Conditioning:
        """Returns the T5's states, padding included, and the state of CLIP's end token."""
        pooled: Any = self.text_encoder.apply({"params": params["text_encoder"]}, ids.first)
        context: Any = self.text_encoder_2.apply({"params": params["text_encoder_2"]}, ids.second)
        return Conditioning(context, pooled)

    def network_inputs(
        self, conditioning: Sequence[Array], guidance: Float[Array, "b"] | None
    ) -> tuple[Any, ...]:
        """Returns context, pooled text, guidance, and in FLUX.1 Kontext the latents of a source image."""
        context, pooled, *source = conditioning
        return context, pooled, guidance, *source

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self.vae.config.latent_channels
