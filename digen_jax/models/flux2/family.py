"""FLUX.2 klein as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is a user's turn of a chat with Qwen3, whose states of three depths side by side condition the transformer,
padding included. The base models are guided by a second pass with the empty prompt, the distilled ones are not. Images
to edit, which the pipeline also takes, are not supported.
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
from digen_jax.diffusion.schedule import SchedulerConfig
from digen_jax.models.autoencoders import autoencoder_flux2, autoencoder_kl
from digen_jax.models.family import Guidance, Params, Record, Size, check_image
from digen_jax.models.flux2 import network as flux2
from digen_jax.models.flux2 import schedule
from digen_jax.models.flux2.network import Flux2Config
from digen_jax.models.image_family import ImageFamily, check_widths, shapes_of
from digen_jax.models.linear import exact_products
from digen_jax.models.remat import Remat
from digen_jax.models.text import language_model, tokenizers
from digen_jax.models.text.language_model import LanguageModelConfig
from digen_jax.models.text.tokenizers import longer, padded

PIPELINE_CLASS = "Flux2KleinPipeline"
# (library, classes) of each component, as diffusers' model_index.json names them.
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen3ForCausalLM", "Qwen3Model"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "Flux2Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLFlux2"),
}
# Readers of the JSON files of networks and scheduler.
READERS = {
    "transformer": Flux2Config.from_config,
    "vae": autoencoder_flux2.AutoencoderKLFlux2Config.from_config,
    "text_encoder": LanguageModelConfig.from_config,
    "scheduler": SchedulerConfig.from_config,
}
# `text_encoder_out_layers` and `max_sequence_length` of diffusers' pipeline by default.
STATES = (9, 18, 27)
TEXT_TOKENS = 512
# Latents of the autoencoder along each side of a token.
PATCH = 2


class Conditioning(NamedTuple):
    """The transformer's input from a prompt: states of its tokens and of padding behind them, all attended to."""

    context: Float[Array, "b n d"]


class Tokens(NamedTuple):
    """The ids of each prompt's chat, and False for the padding behind them."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]


@dataclasses.dataclass(frozen=True)
class Flux2Klein(ImageFamily):
    """The networks and the tokenizer of one pipeline folder; parameters are passed to each call.

    `params` is a dict with one tree for each component: "transformer", "vae" and "text_encoder".

    Attributes:
      distilled: `is_distilled` of model_index.json: the model is not guided.
      max_sequence_length: tokens of a prompt's chat, those of the template included.
    """

    transformer: flux2.Flux2Transformer
    vae: autoencoder_flux2.AutoencoderKLFlux2
    text_encoder: language_model.LanguageModel
    tokenizer: Any
    scheduler: SchedulerConfig
    distilled: bool = False
    max_sequence_length: int = TEXT_TOKENS

    encoders: ClassVar = {"text_encoder": "tokenizer"}
    # Each module knows which of its children its checkpoint numbers.
    lists: ClassVar = {
        "transformer": flux2.LISTS,
        "vae": autoencoder_kl.LISTS,
        "text_encoder": language_model.LISTS,
    }
    tables: ClassVar = {
        "transformer": flux2.AXES,
        "vae": autoencoder_flux2.AXES,
        "text_encoder": language_model.AXES,
    }
    # Of diffusers' pipeline; the makers of the distilled models sample them in 4.
    default_steps: ClassVar[int] = 50
    encoded_prompts: ClassVar[int] = 16
    lora_targets: ClassVar[str] = flux2.LORA_TARGETS
    renamed: ClassVar = {"text_encoder": language_model.canonical_name}

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        without: Sequence[str] = (),
        max_sequence_length: int = 0,
    ) -> "Flux2Klein":
        """The architecture of a diffusers pipeline folder; reads only its JSON files and the tokenizer.

        Args:
          folder: the pipeline's.
          dtype: of the arithmetic of the transformer and the text encoder; the autoencoder's is always float32.
          remat: what the transformer's backward pass recomputes.
          without: components that are left out; there are none that can be.
          max_sequence_length: tokens of a prompt's chat; 0: as many as in diffusers' pipeline.

        Raises:
          ValueError: names the file that is missing, broken, has another class, or does not fit the others.
        """
        configs = weights.read_configs(folder, COMPONENTS, READERS)
        network, encoder, vae = (configs[part] for part in ("transformer", "text_encoder", "vae"))
        text, channels = network.joint_attention_dim, network.in_channels
        check_widths(
            folder,
            (
                ("text_encoder", "hidden_size times 3", len(STATES) * encoder.hidden_size, "joint_attention_dim", text),
                ("vae", "latent_channels times 4", PATCH**2 * vae.latent_channels, "in_channels", channels),
                ("transformer", "out_channels", network.out_channels, "in_channels", channels),
            ),
        )  # fmt: skip
        if encoder.num_hidden_layers < max(STATES):
            raise ValueError(
                f"{folder / 'text_encoder' / 'config.json'}: num_hidden_layers must be {max(STATES)} or more, as the "
                f"states of layers {', '.join(map(str, STATES))} are read, and is {encoder.num_hidden_layers}"
            )
        tokens = max_sequence_length or TEXT_TOKENS
        return cls(
            transformer=flux2.Flux2Transformer(network, dtype=dtype, remat=remat),
            vae=autoencoder_flux2.AutoencoderKLFlux2(vae, dtype=jnp.float32),
            text_encoder=language_model.LanguageModel(encoder, STATES, dtype=dtype),
            tokenizer=tokenizers.read_language_model(
                folder / "tokenizer", encoder, tokens, chats=True
            ),
            scheduler=configs["scheduler"],
            distilled=_is_distilled(folder),
            max_sequence_length=tokens,
        )

    @property
    def guidance(self) -> Guidance:
        """Two passes, or none for a distilled model."""
        return "none" if self.distilled else "classifier-free"

    @property
    def default_guidance(self) -> float:
        """That of diffusers' pipeline, which a distilled model ignores."""
        return 1.0 if self.distilled else 4.0

    @property
    def heads(self) -> Heads:
        """Those of the transformer."""
        config = self.transformer.config
        return Heads(config.num_attention_heads, config.attention_head_dim)

    # ---------------------------------------------------------------- prompts -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """Ids of each prompt's chat, padded or truncated."""
        texts = self._chats([record["prompt"] for record in records])
        return Tokens(*padded(self.tokenizer, texts, self.max_sequence_length))

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Whose chats have more tokens than the text encoder's input, so that `tokenize` truncates them."""
        return longer([(self.tokenizer, self.max_sequence_length)], self._chats(prompts))

    def _chats(self, prompts: Sequence[str]) -> list[str]:
        return tokenizers.chat(self.tokenizer, prompts, thinking=False)

    @exact_products
    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """The states of each prompt's chat at three depths, side by side."""
        states = self.text_encoder.apply({"params": params["text_encoder"]}, *tokens)
        return Conditioning(jnp.concatenate(states, axis=-1))

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
        """Null + guidance (prompt - null), diffusers' `guidance_scale`."""
        return null + guidance * (prompt - null)

    # ---------------------------------------------------------------- latents <-> images

    def default_size(self) -> Size:
        """The default of diffusers' pipeline."""
        return Size(1024, 1024)

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(h, w, c) of an image's latents, one a token; the sides must be multiples of its pixels."""
        multiple = self.factor * PATCH
        check_image(size, multiple)
        channels = self.transformer.config.in_channels
        return size.height // multiple, size.width // multiple, channels

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The scheduler's, with the pipeline's own shift: see `schedule`."""
        h, w, _ = self.latent_shape(size)
        return schedule.sigmas(self.scheduler, steps, h * w)

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Images in [0, 1], each a clip of one frame."""
        return autoencoder_flux2.decode_images(self.vae, params["vae"], latents)[:, None]

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of the transformer by stream: see `flux2.forward_flops`."""
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": flux2.forward_flops(config, latent, self.max_sequence_length)}

    # ---------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        return shapes_of(_init, self.transformer, self.vae, self.text_encoder)

    @property
    def ignored(self) -> dict[str, tuple[str, ...]]:
        """What is not read of the files of text encoder and autoencoder."""
        encoder = self.text_encoder
        return {
            "text_encoder": language_model.unused(encoder.config, encoder.states),
            "vae": autoencoder_flux2.IGNORED,
        }


def _is_distilled(folder: pathlib.Path) -> bool:
    """Whether model_index.json says so; diffusers leaves the field out where it is false."""
    found = weights.read_model_index(folder).get("is_distilled", False)
    if not isinstance(found, bool):
        raise ValueError(
            f"{folder / weights.INDEX}: is_distilled must be true or false, not {found!r}"
        )
    return found


def _init(transformer: Any, vae: Any, text_encoder: Any, key: Array) -> Params:
    keys = jax.random.split(key, 3)
    config = transformer.config
    x, context = (
        jnp.zeros((1, 1, 1, config.in_channels)),
        jnp.zeros((1, 2, config.joint_attention_dim)),
    )
    factor = 2 ** len(vae.config.block_out_channels)
    images = jnp.zeros((1, factor, factor, 3))
    ids, mask = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool)
    return {
        "transformer": transformer.init(keys[0], x, jnp.ones(1), context)["params"],
        "vae": vae.init(keys[1], images, method="reconstruct")["params"],
        "text_encoder": text_encoder.init(keys[2], ids, mask)["params"],
    }
