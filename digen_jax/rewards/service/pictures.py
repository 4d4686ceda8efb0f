"""Files of pictures as arrays, with their sizes known and limited before anything is decoded."""

import io
import struct
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from digen_jax.rewards.service.limits import Limits, Refused

FORMATS = ("PNG", "JPEG", "WEBP")
# A JPEG file can have its whole picture decoded again in every scan; a progressive one has about ten.
SCANS = 64
SCAN = b"\xff\xda"
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
)
BOMBS = Image.DecompressionBombError, Image.DecompressionBombWarning


def decode_picture(
    content: bytes | bytearray, which: int, limits: Limits, left: int
) -> UInt8[np.ndarray, "h w 3"]:
    """A picture's pixels.

    Args:
      content: of a PNG, JPEG or WebP file in RGB or grey.
      which: its number in the request, for errors.
      limits: of a side; and of all pixels, for errors.
      left: pixels that the request may still have.

    Raises:
      Refused: it is something else, animated, too large or broken.
    """
    webp = webp_size(content)
    if webp is not None:  # Pillow has memory for the whole canvas before it tells its size
        _check_size(*webp, which, limits, left)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            _check_size(*picture.size, which, limits, left)
            _check_kind(picture, content, which)
            return np.asarray(picture.convert("RGB"))
    except Refused:
        raise
    except BOMBS as error:
        raise Refused(413, f"image {which} has more than {limits.pixels} pixels") from error
    except BROKEN as error:
        sentence = f"image {which} is no whole PNG, JPEG or WebP file within the limits"
        raise Refused(422, sentence) from error


def webp_size(content: bytes | bytearray) -> tuple[int, int] | None:
    """(width, height) in a WebP file's first header, None if it is no such file.

    Source: RFC 9649, sections 2.5 to 2.7.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return None
    kind, head = bytes(content[12:16]), content[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", head[6:10])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _check_size(width: int, height: int, which: int, limits: Limits, left: int) -> None:
    if not (1 <= width <= limits.side and 1 <= height <= limits.side):
        raise Refused(
            413, f"image {which} has {width} x {height} pixels: a side may have {limits.side}"
        )
    if width * height > left:
        raise Refused(413, f"the images have more than {limits.pixels} pixels together")


def _check_kind(picture: Any, content: bytes | bytearray, which: int) -> None:
    if picture.format not in FORMATS or getattr(picture, "is_animated", False):
        raise Refused(422, f"image {which} has several frames: send a single picture")
    if picture.mode not in ("RGB", "L"):
        raise Refused(422, f"image {which} has the mode {picture.mode}: convert it to RGB or grey")
    if picture.format == "JPEG" and content.count(SCAN) > SCANS:
        raise Refused(422, f"image {which} is a JPEG file of more than {SCANS} scans")
