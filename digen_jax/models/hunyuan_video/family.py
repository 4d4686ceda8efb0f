"""HunyuanVideo text to video as a family: prompts -> conditioning, velocity, latents -> clips.

A prompt is formatted as a chat with Llama 3, whose hidden states before the last two layers, without those of the
chat's prefix, are the transformer's text. The state of CLIP's end token modulates the blocks. The guidance scale is an
input of the network; a second pass without the prompt is possible, too.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.models.autoencoders import autoencoder_hunyuan_video as autoencoder
from digen_jax.models.chat_family import ChatFamily, Tokens
from digen_jax.models.family import Guidance, Params, Record, Size, check_clip
from digen_jax.models.hunyuan_video import network as hunyuan_video
from digen_jax.models.linear import exact_products
from digen_jax.models.text import clip_text, language_model, tokenizers

# Tokens of CLIP in diffusers' pipeline, for any tokenizer.
CLIP_TOKENS = 77


class Conditioning(NamedTuple):
    """Transformer inputs of a prompt.

    Attributes:
      context: Llama's states of the prompt's tokens and of trailing padding.
      mask: False for padding, which the transformer does not attend to.
      pooled: CLIP's state of the prompt's end.
    """

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """Token ids of each prompt's chat with a mask that is False for trailing padding, and CLIP's token ids."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]
    of_clip: Int[Array, "b m"] | Int[np.ndarray, "b m"]


class VideoChatFamily(ChatFamily):
    """Base of HunyuanVideo and HunyuanVideo 1.5: schedule and latents of clips."""

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns the scheduler's sigmas, whose shift does not depend on the size."""
        self.latent_shape(size)
        return make_sigmas(self.scheduler, steps, spacing=self.spacing)

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """Returns (t, h, w, c) of a clip's latents, for 1 + 4 n frames and sides that are multiples of a token's.

        Raises:
          ValueError: the size does not fit. diffusers' pipeline accepts other numbers of frames, and returns fewer.
        """
        check_clip(size, self.factor * self.patch, autoencoder.FRAMES_FACTOR)
        frames = 1 + (size.frames - 1) // autoencoder.FRAMES_FACTOR
        return frames, size.height // self.factor, size.width // self.factor, self.channels

    def encode_images(self, params: Params, images: Float[Array, "b H W 3"]) -> NoReturn:
        """Raises ValueError: only clips are generated."""
        raise ValueError("this model generates clips, but images train: choose a model of images")


@dataclasses.dataclass(frozen=True)
class HunyuanVideo(VideoChatFamily):
    """Networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      max_sequence_length: Tokens of a prompt and of the chat's suffix.
    """

    transformer: hunyuan_video.HunyuanVideoTransformer
    vae: autoencoder.AutoencoderKLHunyuanVideo
    text_encoder: language_model.LanguageModel
    text_encoder_2: clip_text.CLIPTextModel
    tokenizer: Any
    tokenizer_2: Any  # CLIPTokenizer
    scheduler: SchedulerConfig
    max_sequence_length: int = 256

    pipeline: ClassVar = "HunyuanVideoPipeline"
    parts: ClassVar = {
        "transformer": hunyuan_video.TRANSFORMER,
        "vae": autoencoder.COMPONENT,
        "text_encoder": language_model.component(("LlamaModel",), (-3,), "LlamaTokenizer"),
        "text_encoder_2": clip_text.WITHOUT_PROJECTION,
    }
    widths: ClassVar = (
        ("text_encoder", "hidden_size", "text_embed_dim"),
        ("text_encoder_2", "hidden_size", "pooled_projection_dim"),
        ("vae", "latent_channels", "in_channels"),
        ("transformer", "out_channels", "in_channels"),
    )
    default_tokens: ClassVar = 256
    # Chat of diffusers' pipeline, and the number of leading tokens whose states it drops.
    template: ClassVar = (
        "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
        "1. The main content and theme of the video."
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
        "4. background environment, light, style and atmosphere."
        "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    )
    dropped: ClassVar = 95
    guidance: ClassVar[Guidance] = "both"
    default_guidance: ClassVar[float] = 6.0
    lora_targets: ClassVar[str] = hunyuan_video.LORA_TARGETS

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the tokenizers; raises ValueError if one does not fit its text encoder or the template."""
        found = super().read_tokenizers(folder, configs, tokens)
        clip = tokenizers.read_clip(folder / "tokenizer_2", configs["text_encoder_2"])
        return found | {"tokenizer_2": clip}

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises ValueError if CLIP has other positions than diffusers' pipeline has tokens."""
        positions = configs["text_encoder_2"].max_position_embeddings
        if positions < CLIP_TOKENS:
            raise ValueError(
                f"{folder / 'text_encoder_2' / 'config.json'}: max_position_embeddings must be at least "
                f"{CLIP_TOKENS}, the tokens in diffusers' pipeline, and is {positions}"
            )

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Returns token ids of each prompt's chat, and of the prompt for CLIP, padded or truncated."""
        prompts = [record["prompt"] for record in records]
        of_clip, _ = tokenizers.padded(self.tokenizer_2, prompts, CLIP_TOKENS)
        return TokenIds(*super().tokenize(records), of_clip)

    @exact_products
    def encode(self, params: Params, tokens: TokenIds) -> Conditioning:
        """Returns Llama's states of each prompt's chat after the dropped tokens, and the state of CLIP's end token."""
        of_chat = super().encode(params, Tokens(tokens.ids, tokens.mask))
        clip = {"params": params["text_encoder_2"]}
        pooled: Any = self.text_encoder_2.apply(clip, tokens.of_clip)
        return Conditioning(*of_chat, pooled)

    def network_inputs(
        self, conditioning: Conditioning, guidance: Float[Array, "b"] | None
    ) -> tuple[Any, ...]:
        """Returns context, mask, pooled text and guidance."""
        return *conditioning, guidance

    def default_size(self) -> Size:
        """Returns the default size of diffusers' pipeline."""
        return Size(720, 1280, 129)

    @exact_products
    def decode(
        self, params: Params, latents: Float[Array, "b t h w c"]
    ) -> Float[Array, "b T H W 3"]:
        """Returns clips in [0, 1], decoded in tiles of frames."""
        return autoencoder.decode_clips(self.vae, params["vae"], latents)
