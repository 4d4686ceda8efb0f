"""Wan 2.1 and 2.2 as a family: prompts and images -> conditioning, velocity, latents -> clips."""

import dataclasses
import html
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8

from digen_jax.checkpoints.folder import INDEX, read_model_index
from digen_jax.diffusion.schedule import UniPcConfig, make_unipc_schedule
from digen_jax.diffusion.steps import UniPc
from digen_jax.models.autoencoders import autoencoder_wan
from digen_jax.models.chat_family import Tokens
from digen_jax.models.family import Params, Record, Size, check_clip
from digen_jax.models.linear import exact_products
from digen_jax.models.pipeline_family import PipelineFamily
from digen_jax.models.text import t5, tokenizers
from digen_jax.models.wan import network as wan

try:
    import ftfy
except ImportError:
    ftfy = None

TRAIN_TIMESTEPS = 1000
# Temporal factor of every Wan autoencoder: diffusers' AutoencoderKLWan has it written in its loops over frames.
FRAMES_FACTOR = 4


class TextStates(NamedTuple):
    """Conditioning of a prompt.

    Attributes:
      context: States of the prompt's tokens, then zeros, which the transformer attends to, too.
      mask: False for the zeros, so that they need not be stored.
    """

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]


class ImageTokens(NamedTuple):
    """Tokens of each prompt, and its source image."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]
    image: UInt8[Array, "b h w 3"] | UInt8[np.ndarray, "b h w 3"]
    cropped: UInt8[Array, "b s s 3"] | UInt8[np.ndarray, "b s s 3"] | None = None  # for CLIP


class ImageStates(NamedTuple):
    """Conditioning of a prompt and its source image: `TextStates`, the image's latents, and its states in CLIP."""

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]
    source: Float[Array, "b t h w c"]
    image: Float[Array, "b i e"] | None = None


def clean_prompt(prompt: str) -> str:
    """Cleans a prompt as diffusers' `prompt_clean`: `ftfy` if it is installed, HTML entities, whitespace.

    So prompts with curly quotes, ligatures or full-width letters depend on whether ftfy is installed, as in diffusers.
    """
    if ftfy is not None:
        prompt = ftfy.fix_text(prompt)
    prompt = html.unescape(html.unescape(prompt))
    # The separators \x1c to \x1f are whitespace for `re`, but not for the package `regex`, which diffusers uses.
    return re.sub(r"[^\S\x1c-\x1f]+", " ", prompt.strip()).strip()


@dataclasses.dataclass(frozen=True)
class Wan(PipelineFamily):
    """Networks and tokenizer of one pipeline folder; parameters are passed to each call.

    A model with `expand_timesteps`, which is Wan 2.2 5B, generates clips from prompts alone or, with a `source`, clips
    that start with the prompts' images. As in diffusers' `WanImageToVideoPipeline`, the network then reads the image's
    latents as the first frame, at time 0, and they replace the first frame of the result. What it predicts for that
    frame is not used: the velocity there is exact, (x - image) / sigma, so that no gradient, ratio or divergence
    depends on it. In Flow-Factory (wan2_i2v.py, a0b2bc5) the prediction counts in log-probabilities. In both the mean
    of a log-probability is over all frames.

    Attributes:
      transformer_2: Expert of low noise levels, whose config equals that of `transformer`, which is then the expert of
        high ones. None means that there is one transformer.
      boundary_ratio: `boundary_ratio` of model_index.json: 1000 times it is the least time of `transformer`.
      expand_timesteps: Field of model_index.json: the network has a time for each token.
      source: Size of the clips that start with an image. None means that prompts have no images.
      max_sequence_length: Tokens of a prompt and, with zero states, of its padding.
      odd_times: Noise levels of a schedule whose time is not floor(1000 sigma) in float32, each with its time (see
        `UniPcSchedule`).
    """

    transformer: wan.WanTransformer
    vae: autoencoder_wan.AutoencoderKLWan
    text_encoder: t5.T5EncoderModel
    tokenizer: Any
    scheduler: UniPcConfig
    transformer_2: wan.WanTransformer | None = None
    boundary_ratio: float = 0.0
    expand_timesteps: bool = False
    source: Size | None = None
    max_sequence_length: int = 512
    odd_times: tuple[tuple[float, int], ...] = ()

    parts: ClassVar = {
        "transformer": wan.TRANSFORMER,
        "vae": dataclasses.replace(autoencoder_wan.COMPONENT, classes=("AutoencoderKLWan",)),
        "text_encoder": dataclasses.replace(t5.COMPONENT, classes=("UMT5EncoderModel",)),
        "transformer_2": wan.TRANSFORMER,
    }
    experts: ClassVar = ("transformer", "transformer_2")
    optional: ClassVar[tuple[str, ...]] = ("transformer_2",)
    widths: ClassVar = (
        ("text_encoder", "d_model", "text_dim"),
        ("vae", "z_dim", "in_channels"),
        ("transformer", "out_channels", "in_channels"),
    )
    # Default of diffusers' pipeline call; its method `encode_prompt` has another one, 226.
    default_tokens: ClassVar = 512
    masked: ClassVar[Mapping[str, str]] = {"context": "mask"}
    default_steps: ClassVar[int] = 50
    default_guidance: ClassVar[float] = 5.0
    scheduler_config: ClassVar = UniPcConfig
    solver: ClassVar[UniPc] = UniPc()
    lora_targets: ClassVar[str] = wan.LORA_TARGETS

    def __post_init__(self):
        if self.source is not None:
            self.latent_shape(self.source)

    @property
    def pipeline(self) -> str:
        """Class of diffusers' pipeline, which depends on the prompts; folders of 5B name the first one."""
        return "WanPipeline" if self.source is None else "WanImageToVideoPipeline"

    @property
    def edits(self) -> bool:
        """Whether clips may start with an image."""
        return self.expand_timesteps

    @property
    def encoded_prompts(self) -> int:
        """Maximum prompts encoded together."""
        return self.encoded_with_images(16)

    @classmethod
    def from_folder(cls, folder: pathlib.Path, *args: Any, **options: Any) -> Self:
        """Builds the family (see `PipelineFamily.from_folder`)."""
        family = super().from_folder(folder, *args, **options)
        index = read_model_index(folder)
        ratio, expand = index.get("boundary_ratio") or 0.0, bool(index.get("expand_timesteps"))
        return dataclasses.replace(family, boundary_ratio=ratio, expand_timesteps=expand)

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises ValueError if experts do not fit each other, or for an autoencoder that diffusers cannot run."""
        ratio = read_model_index(folder).get("boundary_ratio")
        first, second = configs["transformer"], configs.get("transformer_2")
        if second is None and ratio is not None:
            raise ValueError(
                f"{folder / INDEX}: boundary_ratio must be null without a transformer_2, and is {json.dumps(ratio)}: "
                "add that transformer"
            )
        if second is not None and not (type(ratio) is float and 0 < ratio < 1):
            raise ValueError(
                f"{folder / INDEX}: boundary_ratio must be a number between 0 and 1 for a pipeline with transformer_2, "
                f"and is {json.dumps(ratio)}"
            )
        if second not in (None, first):
            names = [field.name for field in dataclasses.fields(first)]
            name = next(n for n in names if getattr(first, n) != getattr(second, n))
            raise ValueError(
                f"{folder / 'transformer_2' / 'config.json'}: {name} must be {getattr(first, name)}, as of the "
                f"transformer, and is {getattr(second, name)}"
            )
        if first.image_dim is not None and "image_encoder" not in configs:
            raise ValueError(
                f"{folder / 'transformer' / 'config.json'}: image_dim must be null without an image_encoder, and is "
                f"{first.image_dim}"
            )
        if configs["vae"].frames_factor != FRAMES_FACTOR:
            raise ValueError(
                f"{folder / 'vae' / 'config.json'}: temperal_downsample must have {FRAMES_FACTOR} frames of a clip "
                f"for one of latents, as diffusers computes with, and has {configs['vae'].frames_factor}"
            )

    # ---------------------------------------------------------------- prompts

    def tokenize(self, records: Sequence[Record]) -> Tokens | ImageTokens:
        """Returns token ids of the cleaned prompts, padded or truncated, and their source images.

        Raises:
          ValueError: a source image is missing, unreadable, or unexpected because `source` is None.
        """
        prompts = [clean_prompt(record["prompt"]) for record in records]
        tokens = Tokens(*tokenizers.padded(self.tokenizer, prompts, self.max_sequence_length))
        images = self.source_images(records) if self.edits else None
        return tokens if images is None else ImageTokens(*tokens, images)

    def is_truncated(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Returns which cleaned prompts exceed the text encoder's input length."""
        limit = self.tokenizer, self.max_sequence_length
        return tokenizers.longer([limit], [clean_prompt(prompt) for prompt in prompts])

    @exact_products
    def encode(self, params: Params, tokens: Tokens | ImageTokens) -> TextStates | ImageStates:
        """Returns the text encoder's states of each prompt's tokens, zeros for the padding, and the image's latents."""
        encoder, (ids, mask) = {"params": params["text_encoder"]}, tokens[:2]
        states, mask = cast(Any, self.text_encoder.apply(encoder, ids, mask)), jnp.asarray(mask)
        text = TextStates(jnp.where(mask[..., None], states, 0), mask)
        if self.source is None:
            return text
        clips = self.source_clips(cast(ImageTokens, tokens).image.astype(jnp.float32) / 255)
        return ImageStates(*text, autoencoder_wan.encode_clips(self.vae, params["vae"], clips))

    def source_clips(self, images: Any) -> Float[Array, "b t h w 3"]:
        """Returns the clips, in [0, 1], whose latents the network reads, from images of one frame."""
        return images

    @exact_products
    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b t h w c"],
        sigma: Float[Array, "b"],
        conditioning: TextStates | ImageStates,
        guidance: float | None = None,
    ) -> Float32[Array, "b t h w c"]:
        """Returns the transformer's velocity, and the exact one of a first frame that the image determines."""
        time, latents = self.network_time(sigma), self.complete(x, conditioning)
        if self.source is not None:
            time = jnp.stack([jnp.zeros_like(time), time], axis=1)
        inputs = latents, time, conditioning.context
        v: Any = self.transformer.apply(variables["transformer"], *inputs)
        if self.source is None:
            return v
        exact = (x - latents)[:, :1] / sigma[:, None, None, None, None]
        return jnp.concatenate([exact, v[:, 1:]], axis=1)

    def complete(
        self, latents: Float[Array, "b t h w c"], conditioning: TextStates | ImageStates
    ) -> Float[Array, "b t h w c"]:
        """Returns the latents with the image's as the first frame."""
        if isinstance(conditioning, TextStates):
            return latents
        source = conditioning.source.astype(latents.dtype)
        return jnp.concatenate([source, latents[:, 1:]], axis=1)

    # ---------------------------------------------------------------- schedule

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns the sigmas of diffusers' UniPCMultistepScheduler, from 1 - 1e-6."""
        self.latent_shape(size)
        return make_unipc_schedule(self.scheduler, steps).sigmas

    def scheduled(self, steps: int, size: Size) -> "Wan":
        """Returns the same family, whose times equal those of diffusers at the noise levels of a schedule."""
        sigmas, times = make_unipc_schedule(self.scheduler, steps)
        floors = np.floor(np.float32(TRAIN_TIMESTEPS) * sigmas[:-1])
        found = zip(sigmas[:-1].tolist(), times.tolist(), floors, strict=True)
        odd = tuple((sigma, time) for sigma, time, floor in found if time != floor)
        return dataclasses.replace(self, odd_times=odd)

    def network_time(self, sigma: Float[Array, "b"]) -> Float32[Array, "b"]:
        """Returns 1000 sigma without its fraction, as diffusers' integer times."""
        sigma = sigma.astype(jnp.float32)
        time = jnp.floor(TRAIN_TIMESTEPS * sigma)
        for at, exact in self.odd_times:
            time = jnp.where(sigma == at, exact, time)
        return time

    def expert(self, sigma: Float[Array, "b"]) -> Int[Array, "b"]:
        """Returns 0 where the time is at least 1000 times the boundary's ratio, as in diffusers, otherwise 1."""
        boundary = np.float32(self.boundary_ratio * TRAIN_TIMESTEPS)
        return (self.network_time(sigma) < boundary).astype(int)

    # ---------------------------------------------------------------- latents and clips

    @property
    def factor(self) -> int:
        """Pixels along each side of a latent."""
        return self.vae.config.side_factor

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return self.transformer.config.patch

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self.vae.config.z_dim

    @property
    def positions(self) -> int:
        """Maximum tokens along a side, and maximum frames of latents."""
        return self.transformer.config.rope_max_seq_len

    def default_size(self) -> Size:
        """Returns the default size of diffusers' pipeline, which is that of the 1.3B model, for all models."""
        return Size(480, 832, 81)

    def latent_shape(self, size: Size) -> tuple[int, int, int, int]:
        """Returns (t, h, w, c) of a clip's latents, for 1 + 4 n frames and sides that are multiples of a token's.

        Raises:
          ValueError: the size does not fit.
        """
        multiple = self.factor * self.patch
        if self.source is not None and size != self.source:
            raise ValueError(
                f"a clip of {size} does not fit this model, whose clips start with source images of {self.source}: "
                "make both sizes equal"
            )
        if self.source is not None and size.frames == 1:
            raise ValueError(
                "a clip of 1 frame does not fit this model, whose first frame is the source image: use 5 or more"
            )
        longest = 1 + (self.positions - 1) * FRAMES_FACTOR
        check_clip(size, multiple, FRAMES_FACTOR, multiple * self.positions, longest)
        frames = 1 + (size.frames - 1) // FRAMES_FACTOR
        return frames, size.height // self.factor, size.width // self.factor, self.channels

    @exact_products
    def decode(
        self, params: Params, latents: Float[Array, "b t h w c"]
    ) -> Float[Array, "b T H W 3"]:
        """Returns clips in [0, 1], decoded one frame of latents at a time."""
        return autoencoder_wan.decode_clips(self.vae, params["vae"], latents)

    def encode_images(self, params: Params, images: Float[Array, "b H W 3"]) -> NoReturn:
        """Raises ValueError: only clips are generated."""
        raise ValueError("this model generates clips, but images train: choose a model of images")
