"""The reward of text in images: its score against Flow-GRPO's formula, and words that Pillow draws.

The fonts are matplotlib's: DejaVu (Bitstream Vera licence, changes in the public domain).
"""

import functools
import socket
import textwrap

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.errors import ConfigError
from digen_jax.rewards import ocr
from tests.pipelines import ROOT

FONTS = matplotlib.get_data_path() + "/fonts/ttf/"
FLOW_GRPO = ROOT / "tests" / "data" / "ocr_test.txt"
WORDS = [
    "OPEN",
    "Hello World",
    "jazz",
    "No. 42",
    "QUIET",
    "Stop!",
    "Saturday",
    "24h",
    "Zebra",
    "1999",
]


@functools.cache
def distance(a, b):
    """Levenshtein's distance by its definition."""
    if not a or not b:
        return len(a) + len(b)
    change = distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(change, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)


def drawn(text, size=256, font="DejaVuSans.ttf", points=40, angle=0.0, noise=0.0):
    """A text on a picture, turned by an angle in degrees, with noise of a standard deviation in units of 1/255."""
    picture = Image.new("RGB", (size, size), (200, 215, 235))
    place, anchor = (size // 2, size // 2), "mm"
    face = ImageFont.truetype(FONTS + font, points)
    ImageDraw.Draw(picture).text(place, text, (90, 20, 30), face, anchor, align="center")
    turned = picture.rotate(angle, Image.Resampling.BICUBIC, fillcolor=(200, 215, 235))
    noisy = turned + np.random.default_rng(0).normal(0, noise, (size, size, 3))
    return np.clip(np.round(noisy), 0, 255).astype(np.uint8)


def scores(images, texts, reward=None):
    prompts = [f'a wall with "{text}" on it' for text in texts]
    return (reward or ocr.Ocr())(np.stack(images), prompts, [{}] * len(texts))


@pytest.fixture(scope="module", autouse=True)
def no_network():
    """The models lie in the installed package: nothing is downloaded when they are loaded."""

    def refuse(*args):
        raise AssertionError("a connection")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        ocr.reader.cache_clear()
        yield


@pytest.mark.parametrize("seed", range(20))
def test_the_score_is_flow_grpos(seed):
    rng = np.random.default_rng(seed)
    wanted, found = ("".join(rng.choice(list("aB c"), rng.integers(1, 7))) for _ in range(2))
    wanted = wanted if wanted.strip() else "aB"
    bare_wanted, bare_found = (text.lower().replace(" ", "") for text in (wanted, found))
    length = len(bare_wanted)
    edited = 1 - min(distance(bare_found, bare_wanted), length) / length
    part = bare_wanted in bare_found
    clip = np.zeros((1, 1, 1, 3), np.uint8)
    assert ocr.of_text(found, wanted) == (1 if part else edited)
    assert ocr.of_clip(clip, wanted, lambda _: found) == edited


def test_of_a_clip_every_fourth_frame_counts_if_it_has_any_of_the_text():
    texts = {0: "abcd", 4: "", 8: "abxx", 12: "zzzz"}  # no other frame is read
    clip = np.broadcast_to(np.arange(14, dtype=np.uint8)[:, None, None, None], (14, 1, 1, 3))
    read = lambda frame: texts[int(frame[0, 0, 0])]  # noqa: E731
    assert ocr.of_clip(clip, "A b C d", read) == (1 + 0.5) / 2
    assert ocr.of_clip(clip, "e", read) == 0


@pytest.mark.parametrize(
    "prompt, text",
    [
        ('a sign "Open 24h" in rain', "Open 24h"),
        ("a sign “Open”", "Open"),
        ("ein Schild „Offen“ und „Zu“", "Offen"),
        ('“first” and "second"', "first"),
        ('"" on " a b "', "a b"),
        ('a sign that is 12" wide', None),
        ("it's a 'sign'", None),
        ('" "', None),
    ],
)
def test_the_first_quoted_text_counts(prompt, text):
    assert ocr.quoted(prompt) == text
    assert (ocr.needs({"prompt": prompt}) is None) == (text is not None)


def test_every_prompt_of_flow_grpos_file_has_the_text_that_flow_grpo_takes():
    for record in read_prompt_file(FLOW_GRPO):
        assert ocr.quoted(record["prompt"]) == record["prompt"].split('"')[1].strip()
        assert ocr.needs(record) is None


def test_words_are_read_and_other_words_score_less():
    images = [drawn(word) for word in WORDS]
    right = scores(images, WORDS)
    assert right.mean() > 0.97
    wrong = scores(images[:3], WORDS[1:4])
    assert (wrong < 0.5).all()
    one_letter = scores(images[:1], ["OPEM"])
    assert one_letter == pytest.approx([0.75])


def test_a_clip_is_read_too():
    empty = np.full((256, 256, 3), 99, np.uint8)
    clips = [np.stack([drawn("OPEN"), empty]), np.stack([empty, drawn("OPEN")])]
    assert scores(clips, ["OPEN", "OPEN"]).tolist() == [1, 0]


def test_missing_packages_and_invalid_settings_are_refused(monkeypatch):
    monkeypatch.setattr(ocr.importlib.util, "find_spec", lambda name: None if "o" in name else 1)
    with pytest.raises(ConfigError) as error:
        ocr.Ocr()
    assert str(error.value) == (
        "the reward 'ocr' needs rapidocr, onnxruntime: run pip install -r requirements-reward.txt"
    )
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="threads must be 1"):
        ocr.Ocr(threads=0)


def test_a_prompt_without_quotes_is_refused():
    with pytest.raises(ValueError, match="the prompt 'a wall' quotes no text"):
        ocr.Ocr()(np.zeros((1, 8, 8, 3), np.uint8), ["a wall"], [{}])


@pytest.mark.slow
def test_texts_of_flow_grpos_prompts():
    """Of 512 x 512 pixels, in four fonts."""
    texts = [ocr.quoted(record["prompt"]) for record in read_prompt_file(FLOW_GRPO)][:4]
    fonts = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono-Bold"]
    lines = ["\n".join(textwrap.wrap(text, 16)) for text in texts]
    images = [drawn(text, 512, f"{fonts[i]}.ttf", points=44) for i, text in enumerate(lines)]
    assert scores(images, texts).mean() > 0.95


@pytest.mark.slow
def test_turned_and_noisy_words_are_read_and_more_noise_and_larger_angles_leave_less():
    clean = scores([drawn(word, angle=-8.0, noise=20.0) for word in WORDS], WORDS).mean()
    assert clean > 0.9
    spoiled = scores([drawn(word, noise=200.0, angle=50.0) for word in WORDS], WORDS).mean()
    assert spoiled < clean - 0.3
