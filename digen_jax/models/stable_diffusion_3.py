"""Stable Diffusion 3 / 3.5 as a family: prompts -> conditioning, velocity, latents -> images.

The pipeline without its T5, as `StableDiffusion3Pipeline(text_encoder_3=None, tokenizer_3=None)` runs it: the two
CLIP encoders give the context, and 256 zero tokens replace the T5's.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.attention.kernels import Heads
from digen_jax.flow.schedule import SchedulerConfig, make_sigmas
from digen_jax.models import autoencoder_kl, clip_text, clip_tokenizer, sd3, sd3_flops
from digen_jax.models.family import Guidance, Params, Record, Size
from digen_jax.models.logical_axes import logical_axes
from digen_jax.models.precision import exact_products
from digen_jax.models.remat import Remat
from digen_jax.weights import folder as weights

PIPELINE_CLASS = "StableDiffusion3Pipeline"
# (library, class) of each component, as diffusers' model_index.json names them; the T5 is not used.
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
# Readers of the JSON files of networks and scheduler.
READERS = {
    "transformer": sd3.SD3Config.from_config,
    "vae": autoencoder_kl.AutoencoderKLConfig.from_config,
    "text_encoder": clip_text.CLIPTextConfig.from_config,
    "text_encoder_2": clip_text.CLIPTextConfig.from_config,
    "scheduler": SchedulerConfig.from_config,
}
# The tokens that diffusers' pipeline appends to the context instead of a T5's: `max_sequence_length` zero tokens.
T5_TOKENS = 256


class Conditioning(NamedTuple):
    """The transformer's inputs from a prompt."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """The ids of each prompt from both tokenizers."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b n"] | Int[np.ndarray, "b n"]


@dataclasses.dataclass(frozen=True)
class StableDiffusion3:
    """The networks and tokenizers of one pipeline folder; parameters are passed to each call.

    `params` is a dict with one tree for each component: "transformer", "vae", "text_encoder", "text_encoder_2".
    """

    transformer: sd3.SD3Transformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoders: tuple[
        clip_text.CLIPTextModelWithProjection, clip_text.CLIPTextModelWithProjection
    ]
    tokenizers: tuple[Any, Any]  # CLIPTokenizer each
    scheduler: SchedulerConfig

    trained: ClassVar[tuple[str, ...]] = ("transformer",)
    # The repositories of 3.5 contain second copies of all text encoders in `text_encoders`.
    unused: ClassVar[tuple[str, ...]] = ("text_encoder_3", "tokenizer_3", "text_encoders")
    guidance: ClassVar[Guidance] = "classifier-free"
    # Each module knows which of its children its checkpoint numbers.
    lists: ClassVar = {
        "transformer": sd3.LISTS,
        "vae": autoencoder_kl.LISTS,
        "text_encoder": clip_text.LISTS,
        "text_encoder_2": clip_text.LISTS,
    }
    tables: ClassVar = {
        "transformer": sd3.AXES,
        "vae": autoencoder_kl.AXES,
        "text_encoder": clip_text.AXES,
        "text_encoder_2": clip_text.AXES,
    }
    # Defaults of diffusers' pipeline.
    default_steps: ClassVar[int] = 28
    default_guidance: ClassVar[float] = 7.0
    encoded_prompts: ClassVar[int] = 64
    # Four images of 1024 x 1024.
    decoded_pixels: ClassVar[int] = 2**22
    # Parameters that no optimizer may change.
    frozen: ClassVar = {"transformer": sd3.FROZEN}
    lora_targets: ClassVar[str] = sd3.LORA_TARGETS
    ignored: ClassVar = {"text_encoder": clip_text.IGNORED, "text_encoder_2": clip_text.IGNORED}

    @classmethod
    def from_folder(
        cls, folder: pathlib.Path, dtype: Any = jnp.float32, remat: Remat = "none"
    ) -> "StableDiffusion3":
        """The architecture of a diffusers pipeline folder; reads only its JSON files and tokenizers.

        Raises:
          ValueError: names the file that is missing, broken, has another class, or does not fit the others.
        """
        weights.check_classes(folder, COMPONENTS)
        configs = {
            part: weights.read_component(folder, part, COMPONENTS[part][1], read)
            for part, read in READERS.items()
        }
        tokenizers = tuple(
            clip_tokenizer.read(folder / part, configs[encoder])
            for part, encoder in (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2"))
        )
        return cls._of(configs, tokenizers, dtype, remat)

    @classmethod
    def from_configs(
        cls,
        configs: dict[str, dict],
        tokenizers: tuple[Any, Any],
        dtype: Any = jnp.float32,
        remat: Remat = "none",
    ) -> "StableDiffusion3":
        """The architecture from each component's config.json, by the component's name.

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

    def in_dtype(self, dtype: Any) -> "StableDiffusion3":
        """The same family, whose transformer computes in this dtype."""
        return dataclasses.replace(self, transformer=self.transformer.clone(dtype=jnp.dtype(dtype)))

    @property
    def heads(self) -> Heads:
        """Those of the transformer; the token that stands for the T5's has a weight."""
        config = self.transformer.config
        return Heads(config.num_attention_heads, config.attention_head_dim, weighted=True)

    # ---------------------------------------------------------------- prompts -> conditioning

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Ids, padded or truncated to each tokenizer's own length."""
        prompts = [record["prompt"] for record in records]
        return TokenIds(
            *(
                np.asarray(
                    tokenizer(
                        prompts,
                        padding="max_length",
                        truncation=True,
                        max_length=tokenizer.model_max_length,
                    )["input_ids"],
                    dtype=np.int32,
                )
                for tokenizer in self.tokenizers
            )
        )

    def tokenize_null(self, records: Sequence[Record]) -> TokenIds:
        """The ids of the empty prompt, one row for all."""
        return self.tokenize([{"prompt": ""}])

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Which prompts have more tokens than a text encoder's input, so that `tokenize` truncates them."""
        prompts = list(prompts)
        longer = [
            [
                len(ids) > limit
                for ids in tokenizer(prompts, truncation=True, max_length=limit + 1).input_ids
            ]
            for tokenizer in self.tokenizers
            for limit in (tokenizer.model_max_length,)
        ]
        return np.any(longer, axis=0)

    @exact_products
    def encode(self, params: Params, ids: TokenIds) -> Conditioning:
        """Concatenates both CLIPs' penultimate states, zero-padded to the joint width, and their pooled embeddings."""
        states, pooled = zip(
            *(
                encoder.apply({"params": params[part]}, part_ids)
                for encoder, part, part_ids in zip(
                    self.text_encoders, ("text_encoder", "text_encoder_2"), ids, strict=True
                )
            ),
            strict=True,
        )
        context = jnp.concatenate(states, axis=-1)
        missing = self.transformer.config.joint_attention_dim - context.shape[-1]
        context = jnp.pad(context, ((0, 0), (0, 0), (0, missing)))
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
        return self.transformer.apply(network, x, sigma, *conditioning, null_tokens=T5_TOKENS)

    def guided(
        self,
        null: Float[Array, "b h w c"],
        prompt: Float[Array, "b h w c"],
        guidance: float,
    ) -> Float[Array, "b h w c"]:
        """Null + guidance (prompt - null)."""
        return null + guidance * (prompt - null)

    # ---------------------------------------------------------------- latents <-> images

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Images in [0, 1], each a clip of one frame."""
        raw = autoencoder_kl.unscale_latents(self.vae.config, latents)
        images = self.vae.apply({"params": params["vae"]}, raw, method="decode")
        return jnp.clip(images / 2 + 0.5, 0, 1)[:, None]

    def default_size(self) -> Size:
        """The size of the images that the transformer was made for, as in diffusers' pipeline."""
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        side = self.transformer.config.sample_size * factor
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
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        multiple = factor * self.transformer.config.patch_size
        largest = multiple * self.transformer.config.pos_embed_max_size
        height, width, frames = size
        if frames != 1:
            raise ValueError(
                f"a clip of {frames} frames does not fit this model, which makes images"
            )
        if any(side % multiple or not multiple <= side <= largest for side in (height, width)):
            raise ValueError(
                f"an image of {height}x{width} does not fit this model: "
                f"height and width must be multiples of {multiple} from {multiple} to {largest}"
            )
        return height // factor, width // factor, self.transformer.config.in_channels

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of the transformer by stream: see `sd3_flops`."""
        text = self.tokenizers[0].model_max_length + 1  # one stands for the T5's
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": sd3_flops.forward_flops(config, latent, text)}

    # ---------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        return _shapes(self.transformer, self.vae, self.text_encoders)

    def axes(self) -> Params:
        """The logical axes of every parameter's dimensions, in trees like `shapes`."""
        return {
            part: logical_axes(tree, self.tables[part], self.lists[part])
            for part, tree in self.shapes().items()
        }

    def init(self, key: Array) -> Params:
        """Fresh random parameters of every component, for training from scratch."""
        return _init(self.transformer, self.vae, self.text_encoders, key)

    def read(
        self, folder: pathlib.Path, part: str, shardings: Any = None, dtype: Any = jnp.float32
    ) -> Params:
        """Reads one component's parameters from the pipeline folder directly onto the devices of `shardings`."""
        return weights.read_params(
            folder / part,
            self.shapes()[part],
            self.lists[part],
            shardings=shardings,
            dtype=dtype,
            ignore=self.ignored.get(part, ()),
        )


@functools.cache
def _shapes(transformer: Any, vae: Any, text_encoders: tuple[Any, Any]) -> Params:
    # Tracing every component takes seconds; every read of a component and every opened folder asks for the shapes.
    return jax.eval_shape(
        functools.partial(_init, transformer, vae, text_encoders), jax.random.key(0)
    )


def _init(transformer: Any, vae: Any, text_encoders: tuple[Any, Any], key: Array) -> Params:
    keys = jax.random.split(key, 4)
    config = transformer.config
    x = jnp.zeros((1, 2 * config.patch_size, 2 * config.patch_size, config.in_channels))
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    pooled = jnp.zeros((1, config.pooled_projection_dim))
    factor = 2 ** len(vae.config.block_out_channels)
    images = jnp.zeros((1, factor, factor, 3))
    ids = jnp.zeros((1, 2), jnp.int32)
    return {
        "transformer": transformer.init(keys[0], x, jnp.ones(1), context, pooled)["params"],
        "vae": vae.init(keys[1], images, method="reconstruct")["params"],
        "text_encoder": text_encoders[0].init(keys[2], ids)["params"],
        "text_encoder_2": text_encoders[1].init(keys[3], ids)["params"],
    }
