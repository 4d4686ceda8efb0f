"""Qwen-Image as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is put into a chat with Qwen2.5-VL, whose last states, without those of the chat's beginning, condition the
transformer. Qwen-Image-2512 is the same network with other weights.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.attention.kernels import Heads
from digen_jax.checkpoints import folder as weights
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.models.autoencoders import autoencoder_wan
from digen_jax.models.family import Guidance, Params, Record, Size, check_image
from digen_jax.models.image_family import ImageFamily, check_tokens, check_widths, shapes_of
from digen_jax.models.layers import SIDE, pack, unpack
from digen_jax.models.linear import exact_products
from digen_jax.models.qwen_image import network as qwen_image
from digen_jax.models.remat import Remat
from digen_jax.models.text import language_model, tokenizers
from digen_jax.models.text.language_model import LanguageModelConfig
from digen_jax.models.text.tokenizers import longer, padded

PIPELINE_CLASS = "QwenImagePipeline"
# (library, class) of each component, as diffusers' model_index.json names them.
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "QwenImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLQwenImage"),
}
# Readers of the JSON files of networks and scheduler.
READERS = {
    "transformer": qwen_image.QwenImageConfig.from_config,
    "vae": autoencoder_wan.AutoencoderKLWanConfig.from_config,
    "text_encoder": LanguageModelConfig.from_config,
    "scheduler": SchedulerConfig.from_config,
}
# The chat of diffusers' pipeline, and the first tokens of it whose states it drops.
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
DROPPED = 34
# The default of `max_sequence_length` in diffusers' pipeline, and the most that it allows.
TEXT_TOKENS, MOST_TOKENS = 512, 1024
# The prompt of the pass without one: QwenLM/Qwen-Image, README.md, and verl-project/verl-omni,
# examples/flowgrpo_trainer/data_process/qwenimage_ocr.py (340b365).
NULL = " "
# Latents along each side of the images of diffusers' pipeline by default.
SAMPLE_SIZE = 128


class Conditioning(NamedTuple):
    """The transformer's inputs from a prompt.

    Attributes:
      context: states of its tokens, and of padding behind them.
      mask: False for the padding, which the transformer does not attend to.
    """

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]


class Tokens(NamedTuple):
    """The ids of each prompt's chat, and False for the padding behind them."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]


@dataclasses.dataclass(frozen=True)
class QwenImage(ImageFamily):
    """The networks and the tokenizer of one pipeline folder; parameters are passed to each call.

    `params` is a dict with one tree for each component: "transformer", "vae" and "text_encoder".

    Attributes:
      max_sequence_length: tokens of a prompt, and of the chat's end behind it.
    """

    transformer: qwen_image.QwenImageTransformer
    vae: autoencoder_wan.AutoencoderKLWan
    text_encoder: language_model.LanguageModel
    tokenizer: Any
    scheduler: SchedulerConfig
    max_sequence_length: int = TEXT_TOKENS

    encoders: ClassVar = {"text_encoder": "tokenizer"}
    masked: ClassVar = {"context": "mask"}
    # The pipeline's guidance_scale is for distilled models, of which none is published.
    guidance: ClassVar[Guidance] = "classifier-free"
    # Each module knows which of its children its checkpoint numbers.
    lists: ClassVar = {
        "transformer": qwen_image.LISTS,
        "vae": autoencoder_wan.LISTS,
        "text_encoder": language_model.LISTS,
    }
    tables: ClassVar = {
        "transformer": qwen_image.AXES,
        "vae": autoencoder_wan.AXES,
        "text_encoder": language_model.AXES,
    }
    # Defaults of diffusers' pipeline, whose name for the guidance is true_cfg_scale.
    default_steps: ClassVar[int] = 50
    default_guidance: ClassVar[float] = 4.0
    negative_prompt: ClassVar[str] = NULL
    encoded_prompts: ClassVar[int] = 16
    lora_targets: ClassVar[str] = qwen_image.LORA_TARGETS
    ignored: ClassVar = {"text_encoder": language_model.IGNORED}
    renamed: ClassVar = {"text_encoder": language_model.canonical_name}

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        without: Sequence[str] = (),
        max_sequence_length: int = 0,
    ) -> "QwenImage":
        """The architecture of a diffusers pipeline folder; reads only its JSON files and the tokenizer.

        Args:
          folder: the pipeline's.
          dtype: of the arithmetic of the transformer and the text encoder; the autoencoder's is always float32.
          remat: what the transformer's backward pass recomputes.
          without: components that are left out; there are none that can be.
          max_sequence_length: tokens of a prompt; 0: as many as in diffusers' pipeline.

        Raises:
          ValueError: names the file that is missing, broken, has another class, or does not fit the others, or a
            `max_sequence_length` that diffusers' pipeline refuses.
        """
        check_tokens(max_sequence_length, MOST_TOKENS, "the most that Qwen-Image reads of a prompt")
        configs = weights.read_configs(folder, COMPONENTS, READERS)
        network, encoder, vae = (configs[part] for part in ("transformer", "text_encoder", "vae"))
        channels, width = network.in_channels // SIDE**2, network.joint_attention_dim
        check_widths(
            folder,
            (
                ("text_encoder", "hidden_size", encoder.hidden_size, "joint_attention_dim", width),
                ("vae", "z_dim", vae.z_dim, "in_channels / 4", channels),
                ("transformer", "out_channels", network.out_channels, "in_channels / 4", channels),
            ),
        )
        tokens = max_sequence_length or TEXT_TOKENS
        return cls(
            transformer=qwen_image.QwenImageTransformer(network, dtype=dtype, remat=remat),
            vae=autoencoder_wan.AutoencoderKLWan(vae),
            text_encoder=language_model.LanguageModel(encoder, dtype=dtype),
            tokenizer=tokenizers.read_language_model(
                folder / "tokenizer",
                encoder,
                tokens + DROPPED,
                head=(TEMPLATE.partition("{}")[0], DROPPED),
            ),
            scheduler=configs["scheduler"],
            max_sequence_length=tokens,
        )

    @property
    def heads(self) -> Heads:
        """Those of the transformer."""
        config = self.transformer.config
        return Heads(config.num_attention_heads, config.attention_head_dim)

    # ---------------------------------------------------------------- prompts -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """Ids of each prompt's chat, padded or truncated."""
        chats = [TEMPLATE.format(record["prompt"]) for record in records]
        return Tokens(*padded(self.tokenizer, chats, self._chat_tokens))

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Whose chats have more tokens than the text encoder's input, so that `tokenize` truncates them."""
        chats = [TEMPLATE.format(prompt) for prompt in prompts]
        return longer([(self.tokenizer, self._chat_tokens)], chats)

    @property
    def _chat_tokens(self) -> int:
        """Of a chat with its beginning.

        The pipeline truncates to `MOST_TOKENS` first, and then states to `max_sequence_length`, which depend on the
        tokens before them alone.
        """
        return DROPPED + self.max_sequence_length

    @exact_products
    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """The states of each prompt's chat behind its beginning, and which of them are not padding."""
        (states,) = self.text_encoder.apply({"params": params["text_encoder"]}, *tokens)
        return Conditioning(states[:, DROPPED:], jnp.asarray(tokens.mask)[:, DROPPED:])

    # ---------------------------------------------------------------- the network

    @exact_products
    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        conditioning: Conditioning,
        guidance: float | None = None,
    ) -> Float32[Array, "b h w c"]:
        """The transformer's velocity; `variables["transformer"]` are its linen collections."""
        return self.transformer.apply(variables["transformer"], x, sigma, *conditioning)

    def guided(
        self,
        null: Float[Array, "b h w c"],
        prompt: Float[Array, "b h w c"],
        guidance: float,
    ) -> Float[Array, "b h w c"]:
        """Null + guidance (prompt - null), with each token as long as that of `prompt`, as in diffusers' pipeline."""
        v = null + guidance * (prompt - null)
        of_prompt, of_v = _length(prompt), _length(v)
        scale = jnp.where(of_v > 0, of_prompt / jnp.where(of_v > 0, of_v, 1), 1)
        _, height, width, _ = v.shape
        return v * unpack(jnp.repeat(scale, SIDE**2, axis=-1), height, width)

    # ---------------------------------------------------------------- latents <-> images

    def default_size(self) -> Size:
        """The default size of diffusers' pipeline."""
        return Size(SAMPLE_SIZE * self.factor, SAMPLE_SIZE * self.factor)

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The scheduler's, from 1 to 1/steps before the shift, which depends on the tokens of an image.

        One step is refused where there is a terminal shift: diffusers' sigmas are not numbers then.
        """
        h, w, _ = self.latent_shape(size)
        tokens = h * w // SIDE**2
        return make_sigmas(self.scheduler, steps, tokens, "uniform")

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(h, w, c) of the latents of an image, whose sides must be multiples of a token's."""
        check_image(size, self.factor * SIDE)
        return size.height // self.factor, size.width // self.factor, self.vae.config.z_dim

    @property
    def factor(self) -> int:
        """Pixels of a latent along each side."""
        return self.vae.config.side_factor

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Images in [0, 1], each a clip of one frame."""
        return autoencoder_wan.decode_images(self.vae, params["vae"], latents)

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of the transformer by stream: see `qwen_image.forward_flops`."""
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": qwen_image.forward_flops(config, latent, self.max_sequence_length)}

    # ---------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        return shapes_of(_init, self.transformer, self.vae, self.text_encoder)


def _length(v: Float[Array, "b h w c"]) -> Float[Array, "b n 1"]:
    """The length of each token; a token of zeros has the gradient 0."""
    squares = jnp.square(pack(v)).sum(axis=-1, keepdims=True)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def _init(transformer: Any, vae: Any, text_encoder: Any, key: Array) -> Params:
    keys = jax.random.split(key, 3)
    config, side = transformer.config, vae.config.side_factor
    x = jnp.zeros((1, SIDE, SIDE, config.in_channels // SIDE**2))
    context, mask = jnp.zeros((1, 2, config.joint_attention_dim)), jnp.ones((1, 2), bool)
    clips = jnp.zeros((1, 1, side, side, vae.config.in_channels))
    ids = jnp.zeros((1, 2), jnp.int32)
    return {
        "transformer": transformer.init(keys[0], x, jnp.ones(1), context, mask)["params"],
        "vae": vae.init(keys[1], clips, method="reconstruct")["params"],
        "text_encoder": text_encoder.init(keys[2], ids, mask)["params"],
    }
