"""Images as arrays: the rule that makes bytes of them, for files and rewards, and pictures that models edit."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image, ImageOps

from digen_jax.errors import DivergedError

# A picture's file, or the picture itself.
ImageSource = str | os.PathLike[str] | Image.Image


def middle_frames(clips: Num[np.ndarray, "*b t h w 3"]) -> Num[np.ndarray, "*b h w 3"]:
    """The middle frame of each clip; for a picture, which has one frame, the picture."""
    return clips[..., clips.shape[-4] // 2, :, :, :]


def reward_input(clips: UInt8[np.ndarray, "b t h w 3"]) -> UInt8[np.ndarray, "b ..."]:
    """The rewards' input: pictures [b h w 3] where clips have one frame, else the clips."""
    return clips[:, 0] if clips.shape[1] == 1 else clips


def to_uint8(images: Num[np.ndarray, "*b h w 3"]) -> UInt8[np.ndarray, "*b h w 3"]:
    """Images in [0, 1] as bytes, clipped and rounded; images that are bytes stay as they are.

    Raises:
      ValueError: an image holds a NaN.
    """
    if images.dtype == np.uint8:
        return images
    if np.isnan(images.min(initial=0)):
        raise ValueError("an image holds NaN: the sampler or the decoder has gone wrong")
    scaled = np.clip(images, 0, 1)
    scaled *= 255  # in place: large pictures would need several copies
    return np.round(scaled, out=scaled).astype(np.uint8)


def check_images(images: Num[np.ndarray, "..."]) -> None:
    """Raises DivergedError for NaN in images, which are numbers in [0, 1]; bytes hold none."""
    if images.dtype != np.uint8 and np.isnan(images.sum(dtype=np.float32)):
        raise DivergedError("an image that the trained model drew holds NaN")


def bytes_or_nan(images: Num[np.ndarray, "*b h w 3"]) -> Num[np.ndarray, "*b h w 3"]:
    """Images as bytes; with a NaN, of which bytes have none, as they are."""
    return images if np.isnan(images.sum()) else to_uint8(images)


def read_image(picture: ImageSource) -> Image.Image:
    """A picture in RGB, upright, as diffusers' `load_image` reads it.

    Raises:
      ValueError: names the file, which is missing or no whole picture.
    """
    try:
        opened = picture if isinstance(picture, Image.Image) else Image.open(picture)
        return ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError as error:
        raise ValueError(f"there is no picture at {picture}") from error
    # Pillow raises SyntaxError for a broken PNG.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{picture} cannot be read as a picture: {error}") from error


def resize_image(picture: Image.Image, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """A picture stretched to a size, by the filter of diffusers' `VaeImageProcessor`."""
    return np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS))


def black_image(height: int, width: int) -> Image.Image:
    """A black picture."""
    return Image.new("RGB", (width, height))


def image_hash(picture: ImageSource) -> str:
    """A hash of a picture's file, byte by byte.

    Raises:
      ValueError: there is no such file.
    """
    if isinstance(picture, Image.Image):
        return _hash(repr((picture.mode, picture.size)).encode() + picture.tobytes())
    return _of_file(_hash_file, picture)


def check_image_file(path: str | os.PathLike[str]) -> None:
    """Reads a picture's file whole, once while it does not change.

    Raises:
      ValueError: as `read_image`.
    """
    _of_file(_read_file, path)


def _of_file(function: Callable[..., Any], path: str | os.PathLike[str]) -> Any:
    """A result that is kept while the file has its date and its size."""
    try:
        stat = pathlib.Path(path).stat()
    except OSError as error:
        raise ValueError(f"there is no picture at {path}") from error
    return function(os.fspath(path), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _hash_file(path: str, *state: int) -> str:
    return _hash(pathlib.Path(path).read_bytes())


@functools.cache
def _read_file(path: str, *state: int) -> None:
    read_image(path)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
