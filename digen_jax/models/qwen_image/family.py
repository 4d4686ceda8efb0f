"""Qwen-Image as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is formatted as a chat with Qwen2.5-VL. Its last hidden states, without those of the chat's prefix, condition
the transformer. Qwen-Image-2512 is the same network with different weights.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.diffusion.schedule import SchedulerConfig
from digen_jax.models.autoencoders import autoencoder_wan
from digen_jax.models.chat_family import ChatFamily
from digen_jax.models.family import Params
from digen_jax.models.layers import SIDE, pack, unpack
from digen_jax.models.linear import exact_products
from digen_jax.models.qwen_image import network as qwen_image
from digen_jax.models.text import language_model

# Negative prompt of QwenLM/Qwen-Image, README.md, and verl-project/verl-omni,
# examples/flowgrpo_trainer/data_process/qwenimage_ocr.py (340b365).
NULL = " "


@dataclasses.dataclass(frozen=True)
class QwenImage(ChatFamily):
    """Networks and tokenizer of one pipeline folder; parameters are passed to each call.

    A single sampler step is rejected if the schedule has a terminal shift, because diffusers' sigmas are NaN then.

    Attributes:
      max_sequence_length: Tokens of a prompt and of the chat's suffix. The pipeline truncates chats to `most_tokens`
        first, and then states, which depend only on preceding tokens, to `max_sequence_length`.
    """

    transformer: qwen_image.QwenImageTransformer
    vae: autoencoder_wan.AutoencoderKLWan
    text_encoder: language_model.LanguageModel
    tokenizer: Any
    scheduler: SchedulerConfig
    max_sequence_length: int = ChatFamily.default_tokens

    pipeline: ClassVar = "QwenImagePipeline"
    parts: ClassVar = {
        "transformer": qwen_image.TRANSFORMER,
        "vae": autoencoder_wan.COMPONENT,
        "text_encoder": language_model.component(("Qwen2_5_VLForConditionalGeneration",)),
    }
    widths: ClassVar = (
        ("text_encoder", "hidden_size", "joint_attention_dim"),
        ("vae", "z_dim", "in_channels / 4"),
        ("transformer", "out_channels", "in_channels / 4"),
    )
    most_tokens: ClassVar = 1024
    # Chat of diffusers' pipeline, and the number of leading tokens whose states it drops.
    template: ClassVar = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    dropped: ClassVar = 34
    # Default `true_cfg_scale` of diffusers' pipeline; its guidance_scale is for distilled models, of which none has
    # been released.
    default_guidance: ClassVar[float] = 4.0
    negative_prompt: ClassVar[str] = NULL
    lora_targets: ClassVar[str] = qwen_image.LORA_TARGETS

    def guided(
        self, null: Float[Array, "b h w c"], prompt: Float[Array, "b h w c"], guidance: float
    ) -> Float[Array, "b h w c"]:
        """Returns null + guidance (prompt - null), rescaled per token to the norm of `prompt`, as in diffusers."""
        v = null + guidance * (prompt - null)
        of_prompt, of_v = _length(prompt), _length(v)
        scale = jnp.where(of_v > 0, of_prompt / jnp.where(of_v > 0, of_v, 1), 1)
        _, height, width, _ = v.shape
        return v * unpack(jnp.repeat(scale, SIDE**2, axis=-1), height, width)

    @property
    def factor(self) -> int:
        """Pixels along each side of a latent."""
        return self.vae.config.side_factor

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self.vae.config.z_dim

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Returns images in [0, 1], each a clip of one frame."""
        return autoencoder_wan.decode_images(self.vae, params["vae"], latents)

    @exact_products
    def encode_images(
        self, params: Params, images: Float[Array, "b H W 3"]
    ) -> Float[Array, "b h w c"]:
        """Returns the latents of images in [0, 1]: the means, without noise."""
        return autoencoder_wan.encode_clips(self.vae, params["vae"], images[:, None])[:, 0]


def _length(v: Float[Array, "b h w c"]) -> Float[Array, "b n 1"]:
    """Returns the norm of each token; a zero token has the gradient 0."""
    squares = jnp.square(pack(v)).sum(axis=-1, keepdims=True)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
