"""Wire format of requests and answers, with limits: pure functions that validate before they allocate.

A request is multipart/form-data. Its part `request` is JSON: {"prompts": [...], "metadata": [...], "id": "..."},
the last two optional. Images are one part `images`, a safetensors file with one uint8 tensor `images`
[b, h, w, 3] (clips [b, t, h, w, 3]), or parts `image`, each a PNG, JPEG or WebP file, in the order of the prompts.
An answer is JSON: {"scores": {name: [...]}, "seconds": s}.
"""

import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import httpx
import numpy as np
import safetensors.numpy
from jaxtyping import Float32, UInt8
from PIL import Image

from digen_jax.errors import ConfigError, check_range
from digen_jax.rewards.http_client import RetryableError

VERSION = 1  # format version
TOKEN = "DIGEN_REWARD_TOKEN"  # environment variable with the bearer token
SCORE, HEALTH, REWARDS = "/v1/score", "/health", "/rewards"  # paths
PACKAGES = ("starlette", "uvicorn", "python_multipart")  # of requirements-reward.txt
MIB = 2**20
HEADER = 4096  # maximum bytes of a safetensors header
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FORMATS = ("PNG", "JPEG", "WEBP")
# Maximum scans of a JPEG, since each may decode the full image; progressive JPEGs have about ten.
SCANS = 64


@contextlib.contextmanager
def server_packages() -> Iterator[None]:
    """Converts a failed import of server-only packages to a ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in PACKAGES:
            raise
        needs = f"a reward server needs the package {module}"
        raise ConfigError(f"{needs}: run pip install -r requirements-reward.txt") from error


class Refused(ValueError):
    """Raised for a rejected request, with an HTTP status 4xx or 5xx.

    The message is sent to the client, so it must not contain secrets. The client may retry `after` some seconds.
    """

    def __init__(self, status: int, message: str, after: float | None = None):
        super().__init__(message)
        self.status, self.after = status, after


def _limit(default: int | float, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server: its command-line options."""

    body: int = _limit(128 * MIB, "Bytes of a request.")
    text: int = _limit(4 * MIB, "Bytes of a request's prompts and metadata.")
    values: int = _limit(100_000, "Numbers, texts, lists and dicts in a request's metadata.")
    depth: int = _limit(16, "Depth of lists and dicts in a request's metadata.")
    images: int = _limit(128, "Images or clips of a request.")
    side: int = _limit(4096, "Pixels of an image's height or width.")
    frames: int = _limit(1024, "Frames of a clip.")
    pixels: int = _limit(32 * MIB, "Pixels of all images and frames of a request.")
    upload: float = _limit(30.0, "Seconds in which a request must arrive.")
    score: float = _limit(600.0, "Seconds of one call of the reward, after which it is killed.")
    batch: int = _limit(64, "Images of several requests that are scored in one call.")
    queue: int = _limit(1024, "Images that wait to be scored.")
    memory: int = _limit(1024 * MIB, "Bytes of all requests that are read or wait.")
    connections: int = _limit(512, "Open connections.")
    remembered: float = _limit(600.0, "Seconds in which a repeated request gets its first answer.")
    answers: int = _limit(4096, "Answers that are remembered.")

    def check(self) -> None:
        """Raises ConfigError if a number is out of range, or if a request within the limits could never be accepted."""
        for field in dataclasses.fields(self):
            least = 0 if field.name == "remembered" else 1e-3 if field.type is float else 1
            most = 86400 if field.type is float else math.inf
            check_range(f"--{field.name}", getattr(self, field.name), least, most)
        if self.memory < (least := max(self.body, 3 * self.pixels)):
            one = f"one request: {least} bytes by --body and --pixels"
            raise ConfigError(f"--memory={self.memory} must hold {one}")
        if self.queue < self.images:
            raise ConfigError(f"--queue={self.queue} must be at least --images={self.images}")


class ScoreRequest(NamedTuple):
    """A decoded request. Equal contents have equal digests."""

    id: str | None
    prompts: list[str]
    metadata: list[dict[str, Any]]
    images: UInt8[np.ndarray, "b h w 3"] | UInt8[np.ndarray, "b t h w 3"]
    digest: bytes


def encode_request(
    images: UInt8[np.ndarray, "b h w 3"] | UInt8[np.ndarray, "b t h w 3"] | Sequence[bytes],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    id: str | None = None,
) -> tuple[str, bytes]:
    """Returns (content type, body) of a request; images are an array or encoded image files.

    The metadata field `image`, a local path, is dropped.

    Raises:
      ValueError: The metadata is not valid JSON.
    """
    records = [{k: v for k, v in record.items() if k != "image"} for record in metadata]
    fields = {"prompts": list(prompts), "metadata": records} | ({"id": id} if id else {})
    try:
        text = json.dumps(fields, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata for a reward server must be JSON: {error}") from error
    if isinstance(images, np.ndarray):
        file = safetensors.numpy.save({"images": np.ascontiguousarray(images)})
        files = [("images", ("images", file, "application/octet-stream"))]
    else:
        files = [("image", ("image", bytes(one), "application/octet-stream")) for one in images]
    parts = [("request", (None, text, "application/json")), *files]
    request = httpx.Request("POST", "http://server", files=parts)
    return request.headers["Content-Type"], request.read()


def decode_request(content_type: str, body: bytes, limits: Limits) -> ScoreRequest:
    """Decodes and validates a request. Raises Refused if it is malformed, or exceeds the limits."""
    parts = _decode_parts(content_type, body, 1 + limits.images)
    if unknown := sorted(parts.keys() - {"request", "images", "image"}):
        raise Refused(400, f"unknown part {unknown[0][:80]!r}: send request, and images or image")
    if len(parts["request"]) != 1:
        raise Refused(400, "there must be one part named request, of JSON")
    if len(parts["images"]) > 1 or bool(parts["images"]) == bool(parts["image"]):
        raise Refused(400, "there must be one part named images, or parts named image")
    id, prompts, metadata = _decode_text(parts["request"][0], limits)
    file = parts["images"]
    images = _decode_tensor(file[0], limits) if file else _decode_images(parts["image"], limits)
    if len(images) != len(prompts):
        raise Refused(422, f"there are {len(images)} images for {len(prompts)} prompts")
    digest = hashlib.blake2b(digest_size=16)
    for content in (part for name in sorted(parts) for part in parts[name]):
        digest.update(f"{len(content)}:".encode() + content)
    return ScoreRequest(id, prompts, metadata, images, digest.digest())


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary of a multipart body.

    Raises:
      Refused: The content type is not multipart/form-data with a boundary of 1 to 70 bytes.
    """
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise Refused(415, "the request's type must be multipart/form-data")
    if not 1 <= len(boundary := options.get(b"boundary", b"")) <= 70:
        raise Refused(400, "the Content-Type must have a boundary of 1 to 70 bytes")
    return boundary


def _decode_parts(content_type: str, body: bytes, most: int) -> dict[str, list[bytes]]:
    """Returns the parts of a multipart body by name."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import File, FormParser

    parts: dict[str, list[bytes]] = collections.defaultdict(list)
    ended = []

    def add(part: Any) -> None:
        if sum(map(len, parts.values())) == most:
            raise Refused(413, f"the request has more than {most} parts")
        content = cast(Any, part).file_object.getvalue() if isinstance(part, File) else part.value
        parts[(part.field_name or b"").decode("utf-8", "replace")].append(content or b"")

    boundary = boundary_of(content_type)
    calls = add, add, lambda: ended.append(True)
    config = {"MAX_MEMORY_FILE_SIZE": math.inf}  # no temporary files
    try:
        parser = FormParser("multipart/form-data", *calls, boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refused(400, "the body is not multipart/form-data with this boundary") from error
    if not ended:
        raise Refused(400, "the body ends before its last boundary")
    return parts


def _decode_text(content: bytes, limits: Limits) -> tuple[str | None, list[str], list[dict]]:
    """Decodes (id, prompts, metadata) of a request's JSON."""
    if len(content) > limits.text:
        raise Refused(413, f"prompts and metadata have more than {limits.text} bytes")
    try:
        fields = json.loads(content.decode())
        # Rejects non-finite numbers and lone surrogates.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(422, "the part request is not JSON in UTF-8 with finite numbers") from error
    if not isinstance(fields, dict) or fields.keys() - {"id", "prompts", "metadata"}:
        raise Refused(422, "the part request must be an object with prompts, metadata and id only")
    # The request, its lists and their objects are not counted.
    if _count_values(fields, limits.depth + 2) > limits.values + 2 * limits.images:
        raise Refused(413, f"the metadata has more than {limits.values} values")
    id, prompts = fields.get("id"), fields.get("prompts")
    if id is not None and not (isinstance(id, str) and ID.fullmatch(id)):
        raise Refused(422, "id must be 1 to 64 letters, digits and _ . -")
    if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
        raise Refused(422, "prompts must be a list of strings")
    if not 1 <= len(prompts) <= limits.images:
        status = 413 if prompts else 422
        raise Refused(status, f"{len(prompts)} prompts: a request may have 1 to {limits.images}")
    metadata = fields.get("metadata", [{} for _ in prompts])
    if not isinstance(metadata, list) or not all(isinstance(one, dict) for one in metadata):
        raise Refused(422, "metadata must be a list of objects")
    if len(metadata) != len(prompts):
        raise Refused(422, f"metadata has {len(metadata)} objects for {len(prompts)} prompts")
    if any("image" in record for record in metadata):
        raise Refused(422, "the metadata's field 'image' is a path of the client: remove it")
    for record in metadata:  # the client has already selected the rewards of each prompt
        record.pop("rewards", None)
    return id, prompts, metadata


def _count_values(value: Any, depth: int) -> int:
    """Returns the number of JSON values, including keys. Raises Refused if nested deeper than `depth`."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list):
        return 1
    if depth < 0:
        raise Refused(422, "the metadata is nested too deeply")
    return 1 + sum(_count_values(one, depth - 1) for one in value)


def _decode_tensor(
    content: bytes, limits: Limits
) -> UInt8[np.ndarray, "b h w 3"] | UInt8[np.ndarray, "b t h w 3"]:
    """Decodes the tensor of a safetensors file."""
    if int.from_bytes(content[:8], "little") > HEADER:
        raise Refused(422, f"the safetensors file must have a header of at most {HEADER} bytes")
    try:
        tensors = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Refused(422, "the part images is not a safetensors file") from error
    images = tensors.get("images")
    if len(tensors) != 1 or images is None or images.dtype != np.uint8:
        raise Refused(422, "the safetensors file must have one tensor 'images' of type U8")
    if images.ndim not in (4, 5) or images.shape[-1] != 3 or not images.size:
        raise Refused(422, "the tensor's shape must be [b, h, w, 3], or [b, t, h, w, 3] for clips")
    count, *frames, height, width, _ = images.shape
    if count > limits.images or max(frames, default=1) > limits.frames:
        raise Refused(413, f"at most {limits.images} images or clips of {limits.frames} frames")
    if max(height, width) > limits.side:
        raise Refused(413, f"a side may have {limits.side} pixels")
    if images.size // 3 > limits.pixels:
        raise Refused(413, f"the images have more than {limits.pixels} pixels together")
    return images


def _decode_images(files: Sequence[bytes], limits: Limits) -> UInt8[np.ndarray, "b h w 3"]:
    """Decodes PNG, JPEG or WebP files of one size."""
    images: list[np.ndarray] = []
    for i, file in enumerate(files):
        image = _decode_image(file, i, limits, limits.pixels - sum(one.size // 3 for one in images))
        if images and image.shape != images[0].shape:
            raise Refused(422, "the images of a request must have one size: send several requests")
        images.append(image)
    return np.stack(images)


def _decode_image(file: bytes, i: int, limits: Limits, left: int) -> UInt8[np.ndarray, "h w 3"]:
    """Decodes an image file; `left` is the remaining pixel budget of the request."""

    def check_size(width: int, height: int) -> None:
        if not (1 <= width <= limits.side and 1 <= height <= limits.side):
            raise Refused(413, f"image {i} is {width} x {height}: a side may have {limits.side}")
        if width * height > left:
            raise Refused(413, f"the images have more than {limits.pixels} pixels together")

    if (size := webp_size(file)) is not None:
        check_size(*size)  # Pillow allocates the canvas before it returns the size
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            check_size(*image.size)
            if getattr(image, "is_animated", False):
                raise Refused(422, f"image {i} has several frames: send a single image")
            if image.mode not in ("RGB", "L"):
                raise Refused(422, f"image {i} has the mode {image.mode}: convert it to RGB")
            if image.format == "JPEG" and file.count(b"\xff\xda") > SCANS:
                raise Refused(422, f"image {i} is a JPEG file of more than {SCANS} scans")
            return np.asarray(image.convert("RGB"))
    except Refused:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(413, f"image {i} has more than {limits.pixels} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        raise Refused(422, f"image {i} is not a complete PNG, JPEG or WebP file") from error


def webp_size(content: bytes) -> tuple[int, int] | None:
    """Returns (width, height) from a WebP header, or None for other files.

    Source: RFC 9649, sections 2.5 to 2.7.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return None
    chunk, head = content[12:16], content[20:30]
    if chunk == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", head[6:10])
    return (width & 0x3FFF, height & 0x3FFF) if chunk == b"VP8 " else None


def encode_answer(scores: Mapping[str, Float32[np.ndarray, "b"]], seconds: float) -> bytes:
    """Encodes an answer; float32 values round-trip exactly. Raises ValueError for NaN."""
    columns = {name: column.astype(np.float64).tolist() for name, column in scores.items()}
    return json.dumps({"scores": columns, "seconds": seconds}, allow_nan=False).encode()


def decode_answer(
    content: bytes, count: int, names: Sequence[str] = ()
) -> dict[str, Float32[np.ndarray, "b"]]:
    """Decodes the scores by name of an answer for `count` images.

    Raises:
      RetryableError: The answer lacks one of `names`, or a finite score of an image.
    """
    try:
        answer = json.loads(content)
        scores, seconds = answer["scores"], float(answer["seconds"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise _malformed("is not JSON with scores and seconds") from error
    if not isinstance(scores, dict) or not scores or not math.isfinite(seconds):
        raise _malformed("has no scores by name, or no finite seconds")
    if missing := [name for name in names if name not in scores]:
        raise _malformed(f"has no score {missing[0]!r}, but {', '.join(scores)[:300]}")
    return {name: _decode_column(name, values, count) for name, values in scores.items()}


def _decode_column(name: str, values: Any, count: int) -> Float32[np.ndarray, "b"]:
    if not isinstance(values, list) or len(values) != count:
        raise _malformed(f"does not have {count} scores {name!r}")
    if not all(type(value) in (int, float) for value in values):
        raise _malformed(f"has scores {name!r} that are not numbers")
    with np.errstate(over="ignore"):
        try:
            column = np.array(values, np.float64).astype(np.float32)
        except OverflowError:
            column = np.full(count, np.inf, np.float32)
    for i in np.flatnonzero(~np.isfinite(column)):
        raise _malformed(f"has the score {name!r} {values[i]} for image {i}", int(i))
    return column


def _malformed(what: str, image: int = 0) -> RetryableError:
    return RetryableError(f"sent an answer that {what}", image, down=True)
