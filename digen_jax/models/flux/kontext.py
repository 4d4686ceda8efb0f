"""FLUX.1 Kontext as a family (arXiv 2506.15742): FLUX.1-dev that edits a source image by a prompt.

The source image is encoded by the autoencoder, and its latents are tokens that the transformer attends to together with
those of the image. As in diffusers' `FluxKontextPipeline`, a prompt without source image is sampled like FLUX.1-dev.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from digen_jax.models.autoencoders.autoencoder_kl import encode_images
from digen_jax.models.family import Params, Record, Size, check_image
from digen_jax.models.flux import network as flux
from digen_jax.models.flux.family import Conditioning, Flux, TokenIds
from digen_jax.models.layers import SIDE
from digen_jax.models.linear import exact_products

# `target_modules` of yifan123/flow_grpo, scripts/train_flux_kontext.py (74db691).
LORA_TARGETS = rf"{flux.LORA_TARGETS}|single_transformer_blocks\.\d+\.proj_mlp"
# (height, width) of the training images, as in diffusers' pipeline. If two are equally close to an image's aspect
# ratio, the pipeline takes the narrower one, which comes first here.
PREFERRED = tuple(
    Size(height, width)
    for height, width in (
        (1568, 672), (1504, 688), (1456, 720), (1392, 752), (1328, 800), (1248, 832), (1184, 880), (1104, 944),
        (1024, 1024),
        (944, 1104), (880, 1184), (832, 1248), (800, 1328), (752, 1392), (720, 1456), (688, 1504), (672, 1568),
    )
)  # fmt: skip


class EditConditioning(NamedTuple):
    """Transformer inputs of a prompt and its source image."""

    context: Float[Array, "b n d"]
    pooled: Float[Array, "b p"]
    source: Float[Array, "b h w c"]  # latents


class EditTokens(NamedTuple):
    """Token ids of each prompt from both tokenizers, and its source image."""

    first: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    second: Int[Array, "b m"] | Int[np.ndarray, "b m"]
    image: UInt8[Array, "b 1 h w 3"] | UInt8[np.ndarray, "b 1 h w 3"]


@dataclasses.dataclass(frozen=True)
class FluxKontext(Flux):
    """Networks and tokenizers of one pipeline folder, for prompts with or without source images.

    All source images are stretched to the size `source` with the filter of diffusers' pipeline, because a program is
    compiled for one shape. The pipeline chooses one of `PREFERRED` for each image (see `source_size`). Images have the
    requested size, as in the pipeline if `max_area` is that size's area.

    Raises:
      ValueError: `source` does not fit the networks.
    """

    source: Size | None = None

    pipeline: ClassVar = "FluxKontextPipeline"
    edits: ClassVar[bool] = True
    lora_targets: ClassVar[str] = LORA_TARGETS

    def __post_init__(self):
        if self.source is not None:
            check_image(self.source, self.factor * SIDE)

    @property
    def encoded_prompts(self) -> int:
        """Maximum prompts encoded together."""
        return self.encoded_with_images(Flux.encoded_prompts)

    def tokenize(self, records: Sequence[Record]) -> TokenIds | EditTokens:
        """Returns token ids, padded or truncated to each text encoder's length, and source images.

        Raises:
          ValueError: a source image is missing, unreadable, or unexpected because `source` is None.
        """
        ids, images = super().tokenize(records), self.source_images(records)
        return ids if images is None else EditTokens(*ids, images)

    @exact_products
    def encode(self, params: Params, ids: TokenIds | EditTokens) -> Conditioning | EditConditioning:
        """Returns the conditioning of FLUX.1, and the latent mean of each source image."""
        text = super().encode(params, TokenIds(ids.first, ids.second))
        if self.source is None:
            return text
        images: Any = cast(EditTokens, ids).image[:, 0].astype(jnp.float32) / 255
        return EditConditioning(*text, encode_images(self.vae, params["vae"], images))

    def source_size(self, height: int, width: int, clip: Size) -> Size:
        """Returns the size in `PREFERRED` whose aspect ratio is closest to that of a height x width image."""
        multiple = self.factor * SIDE
        ratio = width // multiple / max(1, height // multiple)
        nearest = min(PREFERRED, key=lambda size: abs(ratio - size.width / size.height))
        return Size(nearest.height // multiple * multiple, nearest.width // multiple * multiple)

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns the transformer's FLOPs by stream, including source image tokens (see `flux.forward_flops`)."""
        tokens = 0
        if self.source is not None:
            tokens = self.source.height * self.source.width // (self.factor * SIDE) ** 2
        config, latent = self.transformer.config, cast(Any, self.latent_shape(size))
        found = flux.forward_flops(config, latent, self.max_sequence_length, tokens)
        return {"transformer": found}
