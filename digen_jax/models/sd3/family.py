"""Stable Diffusion 3 / 3.5 as a family: prompts -> conditioning, velocity, latents -> images.

The context of a prompt is that of both CLIPs, followed by that of the T5. Without a T5, zero tokens replace it, as in
`StableDiffusion3Pipeline(text_encoder_3=None, tokenizer_3=None)`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from digen_jax.attention.kernels import Heads
from digen_jax.diffusion.schedule import SchedulerConfig
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.family import Params, Record
from digen_jax.models.linear import exact_products
from digen_jax.models.pipeline_family import PipelineFamily
from digen_jax.models.sd3 import network as sd3
from digen_jax.models.text import clip_text, t5
from digen_jax.models.text.tokenizers import longer, padded


class Conditioning(NamedTuple):
    """Transformer inputs of a prompt."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """Token ids of each prompt from all tokenizers."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    third: Int[Array, "b m"] | Int[np.ndarray, "b m"] | None = None  # None means no T5


@dataclasses.dataclass(frozen=True)
class StableDiffusion3(PipelineFamily):
    """Networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      max_sequence_length: Tokens of the T5, or the zero tokens that replace them.
    """

    transformer: sd3.SD3Transformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoder: clip_text.CLIPTextModelWithProjection
    text_encoder_2: clip_text.CLIPTextModelWithProjection
    tokenizer: Any  # CLIPTokenizer
    tokenizer_2: Any  # CLIPTokenizer
    scheduler: SchedulerConfig
    text_encoder_3: t5.T5EncoderModel | None = None
    tokenizer_3: Any = None  # T5Tokenizer
    max_sequence_length: int = 256

    pipeline: ClassVar = "StableDiffusion3Pipeline"
    parts: ClassVar = {
        "transformer": sd3.TRANSFORMER,
        "vae": autoencoder_kl.COMPONENT,
        "text_encoder": clip_text.WITH_PROJECTION,
        "text_encoder_2": clip_text.WITH_PROJECTION,
        "text_encoder_3": t5.COMPONENT,
    }
    widths: ClassVar = (("text_encoder_3", "d_model", "joint_attention_dim"),)
    default_tokens: ClassVar = 256
    most_tokens: ClassVar = 512
    spacing: ClassVar = "timesteps"
    # The repositories of 3.5 contain second copies of all text encoders in `text_encoders`.
    unused: ClassVar[tuple[str, ...]] = ("text_encoders",)
    optional: ClassVar[tuple[str, ...]] = ("text_encoder_3",)
    # Defaults of diffusers' pipeline.
    default_steps: ClassVar[int] = 28
    default_guidance: ClassVar[float] = 7.0
    encoded_prompts: ClassVar[int] = 64
    frozen: ClassVar = {"transformer": sd3.FROZEN}
    lora_targets: ClassVar[str] = sd3.LORA_TARGETS

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the tokenizers by field name; raises ValueError if one does not fit its text encoder."""
        found = super().read_tokenizers(folder, configs, tokens)
        length = found["tokenizer"].model_max_length
        longest = configs["text_encoder_2"].max_position_embeddings
        if length > longest:
            raise ValueError(
                f"{folder / 'tokenizer' / 'tokenizer_config.json'}: model_max_length must be at most {longest}, the "
                f"positions of text_encoder_2, which reads as many tokens, and is {length}"
            )
        return found

    @property
    def heads(self) -> Heads:
        """Attention heads of the transformer; without a T5, one weighted token represents all zero tokens."""
        return super().heads._replace(weighted=self.null_tokens > 0)

    @property
    def null_tokens(self) -> int:
        """Number of zero tokens that replace the T5's tokens."""
        return self.max_sequence_length if self.text_encoder_3 is None else 0

    # ---------------------------------------------------------------- prompts -> conditioning

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Returns token ids, padded or truncated to each text encoder's length."""
        prompts = [record["prompt"] for record in records]
        return TokenIds(*(padded(tokenizer, prompts, n)[0] for tokenizer, n in self._lengths()))

    def _lengths(self) -> list[tuple[Any, int]]:
        """Returns each tokenizer with its text encoder's input length."""
        # As in diffusers' pipeline, both CLIPs use the first tokenizer's length.
        length = self.tokenizer.model_max_length
        lengths = [(self.tokenizer, length), (self.tokenizer_2, length)]
        if self.text_encoder_3 is None:
            return lengths
        return [*lengths, (self.tokenizer_3, self.max_sequence_length)]

    def is_truncated(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Returns which prompts exceed a text encoder's input length, so that `tokenize` truncates them."""
        return longer(self._lengths(), prompts)

    @exact_products
    def encode(self, params: Params, ids: TokenIds) -> Conditioning:
        """Returns the context and the concatenated pooled embeddings of both CLIPs.

        The context concatenates the CLIPs' penultimate states along the channels, zero-padded to the joint width,
        followed by the T5's tokens, padding included, which diffusers' pipeline does not mask.
        """
        first = self.text_encoder.apply({"params": params["text_encoder"]}, ids.first)
        second = self.text_encoder_2.apply({"params": params["text_encoder_2"]}, ids.second)
        states, pooled = zip(first, second, strict=True)
        context = jnp.concatenate(states, axis=-1)
        missing = self.transformer.config.joint_attention_dim - context.shape[-1]
        context = jnp.pad(context, ((0, 0), (0, 0), (0, missing)))
        if self.text_encoder_3 is not None:
            t5: Any = self.text_encoder_3.apply({"params": params["text_encoder_3"]}, ids.third)
            context = jnp.concatenate([context, t5], axis=1)
        return Conditioning(context, jnp.concatenate(pooled, axis=-1))

    def network_inputs(
        self, conditioning: Conditioning, guidance: Float[Array, "b"] | None
    ) -> tuple[Any, ...]:
        """Returns context, pooled text and the number of zero tokens."""
        return *conditioning, self.null_tokens

    # ---------------------------------------------------------------- latents <-> images

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return self.transformer.config.patch_size

    @property
    def positions(self) -> int:
        """Maximum tokens along a side: the side of the position table."""
        return self.transformer.config.pos_embed_max_size

    @property
    def default_side(self) -> int:
        """Default pixels along each side of an image in diffusers' pipeline."""
        return self.transformer.config.sample_size * self.factor

    @property
    def context_tokens(self) -> int:
        """Text tokens that the transformer processes; one token represents all zero tokens."""
        return self.tokenizer.model_max_length + (
            1 if self.null_tokens else self.max_sequence_length
        )
