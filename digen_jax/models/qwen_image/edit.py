"""Qwen-Image-Edit 2509 and 2511 as a family: prompts with one or several source images to edit.

The language model reads a prompt with the images, in about 384 x 384 pixels, and its states condition the transformer.
The transformer also attends to the images' latents as tokens. As in diffusers' `QwenImageEditPlusPipeline`.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8
from PIL import Image

from digen_jax.files import read_json
from digen_jax.models.autoencoders import autoencoder_wan
from digen_jax.models.family import Params, Record, Size, check_image
from digen_jax.models.layers import SIDE
from digen_jax.models.linear import exact_products
from digen_jax.models.qwen_image import network as qwen_image
from digen_jax.models.qwen_image.family import QwenImage
from digen_jax.models.text import tokenizers
from digen_jax.models.text.language_model import ImageLayout
from digen_jax.models.vision import preprocess, qwen_vl

# Pixels of a source image for the language model and for the autoencoder, and the multiple of both sides:
# CONDITION_IMAGE_SIZE, VAE_IMAGE_SIZE and `calculate_dimensions` of diffusers' pipeline_qwenimage_edit_plus.py.
VISION_AREA, SOURCE_AREA, MULTIPLE = 384 * 384, 1024 * 1024, 32
# Text before the prompt for each image; `PLACE` is repeated for each of its tokens.
PICTURE = "Picture {}: <|vision_start|>{}<|vision_end|>"
PLACE = "<|image_pad|>"


class EditConditioning(NamedTuple):
    """Transformer inputs of a prompt and its source images.

    Attributes:
      context: States of the prompt's tokens, of the images in it, and of trailing padding.
      mask: False for padding, which the transformer does not attend to.
      source: Latents of the source images.
    """

    context: Float[Array, "b n d"]
    mask: Bool[Array, "b n"]
    source: Float[Array, "b s h w c"]


class EditTokens(NamedTuple):
    """Token ids of each prompt's chat, their mask, and its images for the autoencoder and for the language model."""

    ids: Int[Array, "b n"] | Int[np.ndarray, "b n"]
    mask: Bool[Array, "b n"] | Bool[np.ndarray, "b n"]
    images: UInt8[Array, "b s h w 3"] | UInt8[np.ndarray, "b s h w 3"]
    seen: UInt8[Array, "b s h2 w2 3"] | UInt8[np.ndarray, "b s h2 w2 3"]


@dataclasses.dataclass(frozen=True)
class QwenImageEdit(QwenImage):
    """Networks, tokenizer and image processor of one pipeline folder; every prompt has source images.

    All source images have the size `source`, because a program is compiled for one shape; the pipeline chooses a size
    for each (see `source_size`). The size for the language model depends on the aspect ratio of `source` alone.

    Attributes:
      max_sequence_length: Tokens of a prompt and of the chat's suffix, without those of images.
      processor: Preprocessing of images for the language model.
    """

    text_encoder: qwen_vl.VisionLanguageModel
    source: Size | None = None
    sources: int = 1
    processor: qwen_vl.VisionProcessor = dataclasses.field(default_factory=qwen_vl.VisionProcessor)

    pipeline: ClassVar = "QwenImageEditPlusPipeline"
    parts: ClassVar = {**QwenImage.parts, "text_encoder": qwen_vl.COMPONENT}
    template: ClassVar = (
        "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
        "background), then explain how the user's text instruction should alter or modify the image. Generate a new "
        "image that meets the user's requirements while maintaining consistency with the original input where "
        "appropriate.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    )
    dropped: ClassVar = 64
    tokenizer_folder: ClassVar[str] = "processor"
    edits: ClassVar[bool] = True

    def __post_init__(self):
        if self.source is not None:
            check_image(self.source, self.factor * SIDE)
            self._grid(self.source)

    @classmethod
    def classes(cls, without: Sequence[str] = ()) -> dict[str, tuple[str | None, ...]]:
        """Returns the classes in model_index.json (see `PipelineFamily.classes`)."""
        kinds = "Qwen2VLProcessor", "Qwen2_5_VLProcessor"
        return {**super().classes(without), cls.tokenizer_folder: ("transformers", *kinds)}

    @classmethod
    def read_tokenizers(
        cls, folder: pathlib.Path, configs: Mapping[str, Any], tokens: int
    ) -> dict[str, Any]:
        """Reads the processor: its tokenizer, which must have the marks of images, and its settings."""
        found = super().read_tokenizers(folder, configs, tokens)
        folder = folder / cls.tokenizer_folder
        tokenizers.check_marks(folder, found["tokenizer"], PICTURE.format("", PLACE))
        # transformers 5 saves the settings in the second file.
        path = folder / "preprocessor_config.json"
        if path.exists():
            settings = read_json(path)
        else:
            path = folder / "processor_config.json"
            settings = read_json(path).get("image_processor") or {}
        side = configs["text_encoder"].vision.side
        if settings.get("patch_size", 14) * settings.get("merge_size", 2) != side:
            raise ValueError(
                f"{path}: patch_size times merge_size must be {side}, as in the config.json of text_encoder"
            )
        try:
            return found | {"processor": qwen_vl.VisionProcessor.from_config(settings)}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @property
    def encoders(self) -> Mapping[str, str]:
        """Language model, with the folder of its tokenizer and image processor, and autoencoder."""
        return {"text_encoder": self.tokenizer_folder, "vae": ""}

    @property
    def encoded_prompts(self) -> int:
        """Maximum prompts encoded together."""
        return self.encoded_with_images(QwenImage.encoded_prompts)

    # ---------------------------------------------------------------- prompts

    def _chats(self, prompts: Sequence[str]) -> list[str]:
        return super()._chats([self._pictures + prompt for prompt in prompts])

    @property
    def _pictures(self) -> str:
        """Text before the prompt, with a token for each token of images."""
        if self.source is None:
            return ""
        places = PLACE * math.prod(self._grid(self.source))
        return "".join(PICTURE.format(1 + i, places) for i in range(self.sources))

    def _before(self, text: str) -> Int[np.ndarray, "n"]:
        """Returns the tokens of a chat up to `text`, inclusive."""
        return np.asarray(self.tokenizer(self.template.partition("{}")[0] + text)["input_ids"])

    @property
    def context_tokens(self) -> int:
        """Tokens that the transformer reads as text: those of images, of the prompt, and padding."""
        images = len(self._before(self._pictures)) - len(self._before(""))
        return self.max_sequence_length + images

    def _layout(self, source: Size) -> ImageLayout:
        """Returns the places of the images' tokens in a chat."""
        rows, columns = self._grid(source)
        is_place = self._before(self._pictures) == self.tokenizer.convert_tokens_to_ids(PLACE)
        starts = np.flatnonzero(is_place)[:: rows * columns]
        sections = self.text_encoder.config.mrope_section
        return ImageLayout(tuple(map(int, starts)), rows, columns, sections)

    def tokenize(self, records: Sequence[Record]) -> EditTokens:  # type: ignore[override]
        """Returns token ids of each prompt's chat, padded or truncated, and source images.

        Raises:
          ValueError: an image is missing or unreadable, or there is no `source`.
        """
        if self.source is None:
            raise ValueError(
                "this model edits images: set config.model.source_height and config.model.source_width to the size "
                'of source images, and give each prompt an "image"'
            )
        found = cast(list[list[Image.Image]], self.read_sources(records))
        images = np.stack([[self.fit_source(image) for image in row] for row in found])
        seen = np.stack([[self._fit_seen(image) for image in row] for row in found])
        return EditTokens(*super().tokenize(records), images, seen)

    @exact_products
    def encode(self, params: Params, tokens: EditTokens) -> EditConditioning:  # type: ignore[override]
        """Returns the hidden states after the dropped tokens, the padding mask, and the source images' latents."""
        pixels = preprocess.scaled(jnp.asarray(tokens.seen), self.processor.pixels)
        layout = self._layout(cast(Size, self.source))
        inputs = tokens.ids, tokens.mask, pixels, layout
        (states,) = cast(Any, self.text_encoder).apply({"params": params["text_encoder"]}, *inputs)
        images = jnp.asarray(tokens.images).astype(jnp.float32) / 255
        flat = images.reshape(-1, 1, *images.shape[2:])
        latents = autoencoder_wan.encode_clips(self.vae, params["vae"], flat)
        latents = latents.reshape(*images.shape[:2], *latents.shape[2:])
        mask = jnp.asarray(tokens.mask)[:, self.dropped :]
        return EditConditioning(states[:, self.dropped :], mask, latents)

    def flops(self, size: Size) -> dict[str, dict[str, float]]:
        """Returns the transformer's FLOPs by stream, including source image tokens (see `forward_flops`)."""
        tokens = 0
        if self.source is not None:
            pixels = self.source.height * self.source.width
            tokens = self.sources * pixels // (self.factor * SIDE) ** 2
        config, latent = self.transformer.config, cast(Any, self.latent_shape(size))
        found = qwen_image.forward_flops(config, latent, self.context_tokens, tokens)
        return {"transformer": found}

    # ---------------------------------------------------------------- source images

    def source_size(self, height: int, width: int, clip: Size) -> Size:
        """Returns the size of about `SOURCE_AREA` pixels and the same aspect ratio."""
        return _of_area(SOURCE_AREA, height, width)

    def fit_source(self, image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
        """Returns a source image in the size `source`, for the autoencoder."""
        return np.asarray(self._fit(image, cast(Size, self.source)))

    def _fit_seen(self, image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
        """Returns a source image for the language model."""
        source = cast(Size, self.source)
        small = self._fit(image, _of_area(VISION_AREA, source.height, source.width))
        return self.processor.resize(small, self._grid(source), self._side)

    def _fit(self, image: Image.Image, size: Size) -> Image.Image:
        """Returns an image in `size` with the filter of diffusers' pipeline.

        It is stretched if the pipeline would choose the aspect ratio of `source`, too. Otherwise its center is used.
        """
        source, width, height = cast(Size, self.source), image.width, image.height
        areas = SOURCE_AREA, source.height * source.width
        if source[:2] in [_of_area(area, height, width)[:2] for area in areas]:
            left, top = 0.0, 0.0
        else:
            scale = max(source.width / width, source.height / height)
            left, top = (width - source.width / scale) / 2, (height - source.height / scale) / 2
        box = left, top, width - left, height - top
        return image.resize((size.width, size.height), Image.Resampling.LANCZOS, box)

    @property
    def _side(self) -> int:
        return self.text_encoder.config.vision.side

    def _grid(self, source: Size) -> qwen_vl.Grid:
        """Returns the rows and columns of tokens of a source image in the language model."""
        size = _of_area(VISION_AREA, source.height, source.width)
        return self.processor.grid(size.height, size.width, self._side)


def _of_area(area: int, height: int, width: int) -> Size:
    """Returns a size of about `area` pixels and the same aspect ratio."""
    ratio = width / height
    wide = math.sqrt(area * ratio)
    return Size(round(wide / ratio / MULTIPLE) * MULTIPLE, round(wide / MULTIPLE) * MULTIPLE)
