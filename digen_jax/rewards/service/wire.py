"""The format of requests and answers, both directions: pure functions that check before they allocate.

A request is multipart/form-data. Its part `request` is JSON: {"prompts": [...], "metadata": [...], "id": "..."},
the last two optional. Its images are one part `images`, a safetensors file with one uint8 tensor `images`
[b, h, w, 3] (clips [b, t, h, w, 3]), or parts `image`, a PNG, JPEG or WebP file each, in the prompts' order.
An answer is JSON: {"scores": {name: [...]}, "seconds": s}. Source of safetensors' format: its README.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.rewards.service.limits import Limits, Refused
from digen_jax.rewards.service.multipart import Part, decode_parts, encode_parts
from digen_jax.rewards.service.pictures import decode_picture

TENSOR = "images"
HEADER = 4096  # bytes of a safetensors header, at most
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Fields of prompt files that are paths: they stay where the files are.
PATHS = ("image",)
# The field that says which rewards of a run score a prompt: the run has chosen when it asks.
CHOICE = "rewards"
SHOWN = 300  # characters of a server's sentence


class Asked(NamedTuple):
    """A request; `digest` is the same for the same content."""

    id: str | None
    prompts: list[str]
    metadata: list[dict[str, Any]]
    images: UInt8[np.ndarray, "b h w 3"] | UInt8[np.ndarray, "b t h w 3"]
    digest: bytes


class Malformed(ValueError):
    """An answer that does not have the format, or not one finite score an image."""


# -------------------------------------------------------------------------------------- requests


def encode_request(
    images: UInt8[np.ndarray, "b h w 3"] | UInt8[np.ndarray, "b t h w 3"] | Sequence[bytes],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    id: str | None = None,
) -> tuple[str, bytes]:
    """(content type, body) of a request; images as an array, or as the contents of picture files.

    Raises:
      ValueError: metadata that JSON cannot hold.
    """
    records = [{k: v for k, v in record.items() if k not in PATHS} for record in metadata]
    told = {"prompts": list(prompts), "metadata": records} | ({"id": id} if id else {})
    try:
        text = json.dumps(told, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata for a reward server must be JSON: {error}") from error
    parts = [("request", "application/json", text)]
    if isinstance(images, np.ndarray):
        parts.append(("images", "application/octet-stream", encode_tensor(images)))
    else:
        parts += [("image", "application/octet-stream", bytes(one)) for one in images]
    return encode_parts(parts)


def encode_tensor(images: UInt8[np.ndarray, "..."]) -> bytes:
    """A safetensors file of one tensor."""
    about = {"dtype": "U8", "shape": list(images.shape), "data_offsets": [0, images.nbytes]}
    header = json.dumps({TENSOR: about}).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, np.ascontiguousarray(images).data])


def decode_request(content_type: str, body: bytes | bytearray, limits: Limits) -> Asked:
    """A request's content.

    Raises:
      Refused: a sentence on what is wrong with it.
    """
    parts = decode_parts(content_type, body, 1 + limits.images)
    named: dict[str, list[Part]] = {}
    for part in parts:
        named.setdefault(part.name, []).append(part)
    unknown = sorted(named.keys() - {"request", "images", "image"})
    if unknown:
        raise Refused(
            400, f"the part {unknown[0][:80]!r} is unknown: send request, and images or image"
        )
    if len(named.get("request", ())) != 1:
        raise Refused(400, "there must be one part named request, of JSON")
    if len(named.get("images", ())) > 1 or ("images" in named) == ("image" in named):
        raise Refused(
            400, "there must be one part named images, or one named image for each picture"
        )
    id, prompts, metadata = decode_text(named["request"][0].content, limits)
    if "images" in named:
        images = decode_tensor(named["images"][0].content, limits)
    else:
        images = _decode_pictures(named["image"], limits)
    if len(images) != len(prompts):
        raise Refused(422, f"there are {len(images)} images for {len(prompts)} prompts")
    return Asked(id, prompts, metadata, images, _digest(parts))


def decode_text(
    content: bytes | bytearray, limits: Limits
) -> tuple[str | None, list[str], list[dict[str, Any]]]:
    """(id, prompts, metadata) of a request's JSON.

    Raises:
      Refused: it is too large or deep, no JSON, or has other fields or types.
    """
    if len(content) > limits.text:
        raise Refused(413, f"prompts and metadata have more than {limits.text} bytes")
    try:
        told = json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the part request is no JSON in UTF-8 with finite numbers") from error
    if not isinstance(told, dict) or told.keys() - {"id", "prompts", "metadata"}:
        raise Refused(422, "the part request must be an object with prompts, metadata and id only")
    _check_values(told, limits)
    id, prompts = told.get("id"), told.get("prompts")
    if id is not None and not (isinstance(id, str) and ID.fullmatch(id)):
        raise Refused(422, "id must be 1 to 64 letters, digits and _ . -")
    if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
        raise Refused(422, "prompts must be a list of texts")
    if not 1 <= len(prompts) <= limits.images:
        raise Refused(
            413 if prompts else 422,
            f"there are {len(prompts)} prompts: a request may have 1 to {limits.images}",
        )
    metadata = told.get("metadata", [{} for _ in prompts])
    if not isinstance(metadata, list) or not all(isinstance(one, dict) for one in metadata):
        raise Refused(422, "metadata must be a list of objects")
    if len(metadata) != len(prompts):
        raise Refused(422, f"there are {len(metadata)} metadata for {len(prompts)} prompts")
    for name in PATHS:
        if any(name in record for record in metadata):
            raise Refused(
                422, f"the metadata's field {name!r} is a path of the sender: leave it out"
            )
    for record in metadata:
        record.pop(CHOICE, None)
    return id, prompts, metadata


def decode_tensor(
    content: bytes | bytearray, limits: Limits
) -> UInt8[np.ndarray, "b h w 3"] | UInt8[np.ndarray, "b t h w 3"]:
    """The tensor of a safetensors file, a view of its bytes.

    Raises:
      Refused: it is no such file with one uint8 tensor `images` within the limits.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(HEADER, len(content) - 8):
        raise Refused(
            422, f"the part images is no safetensors file with a header of up to {HEADER} bytes"
        )
    try:
        header = json.loads(content[8 : 8 + size].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the safetensors header is no JSON") from error
    names = header.keys() - {"__metadata__"} if isinstance(header, dict) else set()
    about = header[TENSOR] if names == {TENSOR} else None
    if not isinstance(about, dict) or about.get("dtype") != "U8":
        raise Refused(422, f"the safetensors file must have one tensor {TENSOR!r} of type U8")
    shape = about.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise Refused(422, "the tensor's shape must be a list of numbers above 0")
    if len(shape) not in (4, 5) or shape[-1] != 3:
        raise Refused(422, "the tensor's shape must be [b, h, w, 3], or [b, t, h, w, 3] for clips")
    _check_shape(shape, limits)
    data = memoryview(content)[8 + size :]
    if about.get("data_offsets") != [0, len(data)] or math.prod(shape) != len(data):
        raise Refused(422, f"the tensor has {len(data)} bytes, its shape {shape} other ones")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _check_shape(shape: list[int], limits: Limits) -> None:
    frames = shape[1] if len(shape) == 5 else 1
    if shape[0] > limits.images or frames > limits.frames:
        raise Refused(
            413,
            f"a request may have {limits.images} images or clips, and a clip {limits.frames} frames",
        )
    if max(shape[-3:-1]) > limits.side:
        raise Refused(413, f"a side may have {limits.side} pixels")
    if math.prod(shape[:-1]) > limits.pixels:
        raise Refused(413, f"the images have more than {limits.pixels} pixels together")


def _decode_pictures(parts: Sequence[Part], limits: Limits) -> UInt8[np.ndarray, "b h w 3"]:
    pictures, left = [], limits.pixels
    for which, part in enumerate(parts):
        picture = decode_picture(part.content, which, limits, left)
        if pictures and picture.shape != pictures[0].shape:
            raise Refused(
                422, "the pictures of a request must be of one size: send a request for each"
            )
        pictures.append(picture)
        left -= picture.shape[0] * picture.shape[1]
    return np.stack(pictures)


def _check_values(told: Any, limits: Limits) -> None:
    """Walks through JSON without recursion: its depth, its number of values, and what texts and numbers hold."""
    level, seen = [told], 0
    for _ in range(limits.depth + 3):  # the request, its lists and their objects are not counted
        seen += len(level)
        if seen > limits.values + 2 * limits.images:
            raise Refused(413, f"the metadata have more than {limits.values} values")
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.keys()
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            else:
                _check_value(one)
        if not inner:
            return
        level = inner
    raise Refused(422, f"the metadata are nested deeper than {limits.depth}")


def _check_value(one: Any) -> None:
    if isinstance(one, str):
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise Refused(422, "a text has half of a surrogate pair") from error
    elif isinstance(one, float) and not math.isfinite(one):
        raise Refused(422, "a number is too large for a float")


def _no_number(name: str) -> None:
    raise ValueError(name)


def _digest(parts: Sequence[Part]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part.name}:{len(part.content)}:".encode())
        digest.update(part.content)
    return digest.digest()


# --------------------------------------------------------------------------------------- answers


def encode_answer(scores: Mapping[str, Float32[np.ndarray, "b"]], seconds: float) -> bytes:
    """An answer; a float32 is the same after it is read."""
    told = {name: column.astype(np.float64).tolist() for name, column in scores.items()}
    return json.dumps({"scores": told, "seconds": seconds}, allow_nan=False).encode()


def decode_answer(
    content: bytes, count: int, names: Sequence[str] = ()
) -> tuple[dict[str, Float32[np.ndarray, "b"]], float]:
    """(scores by name, the seconds that the reward took) for a number of images.

    Args:
      content: of an answer with status 200.
      count: of the images.
      names: must be among the scores' names.

    Raises:
      Malformed: a sentence's end that begins "the answer".
    """
    try:
        told = json.loads(content)
        scores, seconds = told["scores"], float(told["seconds"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise Malformed("is no JSON with scores and seconds") from error
    if not isinstance(scores, dict) or not scores:
        raise Malformed("has no scores by name")
    missing = [name for name in names if name not in scores]
    if missing:
        raise Malformed(f"has no score {missing[0]!r}, but {', '.join(scores)[:SHOWN]}")
    if not math.isfinite(seconds):
        raise Malformed("has no finite seconds")
    return {name: _decode_column(name, scores[name], count) for name in scores}, seconds


def _decode_column(name: str, values: Any, count: int) -> Float32[np.ndarray, "b"]:
    if not isinstance(values, list) or len(values) != count:
        length = len(values) if isinstance(values, list) else "no list of"
        raise Malformed(f"has {length} scores {name!r} for {count} images")
    if not all(type(value) in (int, float) for value in values):
        raise Malformed(f"has scores {name!r} that are no numbers")
    with np.errstate(over="ignore"):
        try:
            column = np.array(values, np.float64).astype(np.float32)
        except OverflowError:
            column = np.full(count, np.inf, np.float32)
    if not np.isfinite(column).all():
        which = int(np.argmin(np.isfinite(column)))
        raise Malformed(f"has the score {name!r} {values[which]} for image {which}", which)
    return column
