"""HunyuanVideo 1.5 text to video as a family: prompts -> conditioning, velocity, latents -> clips.

A prompt is formatted as a chat with Qwen2.5-VL, whose hidden states before the last two layers, without those of the
chat's prefix, are the transformer's text. Quoted text of a prompt, which the clip is to show, is also read letter by
letter, by ByT5.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from digen_jax.checkpoints.folder import read_json
from digen_jax.diffusion.schedule import SchedulerConfig
from digen_jax.models.autoencoders import autoencoder_hunyuan_video15 as autoencoder
from digen_jax.models.chat_family import Tokens
from digen_jax.models.family import Guidance, Params, Record, Size
from digen_jax.models.hunyuan_video import network15 as hunyuan_video
from digen_jax.models.hunyuan_video.family import VideoChatFamily
from digen_jax.models.linear import exact_products
from digen_jax.models.text import language_model, t5, tokenizers

GUIDER = "guider"
# Fields of diffusers' ClassifierFreeGuidance that support a single value, its default.
FIXED = {
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
}
QUOTED = re.compile(r'"(.*?)"|“(.*?)”')
SIZES = {640: Size(480, 848, 121), 960: Size(720, 1280, 121)}
# diffusers' pipeline has the runs of spaces from the continued lines of its source.
GAP = " " * 9
SYSTEM = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:"
    f"{GAP}1. The main content and theme of the video."
    f"{GAP}2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    f"{GAP}3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    f"{GAP}4. background environment, light, style and atmosphere."
    f"{GAP}5. camera angles, movements, and transitions used in the video."
)


class Conditioning(NamedTuple):
    """Transformer inputs of a prompt.

    Attributes:
      context: The language model's states of the prompt's tokens and of trailing padding.
      mask: False for padding, which the transformer does not attend to.
      glyphs: ByT5's states of quoted text, then zeros.
      glyph_mask: False for the zeros.
    """

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]
    glyphs: Float[Array, "b m e"]
    glyph_mask: Bool[Array, "b m"]


class TokenIds(NamedTuple):
    """Token ids of each prompt's chat and of its quoted text, each with a mask that is False for trailing padding."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]
    glyphs: Int[Array, "b m"] | Int[np.ndarray, "b m"]
    glyph_mask: Bool[Array, "b m"] | Bool[np.ndarray, "b m"]


def quoted_text(prompt: str) -> str:
    """Returns ByT5's input for a prompt's quoted text, as diffusers' `extract_glyph_texts`; "" if nothing is quoted."""
    found = dict.fromkeys(straight or curly for straight, curly in QUOTED.findall(prompt))
    return "".join(f'Text "{text}". ' for text in found)


@dataclasses.dataclass(frozen=True)
class HunyuanVideo15(VideoChatFamily):
    """Networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      max_sequence_length: Tokens of a prompt and of the chat's suffix.
      default_guidance: Guidance scale of the folder's guider; 1 if it is not enabled.
    """

    transformer: hunyuan_video.HunyuanVideo15Transformer
    vae: autoencoder.AutoencoderKLHunyuanVideo15
    text_encoder: language_model.LanguageModel
    text_encoder_2: t5.T5EncoderModel
    tokenizer: Any
    tokenizer_2: Any  # ByT5Tokenizer
    scheduler: SchedulerConfig
    max_sequence_length: int = 1000
    default_guidance: float = 7.5

    pipeline: ClassVar = "HunyuanVideo15Pipeline"
    parts: ClassVar = {
        "transformer": hunyuan_video.TRANSFORMER,
        "vae": autoencoder.COMPONENT,
        "text_encoder": language_model.component(("Qwen2_5_VLTextModel",), (-3,)),
        "text_encoder_2": dataclasses.replace(t5.COMPONENT, tokenizer="ByT5Tokenizer"),
    }
    widths: ClassVar = (
        ("text_encoder", "hidden_size", "text_embed_dim"),
        ("text_encoder_2", "d_model", "text_embed_2_dim"),
        ("vae", "latent_channels", "out_channels"),
    )
    default_tokens: ClassVar = 1000
    template: ClassVar = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    dropped: ClassVar = 108
    masked: ClassVar[Mapping[str, str]] = {"context": "mask", "glyphs": "glyph_mask"}
    frozen: ClassVar = {"transformer": hunyuan_video.FROZEN}
    guidance: ClassVar[Guidance] = "classifier-free"
    lora_targets: ClassVar[str] = hunyuan_video.LORA_TARGETS
    # diffusers' pipeline has no `load_lora_weights`.
    lora_loader: ClassVar[str] = "transformer.load_lora_adapter({}, use_safetensors=True)"

    @classmethod
    def from_folder(cls, folder: pathlib.Path, *args: Any, **options: Any) -> Self:
        """Builds the family (see `PipelineFamily.from_folder`)."""
        family = super().from_folder(folder, *args, **options)
        return dataclasses.replace(family, default_guidance=read_guidance(folder))

    @classmethod
    def classes(cls, without: Sequence[str] = ()) -> dict[str, tuple[str | None, ...]]:
        """Returns the classes of the components (see `PipelineFamily.classes`) and of the guider."""
        return super().classes(without) | {GUIDER: ("diffusers", "ClassifierFreeGuidance")}

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the tokenizers; raises ValueError if one does not fit its text encoder or the template."""
        found = super().read_tokenizers(folder, configs, tokens)
        byt5 = tokenizers.read_byt5(folder / "tokenizer_2", configs["text_encoder_2"])
        return found | {"tokenizer_2": byt5}

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises ValueError if the transformer's input is not noise, an image and its mask."""
        config = configs["transformer"]
        if config.in_channels != 2 * config.out_channels + 1:
            raise ValueError(
                f"{folder / 'transformer' / 'config.json'}: in_channels must be {2 * config.out_channels + 1}, of "
                f"noise, an image and its mask, with out_channels {config.out_channels}, and is {config.in_channels}"
            )

    def _chats(self, prompts: Sequence[str]) -> list[str]:
        return super()._chats([prompt or " " for prompt in prompts])

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Returns token ids of each prompt's chat and of its quoted text, padded or truncated."""
        texts = [quoted_text(record["prompt"]) for record in records]
        ids, mask = tokenizers.padded(self.tokenizer_2, texts, hunyuan_video.GLYPH_TOKENS)
        quotes = np.array([text != "" for text in texts])
        return TokenIds(*super().tokenize(records), ids, mask & quotes[:, None])

    def is_truncated(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Returns which prompts have a chat or quoted text that exceeds its text encoder's input length."""
        limit = self.tokenizer_2, hunyuan_video.GLYPH_TOKENS
        longer = tokenizers.longer([limit], [quoted_text(prompt) for prompt in prompts])
        return super().is_truncated(prompts) | longer

    @exact_products
    def encode(self, params: Params, tokens: TokenIds) -> Conditioning:
        """Returns the states of each prompt's chat after the dropped tokens, and those of its quoted text."""
        of_chat = super().encode(params, Tokens(tokens.ids, tokens.mask))
        mask = jnp.asarray(tokens.glyph_mask)
        byt5 = {"params": params["text_encoder_2"]}
        # A prompt without quoted text has a token, whose state is not used, for a softmax without padding.
        read = mask.at[:, 0].set(True)
        states: Any = self.text_encoder_2.apply(byt5, tokens.glyphs, read)
        return Conditioning(*of_chat, jnp.where(mask[..., None], states, 0), mask)

    @property
    def factor(self) -> int:
        """Pixels along each side of a latent."""
        return self.vae.config.spatial_compression_ratio

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return 1

    @property
    def channels(self) -> int:
        """Channels of the latents, without those of an image and its mask."""
        return self.transformer.config.out_channels

    def default_size(self) -> Size:
        """Returns the default size of diffusers' pipeline, a 16:9 clip of as many pixels as the target size squared."""
        return SIZES[self.transformer.config.target_size]

    @exact_products
    def decode(
        self, params: Params, latents: Float[Array, "b t h w c"]
    ) -> Float[Array, "b T H W 3"]:
        """Returns clips in [0, 1], decoded one frame of latents at a time."""
        return autoencoder.decode_clips(self.vae, params["vae"], latents)


def read_guidance(folder: pathlib.Path) -> float:
    """Returns the guidance scale of a pipeline's guider, or 1 if it is not enabled.

    Raises:
      ValueError: the guider's file is missing, or has an unsupported value.
    """
    path = folder / GUIDER / "guider_config.json"
    config = read_json(path)
    for name, only in FIXED.items():
        if config.get(name, only) != only:
            raise ValueError(f"{path}: {name} must be {only} but is {json.dumps(config[name])}")
    scale = config.get("guidance_scale", HunyuanVideo15.default_guidance)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1000:
        raise ValueError(
            f"{path}: guidance_scale must be a positive number but is {json.dumps(scale)}"
        )
    return float(scale) if config.get("enabled", True) else 1.0
