"""Interface between a model and the rest of the package: a `Family`, for any network.

    records --tokenize (host)--> tokens --encode--> conditioning --velocity--> latents --decode--> clips

A family owns its components, one parameter tree each, and declares which of them are trained. An image is a clip of one
frame. Latents are unpacked with channels last ([b h w c], of videos [b t h w c]); a family packs them into tokens
internally.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float, Float32

from digen_jax.attention.kernels import Heads
from digen_jax.checkpoints.lora import RANK
from digen_jax.checkpoints.tensors import LAYERS, is_scanned

Params = dict[str, Any]  # one tree per component
# Line of a prompt file: "prompt", "negative_prompt" (for the unconditional pass), "image" (source image of an edit),
# and other fields for a family or a reward.
Record = Mapping[str, Any]
Tokens = Any  # arrays with one row per record
Conditioning = Any  # arrays with one row per record, including masks if text lengths differ

# Guidance method: none, a second pass without the prompt (arXiv 2207.12598), a number as an input of the network, or
# both, which are diffusers' `true_cfg_scale` and `guidance_scale` (FluxPipeline, QwenImagePipeline).
Guidance = Literal["none", "classifier-free", "embedded", "both"]


class Size(NamedTuple):
    """Size of a clip, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


def check_image(size: Size, multiple: int, largest: int | None = None) -> None:
    """Checks that a size fits an image model.

    Args:
      size: Size of the image.
      multiple: Both sides must be multiples of this.
      largest: Maximum side. None means unbounded.

    Raises:
      ValueError: the size does not fit; the message names valid sizes.
    """
    height, width, frames = size
    if frames != 1:
        raise ValueError(f"a clip of {frames} frames does not fit this model, which makes images")
    sides = (height, width)
    if any(side < multiple or side % multiple or side > (largest or side) for side in sides):
        end = f" from {multiple} to {largest}" if largest else f", {multiple} or more"
        raise ValueError(
            f"an image of {height}x{width} does not fit this model: "
            f"height and width must be multiples of {multiple}{end}"
        )


@runtime_checkable
class Family(Protocol):
    """Networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      trained: Components that can be trained.
      unused: Folders of a repository that do not need to be downloaded.
      optional: Components that the class's `from_folder` can omit.
      encoders: Components that `encode` reads, with the folder of each tokenizer, or "".
      decoders: Components that `decode` reads.
      edits: Whether prompt records may have a source image to edit, "image".
      source: Size that source images are resized to. None means records have no source image.
      masked: Conditioning fields with trailing tokens that the network does not attend to, with the boolean field that
        is False for these tokens. Fields whose tokens are all attended to, padding included, are omitted.
      lists: Modules of each component whose children a checkpoint numbers (see `checkpoints.tensors`).
      frozen: Parameter paths of each trained component that no optimizer may change.
      lora_targets: Linear layers that LoRA adapts by default, as a regular expression for full torch names.
      guidance: Guidance method of the velocity.
      negative_prompt: Default for records without "negative_prompt" (see `negative_of`).
      heads: Attention heads of the trained components.
      default_steps: Default number of sampler steps of diffusers' pipeline.
      default_guidance: Default guidance of diffusers' pipeline.
      encoded_prompts: Maximum prompts that a device encodes together.
      decoded_pixels: Maximum pixels, over all frames, that a device decodes together, unless one clip has more.
    """

    trained: tuple[str, ...]
    unused: tuple[str, ...]
    optional: tuple[str, ...]
    encoders: Mapping[str, str]
    decoders: tuple[str, ...]
    edits: bool
    source: Size | None
    masked: Mapping[str, str]
    lists: Mapping[str, Any]
    frozen: Mapping[str, Sequence[str]]
    lora_targets: str
    guidance: Guidance
    negative_prompt: str
    heads: Heads
    default_steps: int
    default_guidance: float
    encoded_prompts: int
    decoded_pixels: int

    def in_dtype(self, dtype: Any) -> "Family":
        """Returns the same family with trained components that compute in `dtype`."""

    # ------------------------------------------------------------------ records -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """Returns the input of `encode` for records, on the host."""

    def tokenize_null(self, records: Sequence[Record]) -> Tokens:
        """Returns the tokens of the unconditional pass: one row per record, or one row for all if they are the same.

        They depend on each record's negative prompt (`negative_of`) and, with a `source`, on its source image, which
        requires one row per record. Called if `guidance` is "classifier-free" or "both". No records means one record
        without a negative prompt.
        """

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
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

        `variables` contains the linen collections of each trained component: "params", optionally "lora".
        """

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

    def source_size(self, height: int, width: int) -> Size:
        """Returns the size to which diffusers' pipeline resizes a source image of height x width.

        Called if the family `edits`.
        """

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Returns the shape of one clip's latents; raises ValueError if the size does not fit the networks."""

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """Returns the sampling schedule of a clip, from 1 to 0; raises ValueError if `steps` is not supported."""

    def decode(
        self, params: Params, latents: Float[Array, "b *latent"]
    ) -> Float[Array, "b t H W 3"]:
        """Returns clips in [0, 1]; a long clip is decoded a few frames at a time."""

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns FLOPs of a forward pass of one sequence through each trained component, by the family's streams.

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
        """Reads one component's parameters from the pipeline folder directly onto the devices of `shardings`."""

    def check(self, folder: pathlib.Path, part: str) -> None:
        """Raises ValueError if a component's weights are incomplete or do not fit; reads only headers."""


def negative_of(family: Family, record: Record) -> str:
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
