"""Z-Image as a family: prompts -> conditioning, velocity, latents -> images.

A prompt is a user's turn of a chat with Qwen3, whose last state but one conditions the transformer.
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
from digen_jax.models.text import language_model, tokenizers
from digen_jax.models.text.language_model import LanguageModelConfig
from digen_jax.models.text.tokenizers import longer, padded
from digen_jax.models.zimage import network as zimage
from digen_jax.models.zimage.network import ZImageConfig

PIPELINE_CLASS = "ZImagePipeline"
# (library, classes) of each component, as diffusers' model_index.json names them.
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen3Model", "Qwen3ForCausalLM"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "ZImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
# Readers of the JSON files of networks and scheduler.
READERS = {
    "transformer": ZImageConfig.from_config,
    "vae": autoencoder_kl.AutoencoderKLConfig.from_config,
    "text_encoder": LanguageModelConfig.from_config,
    "scheduler": SchedulerConfig.from_config,
}
# The hidden state that is read, and the default of `max_sequence_length`, as in diffusers' pipeline.
STATES = (-2,)
TEXT_TOKENS = 512


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
class ZImage(ImageFamily):
    """The networks and the tokenizer of one pipeline folder; parameters are passed to each call.

    `params` is a dict with one tree for each component: "transformer", "vae" and "text_encoder".

    Attributes:
      max_sequence_length: tokens of a prompt's chat, those of the template included.
      cfg_normalization: as in diffusers' pipeline: the guided velocity is at most so many times as long as that with
        the prompt; 0: of any length.
    """

    transformer: zimage.ZImageTransformer
    vae: autoencoder_kl.AutoencoderKL
    text_encoder: language_model.LanguageModel
    tokenizer: Any
    scheduler: SchedulerConfig
    max_sequence_length: int = TEXT_TOKENS
    cfg_normalization: float = 0.0

    encoders: ClassVar = {"text_encoder": "tokenizer"}
    masked: ClassVar = {"context": "mask"}
    guidance: ClassVar[Guidance] = "classifier-free"
    # Each module knows which of its children its checkpoint numbers.
    lists: ClassVar = {
        "transformer": zimage.LISTS,
        "vae": autoencoder_kl.LISTS,
        "text_encoder": language_model.LISTS,
    }
    tables: ClassVar = {
        "transformer": zimage.AXES,
        "vae": autoencoder_kl.AXES,
        "text_encoder": language_model.AXES,
    }
    # Defaults of diffusers' pipeline, whose guidance_scale is 5: see `guided`.
    default_steps: ClassVar[int] = 50
    default_guidance: ClassVar[float] = 6.0
    encoded_prompts: ClassVar[int] = 16
    lora_targets: ClassVar[str] = zimage.LORA_TARGETS
    renamed: ClassVar = {"text_encoder": language_model.canonical_name}

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        without: Sequence[str] = (),
        max_sequence_length: int = 0,
    ) -> "ZImage":
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
        check_widths(
            folder,
            (
                ("text_encoder", "hidden_size", encoder.hidden_size, "cap_feat_dim", network.cap_feat_dim),
                ("vae", "latent_channels", vae.latent_channels, "in_channels", network.in_channels),
            ),
        )  # fmt: skip
        tokens = max_sequence_length or TEXT_TOKENS
        check_tokens(
            tokens,
            network.longest_caption,
            "for which the transformer has positions (its axes_lens)",
        )
        return cls(
            transformer=zimage.ZImageTransformer(network, dtype=dtype, remat=remat),
            vae=autoencoder_kl.AutoencoderKL(vae, dtype=jnp.float32),
            text_encoder=language_model.LanguageModel(encoder, STATES, dtype=dtype),
            tokenizer=tokenizers.read_language_model(
                folder / "tokenizer", encoder, tokens, chats=True
            ),
            scheduler=configs["scheduler"],
            max_sequence_length=tokens,
        )

    @property
    def heads(self) -> Heads:
        """Those of the transformer."""
        config = self.transformer.config
        return Heads(config.n_heads, config.dim // config.n_heads)

    # ---------------------------------------------------------------- prompts -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """Ids of each prompt's chat, padded or truncated."""
        texts = self._chats([record["prompt"] for record in records])
        return Tokens(*padded(self.tokenizer, texts, self.max_sequence_length))

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Whose chats have more tokens than the text encoder's input, so that `tokenize` truncates them."""
        texts = self._chats(prompts)
        return longer([(self.tokenizer, self.max_sequence_length)], texts)

    def _chats(self, prompts: Sequence[str]) -> list[str]:
        return tokenizers.chat(self.tokenizer, prompts, thinking=True)

    @exact_products
    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """The states of each prompt's chat, and which of them are not padding."""
        (states,) = self.text_encoder.apply({"params": params["text_encoder"]}, *tokens)
        return Conditioning(states, jnp.asarray(tokens.mask))

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
        """Prompt + (guidance - 1) (prompt - null), where diffusers' `guidance_scale` is guidance - 1.

        `cfg_normalization` bounds its length. The pipeline's `cfg_truncation`, the time 1 - sigma behind which it has
        no guidance, is 1 by default, so that there is guidance at every step.
        """
        v = prompt + (guidance - 1) * (prompt - null)
        if not self.cfg_normalization:
            return v
        longest, length = (
            jnp.sqrt(jnp.square(a).sum((1, 2, 3), keepdims=True)) for a in (prompt, v)
        )
        return v * jnp.minimum(1, self.cfg_normalization * longest / length)

    # ---------------------------------------------------------------- latents <-> images

    def default_size(self) -> Size:
        """The default of diffusers' pipeline."""
        return Size(1024, 1024)

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The scheduler's; a dynamic shift depends on the tokens of an image, as in diffusers' pipeline."""
        h, w, _ = self.latent_shape(size)
        tokens = (h // 2) * (w // 2)
        return make_sigmas(self.scheduler, steps, tokens, spacing="uniform float32")

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(h, w, c) of the latents of an image.

        The sides must be multiples of the autoencoder's factor times the patch, and there must be positions for them.
        """
        config = self.transformer.config
        multiple = self.factor * config.patch
        check_image(size, multiple, multiple * min(config.axes_lens[1:]))
        return size.height // self.factor, size.width // self.factor, config.in_channels

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of the transformer by stream: see `zimage.forward_flops`."""
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": zimage.forward_flops(config, latent, self.max_sequence_length)}

    # ---------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        return shapes_of(_init, self.transformer, self.vae, self.text_encoder)

    @property
    def ignored(self) -> dict[str, tuple[str, ...]]:
        """What the text encoder does not read of its files."""
        encoder = self.text_encoder
        return {"text_encoder": language_model.unused(encoder.config, encoder.states)}


def _init(transformer: Any, vae: Any, text_encoder: Any, key: Array) -> Params:
    keys = jax.random.split(key, 3)
    config = transformer.config
    x = jnp.zeros((1, config.patch, config.patch, config.in_channels))
    context, mask = jnp.zeros((1, 2, config.cap_feat_dim)), jnp.ones((1, 2), bool)
    factor = 2 ** len(vae.config.block_out_channels)
    images = jnp.zeros((1, factor, factor, 3))
    ids = jnp.zeros((1, 2), jnp.int32)
    return {
        "transformer": transformer.init(keys[0], x, jnp.ones(1), context, mask)["params"],
        "vae": vae.init(keys[1], images, method="reconstruct")["params"],
        "text_encoder": text_encoder.init(keys[2], ids, mask)["params"],
    }
