"""Stable Diffusion 3 / 3.5 as a family: prompts -> conditioning, velocity, latents -> images.

The context of a prompt is that of both CLIPs and, behind it, that of the T5. Without a T5 zero tokens are in its
place, as in `StableDiffusion3Pipeline(text_encoder_3=None, tokenizer_3=None)`.
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
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.family import Guidance, Params, Record, Size, check_image
from digen_jax.models.image_family import ImageFamily, check_tokens, check_widths, shapes_of
from digen_jax.models.linear import exact_products
from digen_jax.models.remat import Remat
from digen_jax.models.sd3 import network as sd3
from digen_jax.models.text import clip_text, t5, tokenizers
from digen_jax.models.text.tokenizers import longer, padded

PIPELINE_CLASS = "StableDiffusion3Pipeline"
# (library, class) of each component, as diffusers' model_index.json names them. A model may have no T5.
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": (None, None),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "tokenizer_3": (None, None),
    "transformer": ("diffusers", "SD3Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
T5_COMPONENTS = {
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer_3": ("transformers", "T5Tokenizer"),
}
# Readers of the JSON files of networks and scheduler.
READERS = {
    "transformer": sd3.SD3Config.from_config,
    "vae": autoencoder_kl.AutoencoderKLConfig.from_config,
    "text_encoder": clip_text.CLIPTextConfig.from_config,
    "text_encoder_2": clip_text.CLIPTextConfig.from_config,
    "scheduler": SchedulerConfig.from_config,
}
T5_READERS = {"text_encoder_3": t5.T5Config.from_config}
# The T5's tokens, or zero tokens in their place: the default of `max_sequence_length` in diffusers' pipeline.
T5_TOKENS = 256
# The most that diffusers' pipeline allows.
MOST_TOKENS = 512


class Conditioning(NamedTuple):
    """The transformer's inputs from a prompt."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """The ids of each prompt from all tokenizers."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    third: Int[Array, "b m"] | Int[np.ndarray, "b m"] | None = None  # None: there is no T5


@dataclasses.dataclass(frozen=True)
class StableDiffusion3(ImageFamily):
    """The networks and tokenizers of one pipeline folder; parameters are passed to each call.

    `params` is a dict with one tree for each component: "transformer", "vae", "text_encoder", "text_encoder_2", and
    with a T5 "text_encoder_3".
    """

    transformer: sd3.SD3Transformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoders: tuple[
        clip_text.CLIPTextModelWithProjection, clip_text.CLIPTextModelWithProjection
    ]
    tokenizers: tuple[Any, Any]  # CLIPTokenizer each
    scheduler: SchedulerConfig
    text_encoder_3: t5.T5EncoderModel | None = None
    tokenizer_3: Any = None  # T5Tokenizer
    # The T5's tokens, or the zero tokens in their place.
    max_sequence_length: int = T5_TOKENS

    # The repositories of 3.5 contain second copies of all text encoders in `text_encoders`.
    unused: ClassVar[tuple[str, ...]] = ("text_encoders",)
    optional: ClassVar[tuple[str, ...]] = ("text_encoder_3",)
    guidance: ClassVar[Guidance] = "classifier-free"
    # Each module knows which of its children its checkpoint numbers.
    lists: ClassVar = {
        "transformer": sd3.LISTS,
        "vae": autoencoder_kl.LISTS,
        "text_encoder": clip_text.LISTS,
        "text_encoder_2": clip_text.LISTS,
        "text_encoder_3": t5.LISTS,
    }
    tables: ClassVar = {
        "transformer": sd3.AXES,
        "vae": autoencoder_kl.AXES,
        "text_encoder": clip_text.AXES,
        "text_encoder_2": clip_text.AXES,
        "text_encoder_3": t5.AXES,
    }
    # Defaults of diffusers' pipeline.
    default_steps: ClassVar[int] = 28
    default_guidance: ClassVar[float] = 7.0
    encoded_prompts: ClassVar[int] = 64
    # Parameters that no optimizer may change.
    frozen: ClassVar = {"transformer": sd3.FROZEN}
    lora_targets: ClassVar[str] = sd3.LORA_TARGETS
    ignored: ClassVar = {
        "text_encoder": clip_text.IGNORED,
        "text_encoder_2": clip_text.IGNORED,
        "text_encoder_3": t5.IGNORED,
    }

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        without: Sequence[str] = (),
        max_sequence_length: int = 0,
    ) -> "StableDiffusion3":
        """The architecture of a diffusers pipeline folder; reads only its JSON files and tokenizers.

        Args:
          folder: the pipeline's.
          dtype: of the arithmetic, see `from_configs`.
          remat: what the transformer's backward pass recomputes.
          without: components that are left out, of `optional`.
          max_sequence_length: tokens of the T5, or zero tokens in their place; 0: as many as in diffusers' pipeline.

        Raises:
          ValueError: names the file that is missing, broken, has another class, or does not fit the others, or a
            `max_sequence_length` that diffusers' pipeline refuses.
        """
        check_tokens(
            max_sequence_length, MOST_TOKENS, "the most that Stable Diffusion 3 reads of a prompt"
        )
        has_t5 = "text_encoder_3" not in without and _names_t5(folder)
        components = COMPONENTS | T5_COMPONENTS if has_t5 else COMPONENTS
        configs = weights.read_configs(
            folder, components, READERS | T5_READERS if has_t5 else READERS
        )
        clips = tuple(
            tokenizers.read_clip(folder / part, configs[encoder])
            for part, encoder in (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2"))
        )
        length = clips[0].model_max_length
        longest = configs["text_encoder_2"].max_position_embeddings
        if length > longest:
            raise ValueError(
                f"{folder / 'tokenizer' / 'tokenizer_config.json'}: model_max_length must be at most {longest}, the "
                f"positions of text_encoder_2, which reads as many tokens, and is {length}"
            )
        family = cls._of(configs, clips, dtype, remat)
        family = dataclasses.replace(family, max_sequence_length=max_sequence_length or T5_TOKENS)
        return family._with_t5(folder, configs["text_encoder_3"], dtype) if has_t5 else family

    def _with_t5(self, folder: pathlib.Path, config: t5.T5Config, dtype: Any) -> "StableDiffusion3":
        width = self.transformer.config.joint_attention_dim
        fitting = ("text_encoder_3", "d_model", config.d_model, "joint_attention_dim", width)
        check_widths(folder, [fitting])
        return dataclasses.replace(
            self,
            text_encoder_3=t5.T5EncoderModel(config, dtype=dtype),
            tokenizer_3=tokenizers.read_t5(folder / "tokenizer_3", config),
        )

    @classmethod
    def from_configs(
        cls,
        configs: dict[str, dict],
        tokenizers: tuple[Any, Any],
        dtype: Any = jnp.float32,
        remat: Remat = "none",
    ) -> "StableDiffusion3":
        """The architecture without a T5 from each component's config.json, by the component's name.

        `dtype` is the compute dtype of the transformer and the text encoders; the autoencoder always runs in float32,
        because it overflows in half precision.
        """
        read = {part: reader(configs[part]) for part, reader in READERS.items()}
        return cls._of(read, tokenizers, dtype, remat)

    @classmethod
    def _of(
        cls, configs: dict[str, Any], tokenizers: tuple[Any, Any], dtype: Any, remat: Remat
    ) -> "StableDiffusion3":
        """Builds the family from the results of `READERS`."""
        return cls(
            transformer=sd3.SD3Transformer(configs["transformer"], dtype=dtype, remat=remat),
            vae=autoencoder_kl.AutoencoderKL(configs["vae"], dtype=jnp.float32),
            text_encoders=tuple(
                clip_text.CLIPTextModelWithProjection(configs[part], dtype=dtype)
                for part in ("text_encoder", "text_encoder_2")
            ),
            tokenizers=tokenizers,
            scheduler=configs["scheduler"],
        )

    @property
    def heads(self) -> Heads:
        """Those of the transformer; a token that stands for the zero tokens has a weight."""
        config = self.transformer.config
        weighted = self.null_tokens > 0
        return Heads(config.num_attention_heads, config.attention_head_dim, weighted=weighted)

    @property
    def null_tokens(self) -> int:
        """The zero tokens in the place of a T5's."""
        return self.max_sequence_length if self.text_encoder_3 is None else 0

    # ---------------------------------------------------------------- prompts -> conditioning

    @property
    def encoders(self) -> dict[str, str]:
        """The text encoders, each with the folder of its tokenizer."""
        both = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
        return both if self.text_encoder_3 is None else both | {"text_encoder_3": "tokenizer_3"}

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Ids, padded or truncated to each text encoder's length."""
        prompts = [record["prompt"] for record in records]
        return TokenIds(*(padded(tokenizer, prompts, n)[0] for tokenizer, n in self._lengths()))

    def _lengths(self) -> list[tuple[Any, int]]:
        """Each tokenizer with the number of tokens that its text encoder reads."""
        # As in diffusers' pipeline both CLIPs read as many tokens as the first tokenizer says.
        length = self.tokenizers[0].model_max_length
        lengths = [(tokenizer, length) for tokenizer in self.tokenizers]
        if self.text_encoder_3 is None:
            return lengths
        return [*lengths, (self.tokenizer_3, self.max_sequence_length)]

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Which prompts have more tokens than a text encoder's input, so that `tokenize` truncates them."""
        return longer(self._lengths(), prompts)

    @exact_products
    def encode(self, params: Params, ids: TokenIds) -> Conditioning:
        """The context and the pooled embeddings, which are those of both CLIPs side by side.

        In the context the CLIPs' penultimate states lie side by side, with zeros up to the joint width; behind these
        tokens are the T5's, padding included, which diffusers' pipeline does not mask.
        """
        states, pooled = zip(
            *(
                encoder.apply({"params": params[part]}, part_ids)
                for encoder, part, part_ids in zip(
                    self.text_encoders, ("text_encoder", "text_encoder_2"), ids[:2], strict=True
                )
            ),
            strict=True,
        )
        context = jnp.concatenate(states, axis=-1)
        missing = self.transformer.config.joint_attention_dim - context.shape[-1]
        context = jnp.pad(context, ((0, 0), (0, 0), (0, missing)))
        if self.text_encoder_3 is not None:
            states = self.text_encoder_3.apply({"params": params["text_encoder_3"]}, ids.third)
            context = jnp.concatenate([context, states], axis=1)
        return Conditioning(context, jnp.concatenate(pooled, axis=-1))

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
        network = variables["transformer"]
        return self.transformer.apply(
            network, x, sigma, *conditioning, null_tokens=self.null_tokens
        )

    def guided(
        self,
        null: Float[Array, "b h w c"],
        prompt: Float[Array, "b h w c"],
        guidance: float,
    ) -> Float[Array, "b h w c"]:
        """Null + guidance (prompt - null)."""
        return null + guidance * (prompt - null)

    # ---------------------------------------------------------------- latents <-> images

    def default_size(self) -> Size:
        """The size of the images that the transformer was made for, as in diffusers' pipeline."""
        side = self.transformer.config.sample_size * self.factor
        return Size(side, side)

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The scheduler's; a dynamic shift depends on the tokens of an image, as in diffusers' pipeline."""
        h, w, _ = self.latent_shape(size)
        tokens = h * w // self.transformer.config.patch_size**2
        return make_sigmas(self.scheduler, steps, tokens)

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(h, w, c) of the latents of an image.

        The sides must be multiples of the autoencoder's factor times the patch, and fit the position table.
        """
        config = self.transformer.config
        multiple = self.factor * config.patch_size
        check_image(size, multiple, multiple * config.pos_embed_max_size)
        return size.height // self.factor, size.width // self.factor, config.in_channels

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of the transformer by stream: see `sd3.forward_flops`."""
        # One token stands for the zero tokens.
        third = 1 if self.null_tokens else self.max_sequence_length
        text = self.tokenizers[0].model_max_length + third
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": sd3.forward_flops(config, latent, text)}

    # ---------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        networks = (self.transformer, self.vae, self.text_encoders, self.text_encoder_3)
        return shapes_of(_init, *networks)

    def init(self, key: Array) -> Params:
        """Fresh random parameters of every component, for training from scratch."""
        return _init(self.transformer, self.vae, self.text_encoders, self.text_encoder_3, key)


def _names_t5(folder: pathlib.Path) -> bool:
    """Whether a pipeline's model_index.json names a T5.

    Raises:
      ValueError: it does, but the folder has none.
    """
    named = weights.read_model_index(folder).get("text_encoder_3") not in (None, [None, None])
    if named and not (folder / "text_encoder_3").is_dir():
        raise ValueError(
            f"{folder / 'text_encoder_3'} is missing, but model_index.json names it: add the folder, or leave it out "
            "by model.without in a recipe, or by [null, null] in its place in model_index.json"
        )
    return named


def _init(
    transformer: Any, vae: Any, text_encoders: tuple[Any, Any], third: Any, key: Array
) -> Params:
    keys = jax.random.split(key, 4)
    config = transformer.config
    x = jnp.zeros((1, 2 * config.patch_size, 2 * config.patch_size, config.in_channels))
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    pooled = jnp.zeros((1, config.pooled_projection_dim))
    factor = 2 ** len(vae.config.block_out_channels)
    images = jnp.zeros((1, factor, factor, 3))
    ids = jnp.zeros((1, 2), jnp.int32)
    params = {
        "transformer": transformer.init(keys[0], x, jnp.ones(1), context, pooled)["params"],
        "vae": vae.init(keys[1], images, method="reconstruct")["params"],
        "text_encoder": text_encoders[0].init(keys[2], ids)["params"],
        "text_encoder_2": text_encoders[1].init(keys[3], ids)["params"],
    }
    if third is not None:
        params["text_encoder_3"] = third.init(jax.random.fold_in(key, 3), ids)["params"]
    return params
