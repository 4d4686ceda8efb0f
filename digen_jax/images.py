"""Images as arrays: conversion to uint8, memory shared with other processes, and reading of source images."""

import functools
import hashlib
import io
import mmap
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image, ImageOps

# Path of an image file, or the image itself.
ImageSource = str | os.PathLike[str] | Image.Image


class Size(NamedTuple):
    """Size of a clip, in pixels and frames."""

    height: int
    width: int
    frames: int = 1

    def __str__(self) -> str:
        frames = f" with {self.frames} frames" if self.frames > 1 else ""
        return f"{self.height}x{self.width}{frames}"


def middle_frames(clips: Num[np.ndarray, "*b t h w 3"]) -> Num[np.ndarray, "*b h w 3"]:
    """Returns the middle frame of each clip; an image is a clip of one frame."""
    return clips[..., clips.shape[-4] // 2, :, :, :]


def reward_input(clips: UInt8[np.ndarray, "b t h w 3"]) -> UInt8[np.ndarray, "b ..."]:
    """Returns the input of rewards: images [b h w 3] if clips have one frame, else the clips."""
    return clips[:, 0] if clips.shape[1] == 1 else clips


def to_uint8(images: Num[np.ndarray, "*b h w 3"]) -> UInt8[np.ndarray, "*b h w 3"]:
    """Converts images in [0, 1] to uint8 with clipping and rounding; uint8 images are unchanged.

    Raises:
      ValueError: An image contains NaN.
    """
    if images.dtype == np.uint8:
        return images
    if np.isnan(images.min(initial=0)):
        raise ValueError("an image contains NaN, from the sampler or the decoder")
    scaled = np.clip(images, 0, 1)
    scaled *= 255  # in place: large images would need several copies
    return np.round(scaled, out=scaled).astype(np.uint8)


class SharedMemory(mmap.mmap):
    """Mapping of a file without a name. The system frees it when no process uses it, even if processes are killed."""

    file: io.FileIO

    @classmethod
    def of(cls, descriptor: int) -> "SharedMemory":
        """Maps an open file, and closes it with the mapping."""
        found = cls(descriptor, 0)
        found.file = io.FileIO(descriptor, "r+")
        return found


class SharedLayout(NamedTuple):
    """Place and type of an array in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: type[np.ndarray]

    def view(self, memory: mmap.mmap) -> np.ndarray:
        """Returns the array in a mapping."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset).view(self.kind)


def share(images: np.ndarray) -> np.ndarray:
    """Copies images to shared memory; images in shared memory are returned unchanged."""
    if find_shared(images) is not None:
        return images
    if hasattr(os, "memfd_create"):  # Linux: in memory, and not limited by the size of /dev/shm
        descriptor = os.memfd_create("images")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, max(1, images.nbytes))
    layout = SharedLayout(0, images.shape, images.dtype, type(images))
    found = layout.view(SharedMemory.of(descriptor))
    found[...] = images
    return found


def find_shared(images: np.ndarray) -> tuple[SharedMemory, SharedLayout] | None:
    """Returns the place of an array, or None if it is not a contiguous array in shared memory."""
    memory: Any = images
    while isinstance(memory, np.ndarray):
        memory = memory.base
    if not isinstance(memory, SharedMemory) or not images.flags.c_contiguous:
        return None
    offset = images.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    return memory, SharedLayout(offset, images.shape, images.dtype, type(images))


def writable_copy(images: np.ndarray) -> np.ndarray:
    """Returns a copy that may be modified. Of images in shared memory, only modified pages are copied."""
    found = find_shared(images)
    if found is None:
        return images.copy()
    memory, layout = found
    return layout.view(mmap.mmap(memory.file.fileno(), 0, access=mmap.ACCESS_COPY))


def read_image(image: ImageSource) -> Image.Image:
    """Reads an image in RGB, upright, as diffusers' `load_image` does.

    Raises:
      ValueError: The file is missing or not a complete image.
    """
    try:
        opened = image if isinstance(image, Image.Image) else Image.open(image)
        return ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError as error:
        raise ValueError(f"there is no image at {image}") from error
    # Pillow raises SyntaxError for a broken PNG.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{image} cannot be read as an image: {error}") from error


def resize_image(image: Image.Image, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Resizes an image without keeping its aspect ratio, with the filter of diffusers' `VaeImageProcessor`."""
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))


def crop_image(image: Image.Image, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Returns the center of an image, resized to cover a size with its aspect ratio kept."""
    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS))


def black_image(height: int, width: int) -> Image.Image:
    """Returns a black image."""
    return Image.new("RGB", (width, height))


def source_images(record: Mapping[str, Any]) -> list[ImageSource]:
    """Returns the source images of a prompt record: its "image", which may be a list."""
    given = record.get("image", [])
    return list(given) if isinstance(given, list | tuple) else [given]


def image_hash(image: ImageSource) -> str:
    """Returns a hash of the bytes of an image file. Raises ValueError if the file does not exist."""
    if isinstance(image, Image.Image):
        return _hash(repr((image.mode, image.size)).encode() + image.tobytes())
    return _of_file(_hash_file, image)


def check_image_file(path: str | os.PathLike[str]) -> None:
    """Reads an image file completely; repeated calls read it only if it has changed. Raises like `read_image`."""
    _of_file(_read_file, path)


def _of_file(function: Callable[..., Any], path: str | os.PathLike[str]) -> Any:
    """Calls a cached function, with the file's modification time and size as part of the key."""
    try:
        stat = pathlib.Path(path).stat()
    except OSError as error:
        raise ValueError(f"there is no image at {path}") from error
    return function(os.fspath(path), stat.st_mtime_ns, stat.st_size)


@functools.cache
def _hash_file(path: str, *state: int) -> str:
    return _hash(pathlib.Path(path).read_bytes())


@functools.cache
def _read_file(path: str, *state: int) -> None:
    read_image(path)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
