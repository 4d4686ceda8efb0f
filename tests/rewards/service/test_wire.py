import io
import json
import struct
import zlib

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from digen_jax.rewards.http_client import RetryableError
from digen_jax.rewards.service.wire import (
    Limits,
    Refused,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    webp_size,
)
from tests.rewards.service.helpers import random_images

LIMITS = Limits(images=4, side=64, frames=8, pixels=4096, text=10_000, values=200, depth=6)
CAT = json.dumps({"prompts": ["a cat"]}).encode()


def image_file(format, image=None, **options):
    file = io.BytesIO()
    image = Image.fromarray(random_images(1)[0]) if image is None else image
    image.save(file, format, **options)
    return file.getvalue()


def tensor_file(shape=(1, 2, 2, 3), dtype="U8", offsets=None, size=None, name="images", more=None):
    count = int(np.prod(shape, dtype=object)) if size is None else size
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": offsets or [0, count]}}
    text = json.dumps(header | (more or {})).encode()
    return struct.pack("<Q", len(text)) + text + bytes(count)


def label(value):
    """A label that is the same in every process: boundaries are random."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value.partition(";")[0] if isinstance(value, str) and "boundary" in value else None


def request(text=CAT, **parts):
    """(content type, body) by httpx."""
    parts = parts or {"images": tensor_file()}
    files = [("request", (None, text, "application/json"))] if text is not None else []
    for name, contents in parts.items():
        contents = contents if isinstance(contents, list) else [contents]
        files += [(name, (name, content)) for content in contents]
    made = httpx.Request("POST", "http://x", files=files)
    return made.headers["content-type"], made.read()


def text_of(**fields):
    return json.dumps({"prompts": ["a cat"]} | fields).encode()


def decoded(images, prompts=("a cat",), metadata=({},), id=None):
    return decode_request(*encode_request(images, list(prompts), list(metadata), id), LIMITS)


@pytest.mark.parametrize("shape", [(3, 4, 6, 3), (2, 5, 4, 6, 3)])
def test_a_request_arrives_as_it_was_sent(shape):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    prompts = ["a cat\r\n--x", "ein Kätzchen 猫", ""][: len(images)]
    metadata = [{"prompt": p, "include": [{"class": "cat", "count": 2}], "x": 0.1} for p in prompts]
    found = decoded(images, prompts, metadata, "abc-1")
    assert found.id == "abc-1" and found.prompts == prompts and found.metadata == metadata
    np.testing.assert_array_equal(found.images, images)
    sliced = images[:, ::2]
    np.testing.assert_array_equal(decoded(sliced, prompts, metadata).images, sliced)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_image_files_arrive_as_they_are(format):
    images = random_images(2, 8, 10)
    options = {"lossless": True} if format == "WEBP" else {}
    files = [image_file(format, Image.fromarray(image), **options) for image in images]
    found = decoded(files, ["a", "b"], [{}, {}])
    expected = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    np.testing.assert_array_equal(found.images, expected)
    if format != "JPEG":
        np.testing.assert_array_equal(found.images, images)


def test_paths_and_the_selection_of_rewards_stay_with_the_client():
    record = {"prompt": "a cat", "image": "/home/me/cat.png", "rewards": ["mine"], "n": 1}
    assert decoded(random_images(1), metadata=[record]).metadata == [{"prompt": "a cat", "n": 1}]


def test_equal_contents_have_equal_digests():
    images = random_images(1)
    others = [decoded(images, ["b"]), decoded(random_images(1, seed=1)), decoded(images)]
    assert decoded(images).digest == decoded(images).digest
    assert len({one.digest for one in others}) == 3


TENSORS = [
    (b"", 422),
    (struct.pack("<Q", 5000) + b" " * 5000, 422),
    (struct.pack("<Q", 3) + b"{]}", 422),
    (struct.pack("<Q", 4000) + b"[" * 4000, 422),
    (tensor_file(dtype="F32", size=48), 422),
    (tensor_file(name="pictures"), 422),
    (tensor_file(more={"b": {"dtype": "U8"}}), 422),
    (save({"images": random_images(1), "b": random_images(1)}), 422),
    (tensor_file(shape=(1, 2, 2, 4)), 422),
    (tensor_file(shape=(1, 0, 2, 3)), 422),
    (tensor_file(shape=(-1, -2, 2, 3), size=12), 422),
    (tensor_file(shape=(True, 2, 2, 3), size=12), 422),
    (tensor_file(shape=(1, 2, 2, 3), size=11), 422),
    (tensor_file(offsets=[1, 13]), 422),
    (tensor_file(shape=(1, 2**40, 2**40, 3), size=12), 422),
    (tensor_file(shape=(1, 65, 1, 3)), 413),
    (tensor_file(shape=(5, 1, 1, 3)), 413),
    (tensor_file(shape=(1, 9, 1, 1, 3)), 413),
    (tensor_file(shape=(2, 64, 33, 3)), 413),
]


def png_of(width, height, data=b""):
    """A PNG file that announces a size."""

    def chunk(kind, content):
        end = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + end

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp_of(width, height):
    """A lossless WebP file that announces a size."""
    bits = (width - 1 | height - 1 << 14).to_bytes(4, "little")
    body = b"WEBPVP8L" + struct.pack("<I", 40) + b"\x2f" + bits + bytes(35)
    return b"RIFF" + struct.pack("<I", len(body)) + body


FRAMES = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
SEVERAL = dict(image=FRAMES[0], save_all=True, append_images=FRAMES[1:])
SMALL, LARGE = (image_file("PNG", Image.new("RGB", (side, side))) for side in (4, 60))
IMAGES = [
    (b"garbage", 422),
    (b"", 422),
    (image_file("GIF"), 422),
    (image_file("PNG")[:60], 422),
    (image_file("PNG", **SEVERAL), 422),
    (image_file("WEBP", **SEVERAL), 422),
    (image_file("PNG", Image.new("RGBA", (4, 4))), 422),
    (image_file("PNG", Image.new("I;16", (4, 4))), 422),
    (image_file("JPEG", Image.new("CMYK", (4, 4))), 422),
    (image_file("JPEG") + b"\xff\xda" * 65, 422),
    (png_of(100_000, 100_000), 413),
    (png_of(65, 1), 413),
    (webp_of(16_383, 16_383), 413),
    (image_file("WEBP", Image.new("RGB", (1, 70))), 413),
]
TEXTS = [
    (b"{", 422),
    (b"[" * 9000, 422),
    (b'{"prompts": ["a"], "metadata": [{"x": NaN}]}', 422),
    (b'{"prompts": ["a"], "metadata": [{"x": 1e999}]}', 422),
    (b'{"prompts": ["a"], "metadata": [{"x": 1' + b"0" * 5000 + b"}]}", 422),
    (b'{"prompts": ["\\ud800"]}', 422),
    (b'{"prompts": ["a"], "metadata": [{"\\ud800": 1}]}', 422),
    (text_of(metadata=[{"x": "y" * 10_000}]), 413),
    (text_of(metadata=[{"x": [0] * 300}]), 413),
    (text_of(metadata=[{"a": json.loads("[" * 7 + "]" * 7)}]), 422),
    (b"[]", 422),
    (text_of(path="/etc/passwd"), 422),
    (text_of(prompts="a cat"), 422),
    (text_of(prompts=[]), 422),
    (text_of(prompts=["a"] * 5), 413),
    (text_of(prompts=["a", "b"]), 422),
    (text_of(metadata=["x"]), 422),
    (text_of(metadata=[{"image": "/etc/passwd"}]), 422),
    (text_of(id="x" * 65), 422),
    (text_of(id="../x"), 422),
]
TYPE, BODY = request()
BODIES = [
    ("application/json", BODY, 415),
    ("multipart/form-data", BODY, 400),
    ("multipart/form-data; boundary=" + "x" * 71, BODY, 400),
    ("multipart/form-data; boundary=other", BODY, 400),
    (TYPE, b"garbage", 400),
    (TYPE, BODY[:-40], 400),
    (TYPE, BODY.replace(b"Content-Disposition: form-data", b"X: form-data"), 400),
    (TYPE, BODY.replace(b"Content-Disposition", b"X" * 10_000), 400),
    (*request(None), 400),
    (*request(request=CAT), 400),
    (*request(CAT, images=tensor_file(), image=b""), 400),
    (*request(CAT, images=[tensor_file()] * 2), 400),
    (*request(CAT, file=b""), 400),
    (*request(CAT, image=[b""] * 5), 413),
    (*request(text_of(prompts=["a", "b"]), image=[SMALL, LARGE]), 422),
    (*request(text_of(prompts=["a", "b"]), image=[LARGE, LARGE]), 413),
]


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        *[(*request(images=content), status) for content, status in TENSORS],
        *[(*request(image=content), status) for content, status in IMAGES],
        *[(*request(text), status) for text, status in TEXTS],
        *BODIES,
    ],
    ids=label,
)
def test_an_invalid_request_is_refused(kind, body, status):
    with pytest.raises(Refused) as refused:
        decode_request(kind, body, LIMITS)
    assert refused.value.status == status


def test_a_png_that_inflates_is_read_to_its_size_only():
    found = decode_request(*request(image=png_of(4, 4, bytes(10**7))), LIMITS)
    assert found.images.shape == (1, 4, 4, 3)


@pytest.mark.parametrize(
    "options", [{}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\b\0\0"}]
)
def test_the_size_of_a_webp_file_is_read_from_its_header(options):
    file = image_file("WEBP", Image.new("RGB", (37, 21), "red"), **options)
    assert webp_size(file) == (37, 21)


def test_metadata_may_be_as_deep_and_many_as_allowed():
    metadata = [{"a": json.loads("[" * 6 + "]" * 6), "b": list(range(100))}]
    assert decode_request(*request(text_of(metadata=metadata)), LIMITS).metadata == metadata


def test_damaged_bodies_raise_no_other_error():
    """Bytes changed, removed and added anywhere give a request or a refusal."""
    rng = np.random.default_rng(0)
    kinds = request(), request(image=image_file("PNG")), request(image=image_file("WEBP"))
    refusals = 0
    for i in range(400):
        kind, body = kinds[i % 3]
        body = bytearray(body)
        for _ in range(rng.integers(1, 5)):
            at, change = int(rng.integers(len(body))), rng.integers(3)
            if change == 0:
                body[at] = rng.integers(256)
            elif change == 1:
                del body[at : at + int(rng.integers(1, 40))]
            else:
                body[at:at] = rng.bytes(int(rng.integers(1, 40)))
        try:
            decode_request(kind, bytes(body), LIMITS)
        except Refused as error:
            refusals += 1
            assert 400 <= error.status < 500
    assert refusals > 100


def test_an_answer_arrives_exactly():
    normal = np.random.default_rng(0).normal(size=5).astype(np.float32)
    scores = {"a": normal, "b": np.float32([1e-40, 3e38, 0, -0.1, 1])}
    found = decode_answer(encode_answer(scores, 0.25), 5, ["b"])
    assert list(found) == ["a", "b"]
    for name in scores:
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], scores[name])


@pytest.mark.parametrize(
    ("content", "image"),
    [
        (b"", 0),
        (b"[" * 100_000, 0),
        (b"[]", 0),
        (b'{"scores": {"a": [1, 2]}}', 0),
        (b'{"scores": {}, "seconds": 1}', 0),
        (b'{"scores": [1, 2], "seconds": 1}', 0),
        (b'{"scores": {"b": [1, 2]}, "seconds": 1}', 0),
        (b'{"scores": {"a": [1]}, "seconds": 1}', 0),
        (b'{"scores": {"a": [1, null]}, "seconds": 1}', 0),
        (b'{"scores": {"a": [1, "2"]}, "seconds": 1}', 0),
        (b'{"scores": {"a": [1, NaN]}, "seconds": 1}', 1),
        (b'{"scores": {"a": [1, 1e39]}, "seconds": 1}', 1),
        (b'{"scores": {"a": [1' + b"0" * 400 + b', 1]}, "seconds": 1}', 0),
        (b'{"scores": {"a": [1, 2]}, "seconds": NaN}', 0),
    ],
    ids=label,
)
def test_an_invalid_answer_is_malformed(content, image):
    with pytest.raises(RetryableError) as malformed:
        decode_answer(content, 2, ["a"])
    assert malformed.value.image == image
