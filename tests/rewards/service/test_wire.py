import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save

from digen_jax.rewards.service.limits import Limits, Refused
from digen_jax.rewards.service.multipart import encode_parts
from digen_jax.rewards.service.pictures import webp_size
from digen_jax.rewards.service.wire import (
    Malformed,
    decode_answer,
    decode_request,
    decode_tensor,
    encode_answer,
    encode_request,
    encode_tensor,
)
from tests.rewards.service.helpers import pictures

LIMITS = Limits(images=4, side=64, frames=8, pixels=4096, text=10_000, values=200, depth=6)
CAT = json.dumps({"prompts": ["a cat"]}).encode()


def picture_file(format, image=None, **options):
    file = io.BytesIO()
    image = Image.fromarray(pictures(1)[0]) if image is None else image
    image.save(file, format, **options)
    return file.getvalue()


def tensor_file(shape=(1, 2, 2, 3), dtype="U8", offsets=None, size=None, name="images", more=None):
    count = int(np.prod(shape, dtype=object)) if size is None else size
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": offsets or [0, count]}}
    text = json.dumps(header | (more or {})).encode()
    return struct.pack("<Q", len(text)) + text + bytes(count)


def shown(value):
    """The same in every process: boundaries are random."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value.partition(";")[0] if isinstance(value, str) and "boundary" in value else None


def request(text=CAT, **parts):
    parts = parts or {"images": tensor_file()}
    told = [("request", "application/json", text)] if text is not None else []
    for name, contents in parts.items():
        contents = contents if isinstance(contents, list) else [contents]
        told += [(name, "application/octet-stream", content) for content in contents]
    return encode_parts(told)


def told(**fields):
    return json.dumps({"prompts": ["a cat"]} | fields).encode()


@pytest.mark.parametrize("shape", [(3, 4, 6, 3), (2, 5, 4, 6, 3)])
def test_a_request_arrives_as_it_was_sent(shape):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    prompts = ["a cat\r\n--x", "ein Kätzchen 猫", ""][: len(images)]
    metadata = [{"prompt": p, "include": [{"class": "cat", "count": 2}], "x": 0.1} for p in prompts]
    asked = decode_request(*encode_request(images, prompts, metadata, "abc-1"), LIMITS)
    assert asked.id == "abc-1" and asked.prompts == prompts and asked.metadata == metadata
    np.testing.assert_array_equal(asked.images, images)


def test_the_tensor_is_that_of_safetensors():
    images = pictures(3)
    np.testing.assert_array_equal(load(encode_tensor(images))["images"], images)
    np.testing.assert_array_equal(decode_tensor(save({"images": images}), LIMITS), images)
    sliced = np.arange(2 * 8 * 6 * 3, dtype=np.uint8).reshape(2, 8, 6, 3)[:, ::2]
    np.testing.assert_array_equal(decode_tensor(encode_tensor(sliced), LIMITS), sliced)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_files_of_pictures_arrive_as_they_are(format):
    images = pictures(2, 8, 10)
    options = {"lossless": True} if format == "WEBP" else {}
    files = [picture_file(format, Image.fromarray(image), **options) for image in images]
    asked = decode_request(*encode_request(files, ["a", "b"], [{}, {}]), LIMITS)
    expected = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    np.testing.assert_array_equal(asked.images, expected)
    if format != "JPEG":
        np.testing.assert_array_equal(asked.images, images)


def test_a_path_in_the_metadata_is_not_sent():
    record = {"prompt": "a cat", "image": "/home/me/cat.png", "n": 1}
    asked = decode_request(*encode_request(pictures(1), ["a cat"], [record]), LIMITS)
    assert asked.metadata == [{"prompt": "a cat", "n": 1}]


def test_the_choice_of_rewards_is_the_runs():
    record = {"prompt": "a cat", "rewards": ["mine"]}
    asked = decode_request(*encode_request(pictures(1), ["a cat"], [record]), LIMITS)
    assert asked.metadata == [{"prompt": "a cat"}]


def test_the_same_content_has_the_same_digest():
    def digest(images, prompt):
        return decode_request(*encode_request(images, [prompt], [{}]), LIMITS).digest

    assert digest(pictures(1), "a") == digest(pictures(1), "a")
    others = [digest(pictures(1), "b"), digest(pictures(1, seed=1), "a")]
    assert len({digest(pictures(1), "a"), *others}) == 3


@pytest.mark.parametrize(
    ("content", "status", "what"),
    [
        (b"", 422, "no safetensors"),
        (b"\xff" * 8 + b"{}", 422, "no safetensors"),
        (struct.pack("<Q", 5000) + b" " * 5000, 422, "no safetensors"),
        (struct.pack("<Q", 3) + b"{]}", 422, "no JSON"),
        (struct.pack("<Q", 4000) + b"[" * 4000, 422, "no JSON"),
        (struct.pack("<Q", 2) + b"[]", 422, "one tensor 'images'"),
        (tensor_file(dtype="F32", size=48), 422, "of type U8"),
        (tensor_file(name="pictures"), 422, "one tensor 'images'"),
        (tensor_file(more={"b": {"dtype": "U8"}}), 422, "one tensor 'images'"),
        (tensor_file(shape=(1, 2, 2, 4)), 422, "must be \\[b, h, w, 3\\]"),
        (tensor_file(shape=(4, 3)), 422, "must be \\[b, h, w, 3\\]"),
        (tensor_file(shape=(1, 0, 2, 3)), 422, "numbers above 0"),
        (tensor_file(shape=(-1, -2, 2, 3), size=12), 422, "numbers above 0"),
        (tensor_file(shape=(True, 2, 2, 3), size=12), 422, "numbers above 0"),
        (tensor_file(shape=(1.0, 2, 2, 3), size=12), 422, "numbers above 0"),
        (tensor_file(shape=(1, 2, 2, 3), size=11), 422, "other ones"),
        (tensor_file(offsets=[1, 13]), 422, "other ones"),
        (tensor_file(shape=(1, 2**40, 2**40, 3), size=12), 413, "64 pixels"),
        (tensor_file(shape=(1, 65, 1, 3)), 413, "64 pixels"),
        (tensor_file(shape=(5, 1, 1, 3)), 413, "4 images"),
        (tensor_file(shape=(1, 9, 1, 1, 3)), 413, "8 frames"),
        (tensor_file(shape=(2, 64, 33, 3)), 413, "4096 pixels together"),
    ],
    ids=shown,
)
def test_a_wrong_tensor_is_refused(content, status, what):
    with pytest.raises(Refused, match=what) as refused:
        decode_request(*request(images=content), LIMITS)
    assert refused.value.status == status


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


@pytest.mark.parametrize(
    ("content", "status", "what"),
    [
        (b"garbage", 422, "image 0 is no whole PNG"),
        (b"", 422, "image 0 is no whole PNG"),
        (picture_file("GIF"), 422, "image 0 is no whole PNG"),
        (picture_file("BMP"), 422, "image 0 is no whole PNG"),
        (picture_file("PNG")[:60], 422, "image 0 is no whole PNG"),
        (picture_file("JPEG")[:400], 422, "image 0 is no whole PNG"),
        (picture_file("PNG", FRAMES[0], save_all=True, append_images=FRAMES[1:]), 422, "frames"),
        (picture_file("WEBP", FRAMES[0], save_all=True, append_images=FRAMES[1:]), 422, "frames"),
        (picture_file("PNG", Image.new("RGBA", (4, 4))), 422, "mode RGBA"),
        (picture_file("PNG", Image.new("I;16", (4, 4))), 422, "mode I;16"),
        (picture_file("JPEG", Image.new("CMYK", (4, 4))), 422, "mode CMYK"),
        (picture_file("JPEG") + b"\xff\xda" * 65, 422, "more than 64 scans"),
        (png_of(100_000, 100_000), 413, "image 0 has more than 4096 pixels"),
        (png_of(2**31 - 1, 2**31 - 1), 413, "more than 4096 pixels"),
        (png_of(65, 1), 413, "65 x 1 pixels: a side may have 64"),
        (webp_of(16_383, 16_383), 413, "image 0 has 16383 x 16383"),
        (picture_file("WEBP", Image.new("RGB", (1, 70))), 413, "1 x 70"),
    ],
    ids=shown,
)
def test_a_wrong_picture_is_refused(content, status, what):
    with pytest.raises(Refused, match=what) as refused:
        decode_request(*request(image=content), LIMITS)
    assert refused.value.status == status


def test_a_png_that_inflates_is_read_to_its_size_only():
    asked = decode_request(*request(image=png_of(4, 4, bytes(10**7))), LIMITS)
    assert asked.images.shape == (1, 4, 4, 3)


@pytest.mark.parametrize(
    "options", [{}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\b\0\0"}]
)
def test_a_webp_files_size_is_that_of_its_header(options):
    file = picture_file("WEBP", Image.new("RGB", (37, 21), "red"), **options)
    assert webp_size(file) == (37, 21)


def test_pictures_of_a_request_share_size_and_limit():
    small, large = (picture_file("PNG", Image.new("RGB", (side, side))) for side in (4, 60))
    two = json.dumps({"prompts": ["a", "b"]}).encode()
    with pytest.raises(Refused, match="of one size"):
        decode_request(*request(two, image=[small, large]), LIMITS)
    with pytest.raises(Refused, match="4096 pixels together") as refused:
        decode_request(*request(two, image=[large, large]), LIMITS)
    assert refused.value.status == 413


DEEP = told(metadata=[{"a": json.loads("[" * 7 + "]" * 7)}])


@pytest.mark.parametrize(
    ("text", "status", "what"),
    [
        (b"{", 422, "no JSON"),
        (b"\xff", 422, "no JSON in UTF-8"),
        (b"[" * 9000, 422, "no JSON"),
        (b'{"prompts": ["a"], "metadata": [{"x": NaN}]}', 422, "finite numbers"),
        (b'{"prompts": ["a"], "metadata": [{"x": 1e999}]}', 422, "too large for a float"),
        (b'{"prompts": ["a"], "metadata": [{"x": 1' + b"0" * 5000 + b"}]}", 422, "no JSON"),
        (b'{"prompts": ["\\ud800"]}', 422, "surrogate"),
        (b'{"prompts": ["a"], "metadata": [{"\\ud800": 1}]}', 422, "surrogate"),
        (told(metadata=[{"x": "y" * 10_000}]), 413, "more than 10000 bytes"),
        (told(metadata=[{"x": [0] * 300}]), 413, "more than 200 values"),
        (DEEP, 422, "nested deeper than 6"),
        (b"[]", 422, "must be an object"),
        (told(path="/etc/passwd"), 422, "prompts, metadata and id only"),
        (told(prompts="a cat"), 422, "list of texts"),
        (told(prompts=[1]), 422, "list of texts"),
        (told(prompts=[]), 422, "0 prompts"),
        (told(prompts=["a"] * 5), 413, "5 prompts: a request may have 1 to 4"),
        (told(prompts=["a", "b"]), 422, "1 images for 2 prompts"),
        (told(metadata=[]), 422, "0 metadata for 1 prompts"),
        (told(metadata=["x"]), 422, "list of objects"),
        (told(metadata=[{"image": "/etc/passwd"}]), 422, "'image' is a path"),
        (told(id=7), 422, "id must be"),
        (told(id="x" * 65), 422, "id must be"),
        (told(id="../x"), 422, "id must be"),
    ],
    ids=shown,
)
def test_wrong_prompts_and_metadata_are_refused(text, status, what):
    with pytest.raises(Refused, match=what) as refused:
        decode_request(*request(text), LIMITS)
    assert refused.value.status == status


def test_metadata_may_be_as_deep_and_many_as_allowed():
    metadata = [{"a": json.loads("[" * 5 + "]" * 5), "b": list(range(100))}]
    assert decode_request(*request(told(metadata=metadata)), LIMITS).metadata == metadata


KIND, BODY = request()


@pytest.mark.parametrize(
    ("kind", "body", "status", "what"),
    [
        ("application/json", BODY, 415, "must be multipart/form-data"),
        ("", BODY, 415, "must be multipart/form-data"),
        ("multipart/form-data", BODY, 400, "a boundary"),
        ("multipart/form-data; boundary=" + "x" * 71, BODY, 400, "a boundary"),
        ("multipart/form-data; boundary=other", BODY, 400, "announced boundary"),
        (KIND, b"garbage", 400, "announced boundary"),
        (KIND, b"", 400, "last boundary"),
        (KIND, BODY[:-40], 400, "last boundary"),
        (KIND, BODY.replace(b"form-data;", b"attachment;"), 400, "no name"),
        (KIND, BODY.replace(b"Content-Disposition", b"X" * 2000), 400, "announced boundary"),
        (KIND, BODY.replace(b"Content-Type", b"Content-Transfer-Encoding"), 400, "as they are"),
        (*request(None), 400, "one part named request"),
        (*request(request=CAT), 400, "one part named request"),
        (*request(CAT, images=tensor_file(), image=b""), 400, "one part named images, or"),
        (*request(CAT, images=[tensor_file()] * 2), 400, "one part named images, or"),
        (*request(CAT, file=b""), 400, "'file' is unknown"),
        (*request(CAT, image=[b""] * 5), 413, "more than 5 parts"),
    ],
    ids=shown,
)
def test_a_wrong_body_is_refused(kind, body, status, what):
    with pytest.raises(Refused, match=what) as refused:
        decode_request(kind, body, LIMITS)
    assert refused.value.status == status


def test_no_body_makes_another_error():
    """Bytes changed, removed and added anywhere are a request or refused."""
    rng = np.random.default_rng(0)
    kinds = request(), request(image=picture_file("PNG")), request(image=picture_file("WEBP"))
    refusals = 0
    for i in range(400):
        kind, body = kinds[i % 3]
        body = bytearray(body)
        for _ in range(rng.integers(1, 5)):
            at = int(rng.integers(len(body)))
            what = rng.integers(3)
            if what == 0:
                body[at] = rng.integers(256)
            elif what == 1:
                del body[at : at + int(rng.integers(1, 40))]
            else:
                body[at:at] = rng.bytes(int(rng.integers(1, 40)))
        try:
            decode_request(kind, body, LIMITS)
        except Refused as error:
            refusals += 1
            assert 400 <= error.status < 500
    assert refusals > 100


def test_an_answer_arrives_exactly():
    rng = np.random.default_rng(0)
    scores = {
        "a": rng.normal(size=5).astype(np.float32),
        "b": np.float32([1e-40, 3e38, 0, -0.1, 1]),
    }
    found, seconds = decode_answer(encode_answer(scores, 0.25), 5, ["b"])
    assert seconds == 0.25 and list(found) == ["a", "b"]
    for name in scores:
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], scores[name])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"<html>", "no JSON"),
        (b"[]", "no JSON"),
        (b'{"scores": {"a": [1, 2]}}', "no JSON"),
        (b'{"scores": {}, "seconds": 1}', "no scores"),
        (b'{"scores": [1, 2], "seconds": 1}', "no scores"),
        (b'{"scores": {"b": [1, 2]}, "seconds": 1}', "no score 'a', but b"),
        (b'{"scores": {"a": [1]}, "seconds": 1}', "1 scores 'a' for 2 images"),
        (b'{"scores": {"a": 1}, "seconds": 1}', "no list of scores 'a' for 2"),
        (b'{"scores": {"a": [1, null]}, "seconds": 1}', "no numbers"),
        (b'{"scores": {"a": [1, true]}, "seconds": 1}', "no numbers"),
        (b'{"scores": {"a": [1, "2"]}, "seconds": 1}', "no numbers"),
        (b'{"scores": {"a": [1, NaN]}, "seconds": 1}', "nan for image 1"),
        (b'{"scores": {"a": [1, 1e39]}, "seconds": 1}', "1e\\+39 for image 1"),
        (b'{"scores": {"a": [1' + b"0" * 400 + b', 1]}, "seconds": 1}', "for image 0"),
        (b'{"scores": {"a": [1, 2]}, "seconds": NaN}', "no finite seconds"),
    ],
    ids=shown,
)
def test_a_wrong_answer_is_malformed(content, what):
    with pytest.raises(Malformed, match=what):
        decode_answer(content, 2, ["a"])


def test_metadata_that_json_cannot_hold_are_a_sentence():
    with pytest.raises(ValueError, match="metadata for a reward server must be JSON"):
        encode_request(pictures(1), ["a"], [{"x": {1, 2}}])
