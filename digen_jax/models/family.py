"""The interface of a model to the rest of the package: a `Family`, for any network.

    records --tokenize (host)--> tokens --encode--> conditioning --velocity--> latents --decode--> clips

A family owns its components, one parameter tree each, and says which of them are trained. An image is a clip of one
frame. Latents stay unpacked with channels last ([b h w c], of videos [b t h w c]); a family packs them into tokens
itself.
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

Params = dict[str, Any]  # one tree for each component
# A line of a prompt file: "prompt", "negative_prompt" (of the pass without the prompt), "image" (the source image of an
# edit), and other fields for a family or a reward.
Record = Mapping[str, Any]
Tokens = Any  # arrays with one row for each record
Conditioning = Any  # arrays with one row for each record, masks included if text lengths differ

# How the prompt's influence is amplified: not at all, by a second pass without the prompt (arXiv 2207.12598), by a
# number that is an input of the network, or by both, which are diffusers' `true_cfg_scale` and `guidance_scale`
# (FluxPipeline, QwenImagePipeline).
Guidance = Literal["none", "classifier-free", "embedded", "both"]


class Size(NamedTuple):
    """The size of a clip, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


def check_image(size: Size, multiple: int, largest: int | None = None) -> None:
    """Refuses a size that does not fit a model of images.

    Args:
      size: of the image.
      multiple: of which both sides must be.
      largest: the longest side. None means unbounded.

    Raises:
      ValueError: names the sizes that fit.
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
    """The networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      trained: the components that may be tuned.
      unused: folders of a repository that need not be downloaded.
      optional: components that the class's `from_folder` can leave out.
      encoders: the components that `encode` reads, each with the folder of its tokenizer, "" if it has none.
      decoders: the components that `decode` reads.
      edits: whether the records of prompts may have a source image to edit, their "image".
      source: the size that source images are resized to; None means records have none.
      masked: fields of the conditioning that have tokens which the network does not attend to, always the last ones,
        each with the field of booleans that says so, False for these; fields of which every token is attended to,
        padding included, are not among them.
      lists: for each component, the modules whose children a checkpoint numbers (see `checkpoints.tensors`).
      frozen: for each component, paths of a trained one's parameters that no optimizer may change.
      lora_targets: the linear layers that LoRA adapts by default, as a regular expression for their whole torch names.
      guidance: how the velocity is guided.
      negative_prompt: of the pass without the prompt, for records that have no "negative_prompt" (see `negative_of`).
      heads: the attention heads of the trained components.
      default_steps: the default number of sampler steps of diffusers' pipeline.
      default_guidance: the default guidance of diffusers' pipeline.
      encoded_prompts: the most prompts that a device encodes together.
      decoded_pixels: the most pixels, over all frames, that a device decodes together, unless one clip has more.
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
        """The same family, whose trained components compute in this dtype."""

    # ------------------------------------------------------------------ records -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """The input of `encode` for some records, on the host."""

    def tokenize_null(self, records: Sequence[Record]) -> Tokens:
        """The tokens of the pass without the prompt: one row for each record, or one for all if they are the same.

        They depend on the negative prompt of each record (`negative_of`) and, if there is a `source`, on its source
        image; then there is a row for each record. Called if `guidance` is "classifier-free" or "both"; no records
        stand for one without a negative prompt.
        """

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Which prompts are longer than a text encoder's input, so that `tokenize` truncates them."""

    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """The conditioning of the network for each record, which depends on its prompt and its source image alone.

        The fields that `masked` names as masks depend on the tokens alone.
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
        """dx/dsigma = eps - x0; `guidance` is given if `self.guidance` is "embedded" or "both".

        `variables` contains the linen collections of each trained component: "params", perhaps "lora".
        """

    def guided(
        self,
        null: Float[Array, "b *latent"],
        prompt: Float[Array, "b *latent"],
        guidance: float,
    ) -> Float[Array, "b *latent"]:
        """Combines the velocities without and with the prompt; `guidance` 1 gives the latter."""

    # ------------------------------------------------------------------------ latents and clips

    def default_size(self) -> Size:
        """The size of the clips that the network was made for, as in diffusers' pipeline."""

    def source_size(self, height: int, width: int) -> Size:
        """The size that diffusers' pipeline gives to a source image of height x width before it is edited.

        Called if the family `edits`.
        """

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """The shape of one clip's latents; raises ValueError if the size does not fit the networks."""

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The schedule of a clip's sampling, from 1 to 0; raises ValueError if it cannot have `steps` steps."""

    def decode(
        self, params: Params, latents: Float[Array, "b *latent"]
    ) -> Float[Array, "b t H W 3"]:
        """Clips in [0, 1]; a long clip is decoded a few frames at a time."""

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """FLOPs of a forward pass of one sequence through each trained component, by the family's own streams.

        They count matrix products and attention, a multiply-add as two. With a second pass a clip is two sequences.
        """

    # ------------------------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, without allocation."""

    def axes(self) -> Params:
        """Trees like `shapes`, with the logical axes of each parameter's dimensions: see `logical_axes`."""

    def read(
        self, folder: pathlib.Path, part: str, shardings: Any = None, dtype: Any = np.float32
    ) -> Params:
        """Reads one component's parameters from the pipeline folder directly onto the devices of `shardings`."""

    def check(self, folder: pathlib.Path, part: str) -> None:
        """Raises ValueError where one component's weights are incomplete or do not fit; only headers are read."""


def negative_of(family: Family, record: Record) -> str:
    """The prompt of a record's pass without its prompt: its own "negative_prompt", or the family's."""
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

# (regex over a module's path, axes of its kernel); the first match decides.
Table = Sequence[tuple[str, tuple[str | None, ...]]]


def logical_axes(shapes: Mapping[str, Any], table: Table, lists: tuple[str, ...]) -> dict[str, Any]:
    """A component's tree with the axes of each leaf, a name or None for every dimension.

    A leaf with fewer dimensions than the table gives has the last of them, as biases and scales have. A leaf
    with more has None in front, for the window of a convolution, after the layers of a scan.

    Raises:
      ValueError: names a parameter that is not in the table.
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
