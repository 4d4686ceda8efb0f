"""What the rest of the package sees of a model: a `Family`, whichever network it is.

    records --tokenize (host)--> tokens --encode--> conditioning --velocity--> latents --decode--> clips

A family owns its components, one parameter tree each, and says which of them are trained. A picture is a clip of one
frame. Latents stay unpacked with channels last ([b h w c], of videos [b t h w c]): packing them into tokens is the
family's own business.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Float32

Params = dict[str, Any]  # a tree for each component
Record = Mapping[
    str, Any
]  # a line of a prompt file: "prompt", and what else a family or a reward reads
Tokens = Any  # arrays with a row for each record
Conditioning = (
    Any  # arrays with a row for each record, masks among them where a text's length differs
)

# How a prompt is made to count for more: not at all, by a second pass without it (arXiv 2207.12598), by a number that
# the network is given, or by both, which are diffusers' `true_cfg_scale` and `guidance_scale` (FluxPipeline,
# QwenImagePipeline).
Guidance = Literal["none", "classifier-free", "embedded", "both"]


class Size(NamedTuple):
    """Of a clip, in pixels and frames."""

    height: int
    width: int
    frames: int = 1


@runtime_checkable
class Family(Protocol):
    """The networks and tokenizers of one pipeline folder; parameters are passed to each call.

    Attributes:
      trained: the components that may be tuned.
      unused: folders of a repository that need not be downloaded.
      lists: by component, the modules whose children a checkpoint numbers (see `weights.names`).
      frozen: by component, paths of a trained one's parameters that no optimizer may touch.
      lora_targets: the linear layers that LoRA adapts by default, a regular expression for their whole torch names.
      guidance: how the velocity is guided.
      default_steps: of the sampler, where diffusers' pipeline is not told otherwise.
      default_guidance: the same.
      decoded_pixels: of all frames of the clips that a device decodes at a time, at most, unless one has more.
    """

    trained: tuple[str, ...]
    unused: tuple[str, ...]
    lists: Mapping[str, Any]
    frozen: Mapping[str, Sequence[str]]
    lora_targets: str
    guidance: Guidance
    default_steps: int
    default_guidance: float
    decoded_pixels: int

    def in_dtype(self, dtype: Any) -> "Family":
        """The same, but what is trained computes in this type."""

    # ------------------------------------------------------------------ records -> conditioning

    def tokenize(self, records: Sequence[Record]) -> Tokens:
        """What `encode` reads of some records, on the host."""

    def tokenize_null(self, records: Sequence[Record]) -> Tokens:
        """The same for guidance: a row for each record, or one for all where it does not depend on them.

        Asked where `guidance` is "classifier-free" or "both".
        """

    def cut(self, prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
        """Which prompts are longer than a text encoder reads, so that `tokenize` cuts them off."""

    def encode(self, params: Params, tokens: Tokens) -> Conditioning:
        """What the network sees of each record."""

    # ------------------------------------------------------------------------------ the network

    def velocity(
        self,
        variables: Params,
        x: Float[Array, "b *latent"],
        sigma: Float[Array, "b"],
        conditioning: Conditioning,
        guidance: float | None = None,
    ) -> Float32[Array, "b *latent"]:
        """dx/dsigma = eps - x0; `guidance` where that is "embedded" or "both".

        `variables` holds the linen collections of each trained component: "params", perhaps "lora".
        """

    def guided(
        self,
        null: Float[Array, "b *latent"],
        prompt: Float[Array, "b *latent"],
        guidance: float,
    ) -> Float[Array, "b *latent"]:
        """The velocity of a second pass from those without and with the prompt, which `guidance` 1 leaves as it is."""

    # ------------------------------------------------------------------------ latents and clips

    def default_size(self) -> Size:
        """Of the clips that the network was made for, as diffusers' pipeline takes them."""

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Of one clip's latents; ValueError where the size does not fit the networks."""

    def sigmas(self, steps: int, size: Size) -> Float32[np.ndarray, "sigmas"]:
        """The schedule of a clip's sampling, from 1 to 0; ValueError where it cannot have so many steps."""

    def decode(
        self, params: Params, latents: Float[Array, "b *latent"]
    ) -> Float[Array, "b t H W 3"]:
        """Clips in [0, 1]; of a long one only some frames in memory at a time."""

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Of a forward pass of one sequence through each trained component, by the family's own streams.

        Matrix products and attention, a multiply-add being two. A clip with classifier-free guidance is two sequences.
        """

    # ------------------------------------------------------------------------------- parameters

    def shapes(self) -> Params:
        """The parameter trees as `jax.ShapeDtypeStruct`, nothing allocated."""

    def axes(self) -> Params:
        """Trees as `shapes`, of the logical axes of each parameter's dimensions: see `logical_axes`."""

    def read(
        self, folder: pathlib.Path, part: str, shardings: Any = None, dtype: Any = np.float32
    ) -> Params:
        """One component's parameters from the pipeline folder, straight onto the devices of `shardings`."""
