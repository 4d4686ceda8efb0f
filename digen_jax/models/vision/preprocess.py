"""Preprocessing of uint8 images for CLIP, on the device, matching three libraries.

| function    | equivalent                                                      | resizes | rounds to bytes |
| ----------- | --------------------------------------------------------------- | ------- | --------------- |
| pil_crop    | transformers' CLIPImageProcessorPil                             | the shorter side, crops | yes |
| tensor_crop | torchvision's Resize and CenterCrop of a floating-point tensor  | the shorter side, crops | no |
| tensor_pad  | HPSv2's ResizeMaxSize of a floating-point tensor                | the longer side, pads   | no |

Images may also be floating-point numbers in [0, 1]: nothing is rounded then, so that there is a gradient.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Num, UInt8
from PIL import Image

Filter = Literal["bilinear", "bicubic"]

SUPPORT: dict[Filter, float] = {"bilinear": 1.0, "bicubic": 2.0}
# Fractional bits of Pillow's fixed-point weights.
PRECISION = 22
# Weights are split into two integers, of which the lower has this number of bits. Products of each with bytes, and
# their sums, are exact in float32.
LOWER = 11
EXACT = 2**24


def _filter(kind: Filter, x: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n m"]:
    """Evaluates a triangle filter, or Keys' cubic with a = -0.5 (IEEE TASSP 29, 1981)."""
    x = np.abs(x)
    if kind == "bilinear":
        return np.maximum(1 - x, 0)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0))


@functools.cache
def weights(kind: Filter, before: int, after: int) -> Float[np.ndarray, "after before"]:
    """Returns the weight of each pixel of a row in each pixel of the resized row, in float64."""
    scale = before / after
    wider = max(scale, 1.0)
    support = SUPPORT[kind] * wider
    centre = (np.arange(after)[:, None] + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(int), 0)
    last = np.minimum((centre + support + 0.5).astype(int), before)
    pixel = np.arange(before)[None, :]
    found = _filter(kind, (pixel - centre + 0.5) * (1 / wider))
    found = np.where((pixel >= first) & (pixel < last), found, 0)
    return found / found.sum(axis=1, keepdims=True)


def resize_bytes(
    images: UInt8[Array, "b h w 3"], height: int, width: int, kind: Filter
) -> UInt8[Array, "b {height} {width} 3"]:
    """Resizes images with exactly the bytes of Pillow's `Image.resize` (up to Pillow 12), on any device.

    Raises:
      ValueError: images are too large for exact products, about 16 times the new size.
    """
    x = _pass(images.astype(jnp.float32), 2, width, kind)
    return _pass(x, 1, height, kind).astype(jnp.uint8)


def _pass(
    x: Float32[Array, "b h w 3"], axis: int, size: int, kind: Filter
) -> Float32[Array, "..."]:
    """Resizes along one axis; values are integers from 0 to 255 before and after it."""
    if x.shape[axis] == size:
        return x
    exact = weights(kind, x.shape[axis], size) * 2**PRECISION
    rounded = np.trunc(exact + np.copysign(0.5, exact)).astype(np.int64)
    upper = (rounded + 2 ** (LOWER - 1)) >> LOWER
    lower = rounded - (upper << LOWER)
    if max(np.abs(part).sum(axis=1).max() for part in (upper, lower)) * 255 >= EXACT:
        raise ValueError(
            f"a side of {x.shape[axis]} pixels cannot be resized to {size} as Pillow does it: give smaller images"
        )
    high, low = (_weighted(part, x, axis).astype(jnp.int32) for part in (upper, lower))
    half: Int32[Array, ""] = jnp.int32(2 ** (PRECISION - 1))
    total = (high << LOWER) + low + half
    return jnp.clip(total >> PRECISION, 0, 255).astype(jnp.float32)


def resize(
    images: Float[Array, "b h w 3"], height: int, width: int, kind: Filter
) -> Float32[Array, "b {height} {width} 3"]:
    """Resizes floating-point images as torchvision's `resize(antialias=True)`; bicubic may exceed their range."""
    x = images.astype(jnp.float32)
    for axis, size in ((2, width), (1, height)):
        if x.shape[axis] != size:
            x = _weighted(weights(kind, x.shape[axis], size), x, axis)
    return x


def _weighted(matrix: np.ndarray, x: Float32[Array, "b h w 3"], axis: int) -> Float32[Array, "..."]:
    equation = {1: "oh,bhwc->bowc", 2: "ow,bhwc->bhoc"}[axis]
    weights = jnp.asarray(matrix, jnp.float32)
    return jnp.einsum(equation, weights, x, precision=jax.lax.Precision.HIGHEST)


# OpenAI's pixel statistics, the defaults of transformers and open_clip.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
# Numbers of Pillow's filters in preprocessor_config.json.
FILTERS: dict[int, Filter] = {2: "bilinear", 3: "bicubic"}


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Settings of an image processor that do not depend on sizes.

    Attributes:
      kind: Resize filter.
      scale: Factor that bytes are multiplied by.
      mean: Mean of each channel.
      std: Standard deviation of each channel.
    """

    kind: Filter = "bicubic"
    scale: float = 1 / 255
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Pixels":
        """Reads the settings from a preprocessor_config.json, with transformers' defaults.

        Raises:
          ValueError: names a field with an unsupported value.
        """
        _check_steps(config, "do_resize", "do_rescale", "do_normalize")
        number = config.get("resample", 3)
        if isinstance(number, bool) or number not in FILTERS:
            raise ValueError(f"resample must be 2 (bilinear) or 3 (bicubic), not {number!r}")
        scale = config.get("rescale_factor", 1 / 255)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
            raise ValueError(f"rescale_factor must be between 0 and 1, not {scale!r}")
        mean = _channels(config, "image_mean", MEAN, -10.0)
        return Pixels(FILTERS[number], scale, mean, _channels(config, "image_std", STD, 1e-3))


@dataclasses.dataclass(frozen=True)
class Processor(Pixels):
    """Settings of a CLIPImageProcessor.

    Attributes:
      edge: Pixels of the shorter side after resizing.
      size: Pixels of each side after cropping.
    """

    edge: int = 224
    size: int = 224

    def __post_init__(self):
        if self.edge < self.size:
            raise ValueError(
                f"crop_size {self.size} must be at most the shortest edge, {self.edge}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Processor":
        """Reads the processor from a preprocessor_config.json, with transformers' defaults.

        Raises:
          ValueError: names a field with an unsupported value.
        """
        _check_steps(config, "do_center_crop")
        return cls(
            **dataclasses.asdict(Pixels.from_config(config)),
            edge=_side(config, "size", ("shortest_edge",)),
            size=_side(config, "crop_size", ("height", "width")),
        )


def _check_steps(config: Mapping[str, Any], *steps: str) -> None:
    for step in steps:
        if config.get(step, True) is not True:
            raise ValueError(f"{step} must be true, not {config[step]!r}")


def _side(config: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> int:
    """Reads a number of pixels, or an object with the same number for each key."""
    found = config.get(name, 224)
    sides = [found.get(key) for key in keys] if isinstance(found, dict) else [found]
    if isinstance(found, dict) and set(found) != set(keys):
        sides = []
    first = sides[0] if sides else None
    if isinstance(first, bool) or not isinstance(first, int) or not 0 < first <= 2**14:
        raise ValueError(f"{name} must give {' and '.join(keys)} in pixels, not {found!r}")
    if sides != [first] * len(sides):
        raise ValueError(f"{name} must be a square, not {found!r}")
    return first


def _channels(
    config: Mapping[str, Any], name: str, default: tuple[float, ...], least: float
) -> tuple[float, ...]:
    found = config.get(name, default)
    numbers = isinstance(found, list | tuple) and len(found) == 3
    if not numbers or not all(isinstance(x, int | float) and least <= x <= 10 for x in found):
        raise ValueError(f"{name} must be three numbers, of red, green and blue, not {found!r}")
    return tuple(map(float, found))


def crop_image(image: Image.Image, processor: Processor) -> UInt8[np.ndarray, "s s 3"]:
    """Resizes and crops one image on the host, as `CLIPImageProcessorPil`."""
    height, width = _shorter((image.height, image.width), processor.edge)
    resized = np.asarray(image.resize((width, height), Image.Resampling[processor.kind.upper()]))
    top, left = (height - processor.size) // 2, (width - processor.size) // 2
    return resized[top : top + processor.size, left : left + processor.size]


def scaled(images: Num[Array, "b h w 3"], processor: Pixels) -> Float32[Array, "b h w 3"]:
    """Scales and normalizes resized images."""
    return normalised(images.astype(jnp.float32) * processor.scale, processor)


def pil_crop(images: Num[Array, "b h w 3"], processor: Processor) -> Float32[Array, "b s s 3"]:
    """Applies `CLIPImageProcessorPil`: bytes are exact, normalized values are equal up to float32 rounding."""
    height, width = _shorter(images.shape[1:3], processor.edge)
    if images.dtype == jnp.uint8:
        x = resize_bytes(images, height, width, processor.kind)
    else:
        x = jnp.clip(resize(images, height, width, processor.kind), 0, 1) * 255
    size = processor.size
    x = _cropped(x, (height - size) // 2, (width - size) // 2, size)
    return scaled(x, processor)


def tensor_crop(
    images: Num[Array, "b h w 3"], processor: Processor, kind: Filter
) -> Float32[Array, "b s s 3"]:
    """Applies torchvision's `Resize(edge, kind)` and `CenterCrop(size)` to images in [0, 1], then normalizes."""
    height, width = _shorter(images.shape[1:3], processor.edge)
    x = resize(_unit(images), height, width, kind)
    size = processor.size
    # Rounded half to even, unlike transformers' crop.
    top, left = (round((side - size) / 2) for side in (height, width))
    return normalised(_cropped(x, top, left, size), processor)


def tensor_pad(images: Num[Array, "b h w 3"], processor: Processor) -> Float32[Array, "b s s 3"]:
    """Applies HPSv2's `ResizeMaxSize`: resizes the longer side, pads the shorter side with black, and normalizes."""
    before, size = images.shape[1:3], processor.size
    scale = size / max(before)
    height, width = (round(side * scale) for side in before)
    x = resize(_unit(images), height, width, processor.kind)
    bars = [(size - side, (size - side) // 2) for side in (height, width)]
    pads = [(first, total - first) for total, first in bars]
    return normalised(jnp.pad(x, ((0, 0), *pads, (0, 0))), processor)


def _unit(images: Num[Array, "b h w 3"]) -> Float32[Array, "b h w 3"]:
    """Returns images in [0, 1]."""
    values = images.astype(jnp.float32)
    return values / 255 if images.dtype == jnp.uint8 else values


def normalised(x: Float32[Array, "b h w 3"], processor: Pixels) -> Float32[Array, "b h w 3"]:
    """Returns (x - mean) / std of each channel."""
    return (x - np.asarray(processor.mean, np.float32)) / np.asarray(processor.std, np.float32)


def _shorter(sides: tuple[int, ...], edge: int) -> tuple[int, int]:
    """Returns height and width with `edge` pixels on the shorter side; the longer side is rounded down."""
    shorter = min(sides)
    height, width = (edge if side == shorter else int(edge * side / shorter) for side in sides)
    return height, width


def _cropped(x: Array, top: int, left: int, size: int) -> Array:
    return x[:, top : top + size, left : left + size]
