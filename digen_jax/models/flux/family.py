"""FLUX.1 dev and schnell as a family: prompts -> conditioning, velocity, latents -> images.

The context of a prompt is that of the T5, padding included, which diffusers' `FluxPipeline` does not mask; the state of
CLIP's end token modulates the blocks. dev is given a guidance scale as a number, and may have a second pass without the
prompt; schnell has neither.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.attention.kernels import Heads
from digen_jax.checkpoints import folder as weights
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.family import Guidance, Params, Record, Size, check_image
from digen_jax.models.flux import network as flux
from digen_jax.models.image_family import ImageFamily, check_tokens, check_widths, shapes_of
from digen_jax.models.layers import SIDE
from digen_jax.models.linear import exact_products
from digen_jax.models.remat import Remat
from digen_jax.models.text import clip_text, t5, tokenizers
from digen_jax.models.text.tokenizers import longer, padded

PIPELINE_CLASS = "FluxPipeline"
# (library, class) of each component, as diffusers' model_index.json names them.
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5Tokenizer"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
# Readers of the JSON files of networks and scheduler.
READERS = {
    "transformer": flux.FluxConfig.from_config,
    "vae": autoencoder_kl.AutoencoderKLConfig.from_config,
    "text_encoder": clip_text.CLIPTextConfig.from_config,
    "text_encoder_2": t5.T5Config.from_config,
    "scheduler": SchedulerConfig.from_config,
}
# The default of `max_sequence_length` in diffusers' pipeline, and the most that it allows.
T5_TOKENS = 512
# Latents along each side of the images of diffusers' pipeline by default.
SAMPLE_SIZE = 128


class Conditioning(NamedTuple):
    """The transformer's inputs from a prompt."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]


class TokenIds(NamedTuple):
    """The ids of each prompt from CLIP's tokenizer and from the T5's."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b m"] | Int[np.ndarray, "b m"]


@dataclasses.dataclass(frozen=True)
class Flux(ImageFamily):
    """The networks and tokenizers of one pipeline folder; parameters are passed to each call.

    `params` is a dict with one tree for each component: "transformer", "vae", "text_encoder" (CLIP) and
    "text_encoder_2" (T5).
    """

    transformer: flux.FluxTransformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoder: clip_text.CLIPTextModel
    text_encoder_2: t5.T5EncoderModel
    tokenizer: Any  # CLIPTokenizer
    tokenizer_2: Any  # T5Tokenizer
    scheduler: SchedulerConfig
    max_sequence_length: int = T5_TOKENS  # of the T5

    encoders: ClassVar = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
    # Each module knows which of its children its checkpoint numbers.
    lists: ClassVar = {
        "transformer": flux.LISTS,
        "vae": autoencoder_kl.LISTS,
        "text_encoder": clip_text.LISTS,
        "text_encoder_2": t5.LISTS,
    }
    tables: ClassVar = {
        "transformer": flux.AXES,
        "vae": autoencoder_kl.AXES,
        "text_encoder": clip_text.AXES,
        "text_encoder_2": t5.AXES,
    }
    # Of diffusers' pipeline; the makers of schnell sample it in 4.
    default_steps: ClassVar[int] = 28
    encoded_prompts: ClassVar[int] = 32
    lora_targets: ClassVar[str] = flux.LORA_TARGETS
    ignored: ClassVar = {"text_encoder": clip_text.IGNORED, "text_encoder_2": t5.IGNORED}
    renamed: ClassVar = {"text_encoder": clip_text.stored_name}

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        without: Sequence[str] = (),
        max_sequence_length: int = 0,
    ) -> "Flux":
        """The architecture of a diffusers pipeline folder; reads only its JSON files and tokenizers.

        Args:
          folder: the pipeline's.
          dtype: of the arithmetic of transformer and text encoders; the autoencoder's is always float32.
          remat: what the transformer's backward pass recomputes.
          without: components that are left out, of `optional`, which are none.
          max_sequence_length: tokens of the T5; 0: as many as in diffusers' pipeline.

        Raises:
          ValueError: names the file that is missing, broken, has another class, or does not fit the others, or a
            `max_sequence_length` that diffusers' pipeline refuses.
        """
        check_tokens(max_sequence_length, T5_TOKENS, "the most that FLUX.1 reads of a prompt")
        configs = weights.read_configs(folder, COMPONENTS, READERS)
        network, vae = configs["transformer"], configs["vae"]
        clip, long = configs["text_encoder"], configs["text_encoder_2"]
        channels, pooled, width = (
            network.in_channels,
            network.pooled_projection_dim,
            network.joint_attention_dim,
        )
        check_widths(
            folder,
            (
                ("text_encoder", "hidden_size", clip.hidden_size, "pooled_projection_dim", pooled),
                ("text_encoder_2", "d_model", long.d_model, "joint_attention_dim", width),
                ("vae", "latent_channels", vae.latent_channels, "in_channels / 4", channels // SIDE**2),
                ("transformer", "out_channels", network.out_channels, "in_channels", channels),
            ),
        )  # fmt: skip
        return cls(
            transformer=flux.FluxTransformer(network, dtype=dtype, remat=remat),
            vae=autoencoder_kl.AutoencoderKL(vae, dtype=jnp.float32),
            text_encoder=clip_text.CLIPTextModel(clip, dtype=dtype),
            text_encoder_2=t5.T5EncoderModel(long, dtype=dtype),
            tokenizer=tokenizers.read_clip(folder / "tokenizer", clip),
            tokenizer_2=tokenizers.read_t5(folder / "tokenizer_2", long),
            scheduler=configs["scheduler"],
            max_sequence_length=max_sequence_length or T5_TOKENS,
        )

    @property
    def guidance(self) -> Guidance:
        """Returns "both" for dev, whose inputs include a guidance, and "none" for schnell.

        The pipeline makes a second pass if `true_cfg_scale` is above 1 and a negative prompt is given, which can be
        empty. Here a true guidance above 1 suffices, and the negative prompt is empty by default. The pipeline takes a
        `true_cfg_scale` for schnell, too. Here schnell has none: it is distilled to be sampled without guidance, and
        with "classifier-free" each run of it would encode and keep a null conditioning that nothing reads.
        """
        return "both" if self.transformer.config.guidance_embeds else "none"

    @property
    def default_guidance(self) -> float:
        """That of diffusers' pipeline, which a model without guidance ignores."""
        return 3.5 if self.transformer.config.guidance_embeds else 1.0

    @property
    def heads(self) -> Heads:
        """Those of the transformer."""
        config = self.transformer.config
        return Heads(config.num_attention_heads, config.attention_head_dim)

    # ---------------------------------------------------------------- prompts -> conditioning

    def tokenize(self, records: Sequence[Record]) -> TokenIds:
        """Ids, padded or truncated to each text encoder's length."""
        prompts = [record["prompt"] for record in records]
        return TokenIds(*(padded(tokenizer, prompts, n)[0] for tokenizer, n in self._lengths()))

    def _lengths(self) -> list[tuple[Any, int]]:
        """Each tokenizer with the number of tokens that its text encoder reads."""
        return [
            (self.tokenizer, self.tokenizer.model_max_length),
            (self.tokenizer_2, self.max_sequence_length),
        ]

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Which prompts have more tokens than the T5's input.

        CLIP's is shorter, but only a summary of the prompt comes from there.
        """
        return longer(self._lengths()[1:], prompts)

    @exact_products
    def encode(self, params: Params, ids: TokenIds) -> Conditioning:
        """The T5's states, padding included, and the state of CLIP's end token."""
        pooled = self.text_encoder.apply({"params": params["text_encoder"]}, ids.first)
        context = self.text_encoder_2.apply({"params": params["text_encoder_2"]}, ids.second)
        return Conditioning(context, pooled)

    # ---------------------------------------------------------------- the network

    @exact_products
    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b h w c"],
        sigma: Float[Array, "b"],
        conditioning: tuple[Float[Array, "b ..."], ...],
        guidance: float | None = None,
    ) -> Float32[Array, "b h w c"]:
        """The transformer's velocity; `variables["transformer"]` are its linen collections.

        `conditioning` is that of `encode`: context, pooled, and of FLUX.1 Kontext the latents of a picture.
        """
        if guidance is not None:
            guidance = jnp.full(x.shape[0], guidance, jnp.float32)
        context, pooled, *source = conditioning
        return self.transformer.apply(
            variables["transformer"], x, sigma, context, pooled, guidance, *source
        )

    def guided(
        self,
        null: Float[Array, "b h w c"],
        prompt: Float[Array, "b h w c"],
        guidance: float,
    ) -> Float[Array, "b h w c"]:
        """Null + guidance (prompt - null), where diffusers' `true_cfg_scale` is guidance."""
        return null + guidance * (prompt - null)

    # ---------------------------------------------------------------- latents <-> images

    def default_size(self) -> Size:
        """The default size of diffusers' pipeline."""
        return Size(SAMPLE_SIZE * self.factor, SAMPLE_SIZE * self.factor)

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The scheduler's, from 1 to 1/steps before the shift, which for dev depends on the tokens of an image."""
        h, w, _ = self.latent_shape(size)
        tokens = h * w // SIDE**2
        return make_sigmas(self.scheduler, steps, tokens, "uniform")

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(h, w, c) of the latents of an image, whose sides must be multiples of a token's."""
        check_image(size, self.factor * SIDE)
        channels = self.vae.config.latent_channels
        return size.height // self.factor, size.width // self.factor, channels

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of the transformer by stream: see `flux.forward_flops`."""
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": flux.forward_flops(config, latent, self.max_sequence_length)}

    # ---------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        return shapes_of(_init, self.transformer, self.vae, self.text_encoder, self.text_encoder_2)


def _init(transformer: Any, vae: Any, clip: Any, long: Any, key: Array) -> Params:
    config = transformer.config
    x = jnp.zeros((1, SIDE, SIDE, config.in_channels // SIDE**2))
    context = jnp.zeros((1, 2, config.joint_attention_dim))
    pooled = jnp.zeros((1, config.pooled_projection_dim))
    guidance = jnp.ones(1) if config.guidance_embeds else None
    factor = 2 ** len(vae.config.block_out_channels)
    images = jnp.zeros((1, factor, factor, 3))
    ids = jnp.zeros((1, 2), jnp.int32)
    variables = {
        "transformer": transformer.init(key, x, jnp.ones(1), context, pooled, guidance),
        "vae": vae.init(key, images, method="reconstruct"),
        "text_encoder": clip.init(key, ids),
        "text_encoder_2": long.init(key, ids),
    }
    return {part: found["params"] for part, found in variables.items()}
