"""Z-Image as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is a user turn of a chat with Qwen3, whose penultimate hidden state conditions the transformer.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.chat_family import ChatFamily
from digen_jax.models.family import Size
from digen_jax.models.pipeline_family import check_tokens
from digen_jax.models.text import language_model
from digen_jax.models.zimage import network as zimage


@dataclasses.dataclass(frozen=True)
class ZImage(ChatFamily):
    """Networks and tokenizer of one pipeline folder; parameters are passed to each call.

    Attributes:
      max_sequence_length: Tokens of a prompt's chat, including the template.
      cfg_normalization: Maximum norm of the guided velocity relative to that with the prompt, as in diffusers'
        pipeline. 0 means unbounded.
    """

    transformer: zimage.ZImageTransformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoder: language_model.LanguageModel
    tokenizer: Any
    scheduler: SchedulerConfig
    max_sequence_length: int = ChatFamily.default_tokens
    cfg_normalization: float = 0.0

    pipeline: ClassVar = "ZImagePipeline"
    parts: ClassVar = {
        "transformer": zimage.TRANSFORMER,
        "vae": autoencoder_kl.COMPONENT,
        "text_encoder": language_model.component(("Qwen3Model", "Qwen3ForCausalLM"), states=(-2,)),
    }
    widths: ClassVar = (
        ("text_encoder", "hidden_size", "cap_feat_dim"),
        ("vae", "latent_channels", "in_channels"),
    )
    # Default of diffusers' pipeline, whose guidance_scale is 5 (see `guided`).
    default_guidance: ClassVar[float] = 6.0
    default_side: ClassVar[int] = 1024
    lora_targets: ClassVar[str] = zimage.LORA_TARGETS

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises FieldError if there are more tokens than positions."""
        most = configs["transformer"].longest_caption
        check_tokens(tokens, most, "for which the transformer has positions (its axes_lens)")

    def guided(
        self, null: Float[Array, "b h w c"], prompt: Float[Array, "b h w c"], guidance: float
    ) -> Float[Array, "b h w c"]:
        """Returns prompt + (guidance - 1) (prompt - null), where diffusers' `guidance_scale` is guidance - 1.

        `cfg_normalization` bounds its norm. The pipeline's `cfg_truncation`, the time 1 - sigma after which guidance is
        off, is 1 by default, so every step is guided.
        """
        v = prompt + (guidance - 1) * (prompt - null)
        if not self.cfg_normalization:
            return v
        longest, length = (
            jnp.sqrt(jnp.square(a).sum((1, 2, 3), keepdims=True)) for a in (prompt, v)
        )
        return v * jnp.minimum(1, self.cfg_normalization * longest / length)

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return self.transformer.config.patch

    @property
    def positions(self) -> int:
        """Maximum tokens along a side."""
        return min(self.transformer.config.axes_lens[1:])

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns the scheduler's sigmas; diffusers' pipeline counts tokens of 2 x 2 latents for a dynamic shift."""
        h, w, _ = self.latent_shape(size)
        tokens = (h // 2) * (w // 2)
        return make_sigmas(self.scheduler, steps, tokens, spacing="uniform float32")
