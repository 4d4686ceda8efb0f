"""Base class of model families, driven by a table of components.

A family is a network, a table and a few methods (see docs/adding-a-family.md).
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8
from PIL import Image

from digen_jax.attention.kernels import Heads
from digen_jax.checkpoints import folder as weights
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import FieldError, user_input
from digen_jax.images import read_image, resize_image, source_images
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.family import (
    Component,
    Conditioning,
    Guidance,
    Params,
    Record,
    Size,
    check_image,
    logical_axes,
    negative_of,
)
from digen_jax.models.layers import Remat
from digen_jax.models.linear import exact_products
from digen_jax.models.text import tokenizers


class PipelineFamily:
    """Base of a frozen dataclass with a pipeline's networks, of which `experts` are trained.

    A subclass has a field for each component, named as in the pipeline's folder, and for each tokenizer. `Family`
    documents the attributes that are not listed here.

    Attributes:
      transformer: Network that predicts the velocity.
      vae: Autoencoder; always computes in float32, because it overflows in half precision.
      scheduler: Config of the sampler's schedule, of the class `scheduler_config`.
      max_sequence_length: Prompt tokens that the transformer reads.
      pipeline: Pipeline class in the folder's model_index.json.
      parts: Components by name. Their order determines the random key of each in `init`.
      widths: Fields that must be equal, as (component, its field, the transformer's field). A field may be followed
        by " times n" or " / n".
      default_tokens: Default `max_sequence_length` of diffusers' pipeline.
      most_tokens: Maximum that the pipeline allows. None means unbounded.
      spacing: Spacing of the schedule (see `make_sigmas`).
      experts: Transformers that a folder may have (see `Family.trained`).
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # of each family
    tokenize: Callable[[Sequence[Record]], Any]  # of each family
    transformer: Any
    vae: Any
    scheduler: Any
    max_sequence_length: int

    pipeline: ClassVar[str]
    parts: ClassVar[Mapping[str, Component]]
    widths: ClassVar[Sequence[tuple[str, str, str]]]
    default_tokens: ClassVar[int]
    most_tokens: ClassVar[int | None] = None
    spacing: ClassVar[Literal["timesteps", "uniform", "uniform float32"]] = "uniform"

    scheduler_config: ClassVar[Any] = SchedulerConfig
    solver: ClassVar[Ode] = Ode()

    experts: ClassVar[tuple[str, ...]] = ("transformer",)
    unused: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    frozen: ClassVar[Mapping[str, Sequence[str]]] = {}
    masked: ClassVar[Mapping[str, str]] = {}
    decoders: ClassVar[tuple[str, ...]] = ("vae",)
    edits: ClassVar[bool] = False
    source: Size | None = None
    sources: int = 1
    guidance: ClassVar[Guidance] = "classifier-free"
    negative_prompt: ClassVar[str] = ""
    lora_loader: ClassVar[str] = "load_lora_weights({})"
    # Eight images of 512 x 512, which need 6.5 GB of a TPU in an AutoencoderKL. Four would need as much, because the
    # compiler pads them to eight.
    decoded_pixels: ClassVar[int] = 2**21

    # ---------------------------------------------------------------- pipeline folder

    @classmethod
    def classes(cls, without: Sequence[str] = ()) -> dict[str, tuple[str | None, ...]]:
        """Returns (library, class, ..) of each component in model_index.json; (None, None) if in `without`."""
        found: dict[str, tuple[str | None, ...]] = {
            "scheduler": ("diffusers", cls.scheduler_config.name)
        }
        for name, part in cls.parts.items():
            absent = name in without
            found[name] = (None, None) if absent else (part.library, *part.classes)
            if part.tokenizer:
                kinds = "transformers", part.tokenizer, *tokenizers.GENERAL
                found[tokenizer_of(name)] = (None, None) if absent else kinds
        return dict(sorted(found.items()))

    @classmethod
    def readers(cls, without: Sequence[str] = ()) -> dict[str, Callable[..., Any]]:
        """Returns the readers of the networks' and the scheduler's JSON files."""
        parts = {name: part.read_config for name, part in cls.parts.items() if name not in without}
        return parts | {"scheduler": cls.scheduler_config.from_config}

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        without: Sequence[str] = (),
        max_sequence_length: int = 0,
    ) -> Self:
        """Builds the family of a diffusers pipeline folder; reads only its JSON files and tokenizers.

        Args:
          folder: Pipeline folder.
          dtype: Compute dtype of the transformer and the text encoders; the autoencoder's is always float32.
          remat: Rematerialization of the transformer.
          without: Components in `optional` to omit.
          max_sequence_length: Tokens of a prompt. 0 means the default of diffusers' pipeline.

        Raises:
          ValueError: a file is missing, broken, has another class, or does not fit the others, or
            `max_sequence_length` is not supported by diffusers' pipeline.
        """
        if cls.most_tokens is not None:
            check_tokens(max_sequence_length, cls.most_tokens, f"as in {cls.pipeline}")
        tokens = max_sequence_length or cls.default_tokens
        absent = [part for part in cls.optional if part in without or not _named(folder, part)]
        configs = weights.read_configs(folder, cls.classes(absent), cls.readers(absent))
        _check_widths(folder, configs, cls.widths)
        cls.check_configs(folder, configs, tokens)
        return cls.build(
            configs, cls.read_tokenizers(folder, configs, tokens), dtype, remat, tokens
        )

    @classmethod
    def build(
        cls,
        configs: Mapping[str, Any],
        tokenizers: Mapping[str, Any],
        dtype: Any = jnp.float32,
        remat: Remat = "none",
        max_sequence_length: int = 0,
    ) -> Self:
        """Builds the family from the results of `readers` and the tokenizers, both by field name."""
        tokens = max_sequence_length or cls.default_tokens
        fields = dict(tokenizers, scheduler=configs["scheduler"], max_sequence_length=tokens)
        for name, part in cls.parts.items():
            options = {} if name in cls.decoders else {"dtype": dtype}
            if name in cls.experts:
                options["remat"] = remat
            fields[name] = part.network(configs[name], **options) if name in configs else None
        return cls(**fields)

    @classmethod
    def check_configs(cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int) -> None:
        """Raises ValueError if components do not fit each other, beyond `widths`, or the number of tokens."""

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the tokenizers by field name; raises ValueError if one does not fit its text encoder."""
        encoders = [name for name, part in cls.parts.items() if part.tokenizer and name in configs]
        names = {tokenizer_of(encoder): encoder for encoder in encoders}
        return {
            name: tokenizers.read(folder / name, configs[encoder])
            for name, encoder in names.items()
        }

    # ---------------------------------------------------------------- components

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Networks by component, without omitted ones."""
        found = {name: getattr(self, name) for name in self.parts}
        return {name: network for name, network in found.items() if network is not None}

    @property
    def trained(self) -> tuple[str, ...]:
        """Transformers (see `Family`)."""
        return tuple(name for name in self.experts if getattr(self, name) is not None)

    @property
    def encoders(self) -> Mapping[str, str]:
        """Text encoders, with the folder of each tokenizer, and with source images the autoencoder."""
        texts = {name: tokenizer_of(name) for name in self.networks if self.parts[name].tokenizer}
        return texts if self.source is None else {**texts, "vae": ""}

    @property
    def lists(self) -> dict[str, Any]:
        """Lists of each component (see `Family`)."""
        return {name: part.lists for name, part in self.parts.items()}

    @property
    def heads(self) -> Heads:
        """Attention heads of the transformer."""
        config = self.transformer.config
        return Heads(config.num_attention_heads, config.attention_head_dim)

    def expert(self, sigma: Float[Array, "b"]) -> Int[Array, "b"]:
        """Returns 0, the place of the only transformer; families with several override this."""
        return jnp.zeros(sigma.shape, int)

    def scheduled(self, steps: int, size: Size) -> "PipelineFamily":
        """Returns the family itself; families override this if their network's times depend on the schedule."""
        return self

    def in_dtype(self, dtype: Any) -> "PipelineFamily":
        """Returns the same family with transformers that compute in `dtype`."""
        kind = jnp.dtype(dtype)
        changed = {name: getattr(self, name).clone(dtype=kind) for name in self.trained}
        return dataclasses.replace(cast(Any, self), **changed)

    # ---------------------------------------------------------------- prompts and the network

    def tokenize_null(self, records: Sequence[Record]) -> Any:
        """Returns the tokens of each record's negative prompt, or one row for all if it is the same.

        With source images, each record has its own, because the second pass differs only in the text.
        """
        if self.source is not None:
            return self.tokenize([{**r, "prompt": negative_of(self, r)} for r in records])
        prompts = [negative_of(self, record) for record in records or [{}]]
        distinct = prompts if len(set(prompts)) > 1 else prompts[:1]
        return self.tokenize([{"prompt": prompt} for prompt in distinct])

    def source_images(self, records: Sequence[Record]) -> UInt8[np.ndarray, "b n h w 3"] | None:
        """Returns the `sources` images of each record, in the size `source`. None means that there are none.

        Raises:
          ValueError: a source image is missing, unreadable, or unexpected because `source` is None.
        """
        found = self.read_sources(records)
        if found is None:
            return None
        return np.stack([[self.fit_source(image) for image in images] for images in found])

    def read_sources(self, records: Sequence[Record]) -> list[list[Image.Image]] | None:
        """Returns the source images of each record in their own sizes; see `source_images`."""
        for record in records:
            _check_images(record, 0 if self.source is None else self.sources)
        if self.source is None:
            return None
        with user_input():
            return [[read_image(one) for one in source_images(record)] for record in records]

    def fit_source(self, image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
        """Returns a source image in the size `source`, stretched with the filter of diffusers' pipelines."""
        height, width, _ = cast(Size, self.source)
        return resize_image(image, height, width)

    def encoded_with_images(self, prompts: int) -> int:
        """Returns `prompts`, limited by `decoded_pixels` if there are source images."""
        if self.source is None:
            return prompts
        return max(1, min(prompts, self.decoded_pixels // (math.prod(self.source) * self.sources)))

    def network_inputs(
        self, conditioning: Conditioning, guidance: Float[Array, "b"] | None
    ) -> tuple[Any, ...]:
        """Returns the transformer's inputs after latents and sigma."""
        return tuple(conditioning)

    def network_time(self, sigma: Float[Array, "b"]) -> Float[Array, "b"]:
        """Returns the transformer's second input, at noise levels sigma."""
        return sigma

    @exact_products
    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b *latent"],
        sigma: Float[Array, "b"],
        conditioning: Conditioning,
        guidance: float | None = None,
    ) -> Float32[Array, "b *latent"]:
        """Returns the transformer's velocity; `variables["transformer"]` contains its linen collections."""
        scale = None if guidance is None else jnp.full(x.shape[0], guidance, jnp.float32)
        inputs = self.network_inputs(conditioning, scale)
        time = self.network_time(sigma)
        return self.transformer.apply(variables["transformer"], x, time, *inputs)

    def guided(
        self, null: Float[Array, "b *latent"], prompt: Float[Array, "b *latent"], guidance: float
    ) -> Float[Array, "b *latent"]:
        """Returns null + guidance (prompt - null)."""
        return null + guidance * (prompt - null)

    # ---------------------------------------------------------------- latents and images

    @property
    def factor(self) -> int:
        """Pixels along each side of a latent."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def patch(self) -> int:
        """Latents along each side of a token."""
        return 2

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self.transformer.config.in_channels

    @property
    def positions(self) -> int | None:
        """Maximum tokens along a side. None means unbounded."""
        return None

    @property
    def default_side(self) -> int:
        """Default pixels along each side of an image in diffusers' pipeline."""
        return 128 * self.factor

    def default_size(self) -> Size:
        """Returns the default image size of diffusers' pipeline."""
        return Size(self.default_side, self.default_side)

    def source_size(self, height: int, width: int, clip: Size) -> Size:
        """Returns the clip's size; families that resize source images to another one override this."""
        return clip

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Returns (h, w, c) of an image's latents; sides must be multiples of a token's and fit the positions."""
        multiple = self.factor * self.patch
        check_image(size, multiple, self.positions and multiple * self.positions)
        return size.height // self.factor, size.width // self.factor, self.channels

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns the scheduler's sigmas; a dynamic shift depends on an image's tokens, as in diffusers' pipeline."""
        h, w, _ = self.latent_shape(size)
        return make_sigmas(self.scheduler, steps, h * w // self.patch**2, self.spacing)

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Returns images in [0, 1], each a clip of one frame."""
        return autoencoder_kl.decode_images(self.vae, params["vae"], latents)[:, None]

    @exact_products
    def encode_images(
        self, params: Params, images: Float[Array, "b H W 3"]
    ) -> Float[Array, "b *latent"]:
        """Returns the latents of images in [0, 1]: the means, without noise."""
        return autoencoder_kl.encode_images(self.vae, params["vae"], images)

    def complete(
        self, latents: Float[Array, "b *latent"], conditioning: Conditioning
    ) -> Float[Array, "b *latent"]:
        """Returns the latents; families whose source image determines some of them override this."""
        return latents

    @property
    def context_tokens(self) -> int:
        """Text tokens that the transformer processes, padding included."""
        return self.max_sequence_length

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns FLOPs of the transformer by stream (see `forward_flops` of its module)."""
        config, latent = self.transformer.config, self.latent_shape(size)
        return {"transformer": self.parts["transformer"].flops(config, latent, self.context_tokens)}

    # ---------------------------------------------------------------- parameters

    def init(self, key: Array) -> Params:
        """Initializes random parameters of every component, for training from scratch."""
        # The embedded model was trained from scratch with these keys.
        keys = [*jax.random.split(key, 4), jax.random.fold_in(key, 3)]
        return {
            name: _init(network, self.parts[name], own)
            for (name, network), own in zip(self.networks.items(), keys, strict=False)
        }

    def shapes(self) -> Params:
        """Returns the parameter trees as `jax.ShapeDtypeStruct`, without allocation."""
        return {
            name: _shapes(self.networks[name], self.parts[name]) for name in sorted(self.networks)
        }

    def axes(self) -> Params:
        """Returns the logical axes of every parameter's dimensions, in trees like `shapes`."""
        return {
            name: logical_axes(tree, self.parts[name].axes, self.parts[name].lists)
            for name, tree in self.shapes().items()
        }

    def read(
        self, folder: pathlib.Path, part: str, shardings: Any = None, dtype: Any = jnp.float32
    ) -> Params:
        """Reads one component's parameters from the pipeline folder directly onto the devices of `shardings`."""
        component, shapes = self.parts[part], self.shapes()[part]
        return weights.read_params(
            folder / part,
            shapes,
            component.lists,
            shardings=shardings,
            dtype=dtype,
            ignore=component.ignored(getattr(self, part)),
            rename=component.renamed,
        )

    def check(self, folder: pathlib.Path, part: str) -> None:
        """Raises ValueError if a component's weights are incomplete or do not fit; reads only headers."""
        component, shapes = self.parts[part], self.shapes()[part]
        ignored = component.ignored(getattr(self, part))
        weights.check_params(folder / part, shapes, component.lists, ignored, component.renamed)


def tokenizer_of(part: str) -> str:
    """Returns the name of a text encoder's tokenizer, such as "tokenizer_2" for "text_encoder_2"."""
    return part.replace("text_encoder", "tokenizer")


def check_tokens(length: int, most: int, why: str) -> None:
    """Checks that `max_sequence_length` is at most `most`; `why` completes the message "... must be at most ...,".

    Raises:
      FieldError: the value is too large; names the config field, because the folder is valid.
    """
    if length > most:
        raise FieldError(
            f"config.model.max_sequence_length must be at most {most}, {why}, not {length}"
        )


def _check_images(record: Record, count: int) -> None:
    images = len(source_images(record))
    if images == count:
        return
    if not count:
        raise ValueError(
            f"the prompt {record['prompt']!r} has an image, but the model was opened without source images: "
            "set the size of source images, or remove the field"
        )
    if images:
        raise ValueError(
            f"the prompt {record['prompt']!r} has {images} images, but the model was opened for {count} per prompt"
        )
    raise ValueError(
        f"the prompt {record['prompt']!r} has no image to edit: add the path of an image"
    )


def _named(folder: pathlib.Path, part: str) -> bool:
    """Returns whether a pipeline's model_index.json names an optional component.

    Raises:
      ValueError: model_index.json names the component, but its folder is missing.
    """
    named = weights.read_model_index(folder).get(part) not in (None, [None, None])
    if named and not (folder / part).is_dir():
        raise ValueError(
            f"{folder / part} is missing, but model_index.json names it: add the folder, or omit it with "
            "config.model.without or with [null, null] in model_index.json"
        )
    return named


def _check_widths(
    folder: pathlib.Path, configs: Mapping[str, Any], widths: Sequence[tuple[str, str, str]]
) -> None:
    """Checks that components fit the transformer (see `PipelineFamily.widths`).

    Raises:
      ValueError: names the file and the number that does not fit.
    """

    def value(part: str, expression: str) -> int:
        name, _, factor = expression.partition(" times ")
        name, _, divisor = name.partition(" / ")
        return getattr(configs[part], name) * int(factor or 1) // int(divisor or 1)

    for part, name, of_transformer in widths:
        if part not in configs:
            continue
        found, expected = value(part, name), value("transformer", of_transformer)
        if found != expected:
            raise ValueError(
                f"{folder / part / 'config.json'}: {name} must be {expected}, the transformer's {of_transformer}, "
                f"and is {found}"
            )


def _init(network: nn.Module, component: Component, key: Array) -> Params:
    return network.init(key, *component.inputs(network.config), method=component.method)["params"]


@functools.cache
def _shapes(network: nn.Module, component: Component) -> Params:
    """Returns the shapes of a component's parameters.

    Cached, because tracing takes seconds, every read of a component needs the shapes, and families share components.
    """
    return jax.eval_shape(functools.partial(_init, network, component), jax.random.key(0))
