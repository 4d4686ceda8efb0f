"""Interface between a model and the rest of the package: a `Family`, for any network.

    records --tokenize (host)--> tokens --encode--> conditioning --velocity--> latents --decode--> clips

A family owns its components, one parameter tree each, and declares which of them are trained. An image is a clip of one
frame. Latents are unpacked with channels last ([b h w c], of videos [b t h w c]); a family packs them into tokens
internally.

`Component` and `TransformerConfig` describe the networks of a pipeline folder.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float, Float32, Int

from digen_jax.attention.kernels import Heads
from digen_jax.checkpoints.lora import RANK
from digen_jax.checkpoints.quantization import LARGEST, OTHERS, stored_shapes
from digen_jax.checkpoints.tensors import LAYERS, is_scanned
from digen_jax.diffusion.steps import Ode
from digen_jax.files import fields_of
from digen_jax.images import Size

Params = dict[str, Any]  # one tree per component
# Line of a prompt file: "prompt", "negative_prompt" (for the unconditional pass), "image" (source image of an edit,
# or a list of several), and other fields for a family or a reward.
Record = Mapping[str, Any]
Tokens = Any  # arrays with one row per record
Conditioning = Any  # arrays with one row per record, including masks if text lengths differ

# Guidance method: none, a second pass without the prompt (arXiv 2207.12598), a number as an input of the network, or
# both, which are diffusers' `true_cfg_scale` and `guidance_scale` (FluxPipeline, QwenImagePipeline).
Guidance = Literal["none", "classifier-free", "embedded", "both"]


def check_image(size: Size, multiple: int, largest: int | None = None) -> None:
    """Checks that a size fits an image model.

    Args:
      size: Size of the image.
      multiple: Both sides must be multiples of this.
      largest: Maximum side. None means unbounded.

    Raises:
      ValueError: the size does not fit; the message names valid sizes.
    """
    if size.frames != 1:
        raise ValueError(
            f"a clip of {size.frames} frames does not fit this model, which generates images: set frames to 1"
        )
    _check_sides(size, multiple, largest)


def check_clip(
    size: Size, multiple: int, every: int, largest: int | None = None, longest: int | None = None
) -> None:
    """Checks that a size fits a video model.

    Args:
      size: Size of the clip.
      multiple: Both sides must be multiples of this.
      every: The number of frames must be 1 more than a multiple of this.
      largest: Maximum side. None means unbounded.
      longest: Maximum frames. None means unbounded.

    Raises:
      ValueError: the size does not fit; the message names valid sizes.
    """
    frames = size.frames
    most = longest or max(frames, 1) + every
    if frames < 1 or (frames - 1) % every or frames > most:
        below = min(max(1, frames - (frames - 1) % every), most)
        near = f"{below} or {below + every}" if 0 < frames < most else f"{below}"
        end = f", {longest} or fewer" if longest else ""
        raise ValueError(
            f"a clip of {frames} frames does not fit this model: frames must be 1 more than a multiple of {every}"
            f"{end}: use {near}"
        )
    _check_sides(size, multiple, largest)


def _check_sides(size: Size, multiple: int, largest: int | None) -> None:
    height, width, frames = size
    sides = (height, width)
    if any(side < multiple or side % multiple or side > (largest or side) for side in sides):
        end = f" from {multiple} to {largest}" if largest else f", {multiple} or more"
        raise ValueError(
            f"{'an image' if frames == 1 else 'a clip'} of {height}x{width} does not fit this model: "
            f"height and width must be multiples of {multiple}{end}"
        )


@runtime_checkable
class Family(Protocol):
    """Networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      pipeline: Class of diffusers' pipeline.
      trained: Components that can be trained. Several are experts: equal networks, of which one computes the velocity
        at a noise level (`expert`).
      unused: Folders of a repository that do not need to be downloaded.
      optional: Components that the class's `from_folder` can omit.
      encoders: Components that `encode` reads, with the folder of each tokenizer, or "".
      decoders: Components that `decode` reads.
      edits: Whether prompt records may have a source image to edit, "image".
      source: Size that source images are resized to. None means records have no source image.
      sources: Source images of each record, if it has any.
      masked: Conditioning fields with trailing tokens that are zero or that the network does not attend to, with the
        boolean field that is False for these tokens. They are stored without them, and restored as zeros.
      lists: Modules of each component whose children a checkpoint numbers (see `checkpoints.tensors`).
      frozen: Parameter paths of each trained component that no optimizer may change.
      lora_targets: Linear layers that LoRA adapts by default, as a regular expression for full torch names.
      lora_loader: Call of a method of diffusers' pipeline that reads a LoRA's folder, with {} for the folder.
      guidance: Guidance method of the velocity.
      negative_prompt: Default for records without "negative_prompt" (see `negative_of`).
      heads: Attention heads of the trained components.
      solver: Step without noise of diffusers' pipeline, for evaluation and for generated samples.
      default_steps: Default number of sampler steps of diffusers' pipeline.
      default_guidance: Default guidance of diffusers' pipeline.
      encoded_prompts: Maximum prompts that a device encodes together.
      decoded_pixels: Maximum pixels, over all frames, that a device decodes together, unless one clip has more.
    """

    pipeline: str
    trained: tuple[str, ...]
    unused: tuple[str, ...]
    optional: tuple[str, ...]
    encoders: Mapping[str, str]
    decoders: tuple[str, ...]
    edits: bool
    source: Size | None
    sources: int
    masked: Mapping[str, str]
    lists: Mapping[str, Any]
    frozen: Mapping[str, Sequence[str]]
    lora_targets: str
    lora_loader: str
    guidance: Guidance
    negative_prompt: str
    heads: Heads
    solver: Ode
    default_steps: int
    default_guidance: float
    encoded_prompts: int
    decoded_pixels: int

    def in_dtype(self, dtype: Any) -> "Family":
        """Returns the same family with trained components that compute in `dtype`."""

    def scheduled(self, steps: int, size: Size) -> "Family":
        """Returns the same family for the noise levels of a schedule, if the network's times depend on it.

        Only then can noise levels be mapped to diffusers' times exactly. Other noise levels can be used, too.
        """

    # ------------------------------------------------------------------ records -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """Returns the input of `encode` for records, on the host."""

    def tokenize_null(self, records: Sequence[Record]) -> Tokens:
        """Returns the tokens of the unconditional pass: one row per record, or one row for all if they are the same.

        They depend on each record's negative prompt (`negative_of`) and, with a `source`, on its source image, which
        requires one row per record. Called if `guidance` is "classifier-free" or "both". No records means one record
        without a negative prompt.
        """

    def is_truncated(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Returns which prompts exceed a text encoder's input length, so that `tokenize` truncates them."""

    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """Returns the conditioning of each record, which depends on its prompt and source image alone.

        The mask fields of `masked` depend on the tokens alone.
        """

    # ------------------------------------------------------------------------------ the network

    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b *latent"],
        sigma: Float[Array, "b"],
        conditioning: Conditioning,
        guidance: float | None = None,
    ) -> Float32[Array, "b *latent"]:
        """Returns dx/dsigma = eps - x0. `guidance` is given if `self.guidance` is "embedded" or "both".

        `variables` contains the linen collections of each trained component: "params", optionally "lora". The first of
        several experts computes; `Policy` passes the variables of another one as the first one's.
        """

    def expert(self, sigma: Float[Array, "b"]) -> Int[Array, "b"]:
        """Returns the place in `trained` of the expert of each noise level. Called if there are several."""

    def guided(
        self,
        null: Float[Array, "b *latent"],
        prompt: Float[Array, "b *latent"],
        guidance: float,
    ) -> Float[Array, "b *latent"]:
        """Combines the velocities without and with the prompt; `guidance` 1 returns the latter."""

    # ------------------------------------------------------------------------ latents and clips

    def default_size(self) -> Size:
        """Returns the default clip size of diffusers' pipeline."""

    def source_size(self, height: int, width: int, clip: Size) -> Size:
        """Returns the size to which diffusers' pipeline resizes a source image of height x width for a clip's size.

        Called if the family `edits`.
        """

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Returns the shape of one clip's latents; raises ValueError if the size does not fit the networks."""

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns the sampling schedule of a clip, from 1 to 0; raises ValueError if `steps` is not supported."""

    def complete(
        self, latents: Float[Array, "b *latent"], conditioning: Conditioning
    ) -> Float[Array, "b *latent"]:
        """Returns sampled latents, of which those that a source image determines are replaced by the image's."""

    def decode(
        self, params: Params, latents: Float[Array, "b *latent"]
    ) -> Float[Array, "b t H W 3"]:
        """Returns clips in [0, 1]; a long clip is decoded a few frames at a time."""

    def encode_images(
        self, params: Params, images: Float[Array, "b H W 3"]
    ) -> Float[Array, "b *latent"]:
        """Returns the latents of images in [0, 1]: the means, without noise; the inverse of `decode`.

        Raises:
          ValueError: the family generates clips only.
        """

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns FLOPs of a forward pass of one sequence through each component in it, by the family's streams.

        Counts matrix products and attention, a multiply-add as two. With a second pass a clip is two sequences.
        """

    # ------------------------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """Returns the parameter trees as `jax.ShapeDtypeStruct`, without allocation."""

    def axes(self) -> Params:
        """Returns trees like `shapes` with the logical axes of each parameter's dimensions (see `logical_axes`)."""

    def read(
        self, folder: pathlib.Path, part: str, shardings: Any = None, dtype: Any = np.float32
    ) -> Params:
        """Reads one component's parameters from the pipeline folder directly onto the devices of `shardings`.

        Their shapes and dtypes are `stored_shapes` of the component in `dtype`, so int8 and float8 quantize.
        """

    def check(self, folder: pathlib.Path, part: str) -> None:
        """Raises ValueError if a component's weights are incomplete or do not fit; reads only headers."""


def frozen_dtype(family: Family, part: str, dtype: Any) -> Any:
    """Returns the dtype of a frozen component in a run that stores frozen parameters in `dtype`.

    The autoencoder is not quantized: nearly all of its weights are convolutions.
    """
    return OTHERS if jnp.dtype(dtype) in LARGEST and part in family.decoders else dtype


def frozen_shapes(family: Family, parts: Iterable[str], dtype: Any) -> Params:
    """Returns the shapes of frozen components as they are stored in a run; see `frozen_dtype`."""
    shapes = family.shapes()
    return {part: stored_shapes(shapes[part], frozen_dtype(family, part, dtype)) for part in parts}


def negative_of(family: Any, record: Record) -> str:
    """Returns the record's "negative_prompt", or the family's default."""
    return record.get("negative_prompt", family.negative_prompt)


NAMES = {
    LAYERS: "layers of a scan",
    "embed": "width of a network",
    "heads": "all heads of an attention, times their width",
    "head_dim": "width of one head",
    "mlp": "hidden width of a feed-forward layer",
    "modulation": "shifts, scales and gates side by side",
    "vocab": "tokens of a vocabulary",
    "positions": "positions of tokens",
    "text": "text embeddings, from or to other components",
    "channels": "channels of latents",
    "conv_in": "channels that a convolution reads",
    "conv_out": "channels that a convolution writes",
    RANK: "rank of a LoRA",
}

# (regex over a module's path, axes of its kernel); the first match applies.
Table = Sequence[tuple[str, tuple[str | None, ...]]]


def logical_axes(shapes: Mapping[str, Any], table: Table, lists: tuple[str, ...]) -> dict[str, Any]:
    """Returns a component's tree with the axes of each leaf, a name or None for every dimension.

    A leaf with fewer dimensions than the table specifies, such as a bias or scale, uses the last axes. A leaf with more
    has leading None axes, for the window of a convolution, after the layers of a scan.

    Raises:
      ValueError: a parameter is not in the table.
    """

    def names(path: tuple[str, ...], dimensions: int) -> tuple[str | None, ...]:
        module = "/".join(path[:-1])
        found = next((axes for pattern, axes in table if re.search(pattern, module)), None)
        if found is None:
            raise ValueError(f"{'/'.join(path)} is not in the table of logical axes")
        stack = (LAYERS,) if is_scanned(path, lists) else ()
        own = dimensions - len(stack)
        return (*stack, *(None,) * (own - len(found)), *found[max(0, len(found) - own) :])

    flat = flatten_dict(shapes)
    return unflatten_dict({path: names(path, len(leaf.shape)) for path, leaf in flat.items()})


@dataclasses.dataclass(frozen=True)
class Component:
    """Network of a pipeline folder: its class in the folder's files, and how its parameters are stored.

    Attributes:
      library: Library of its class, "diffusers" or "transformers".
      classes: Accepted class names in that library.
      network: Builds the module from a config and a dtype.
      read_config: Converts the object in config.json to the network's config; raises ValueError.
      inputs: Returns small inputs for a network with this config, for `init`.
      lists: Modules whose children a checkpoint numbers (see `checkpoints.tensors`).
      axes: Logical axes of its kernels (see `family.logical_axes`).
      method: Method of the network that runs all modules. None means `__call__`.
      ignored: Returns patterns of tensors in the files that a network does not read.
      renamed: Maps a tensor's name in a file to its name in this package.
      tokenizer: transformers class of a text encoder's tokenizer; "" for other networks.
      flops: Returns the FLOPs of one sequence by stream, from a transformer's config, the (h, w, c) or (t, h, w, c) of
        its latents, and the tokens of its text, padding included. "image", which may be a video, and "text" are
        per-token operations, "attention" the products of queries, keys and values, "modulation" the operations per
        sequence. Counts matrix products and attention, a multiply-add as two; not norms, softmax, rotations and other
        elementwise operations.
    """

    library: str
    classes: tuple[str, ...]
    network: Callable[..., nn.Module]
    read_config: Callable[[Any], Any]
    inputs: Callable[[Any], tuple[Any, ...]]
    lists: tuple[str, ...]
    axes: Sequence[tuple[str, tuple[str | None, ...]]]
    method: str | None = None
    ignored: Callable[[Any], Sequence[str]] = lambda network: ()
    renamed: Callable[[str], str] | None = None
    tokenizer: str = ""
    flops: Callable[..., dict[str, float]] = lambda *arguments: {}


class TransformerConfig:
    """Base of a frozen dataclass with the fields of a diffusers transformer's config.json, and its defaults.

    Attributes:
      title: Name of the network in error messages.
      absent: Values of fields that a file lacks, where they differ from the class's defaults.
      unread: Fields of files that diffusers' network does not read.
    """

    title: ClassVar[str]
    absent: ClassVar[Mapping[str, Any]] = {}
    unread: ClassVar[tuple[str, ...]] = ()
    in_channels: int

    @property
    def dim(self: Any) -> int:
        """Width of the transformer."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads diffusers' config.json, ignoring keys that start with an underscore.

        Raises a ValueError that names an unknown key or a key with an unsupported value.
        """
        config = {**cls.absent, **{k: v for k, v in config.items() if k not in cls.unread}}
        if config.get("out_channels", 0) is None:
            config["out_channels"] = config.get("in_channels", cls.in_channels)
        return cls(**fields_of(cls, config, cls.title))

    def check_packed(self, *names: str) -> None:
        """Raises ValueError if a channel count is not that of tokens of 2 x 2 latents."""
        for name in names:
            if getattr(self, name) % 4:
                raise ValueError(
                    f"{name} must be a multiple of 4, of the 2 x 2 latents of a token, not {getattr(self, name)}."
                )

    def check_rope(self: Any, axes: int, field: str = "axes_dims_rope") -> None:
        """Raises ValueError if a head's channels are not split over `axes` position axes."""
        widths = getattr(self, field)
        positive = all(width > 0 and width % 2 == 0 for width in widths)
        if len(widths) != axes or not positive or sum(widths) != self.attention_head_dim:
            raise ValueError(
                f"{field} must be {axes} even numbers whose sum is attention_head_dim = "
                f"{self.attention_head_dim}, not {list(widths)}."
            )
