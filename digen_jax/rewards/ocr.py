"""The reward of text in pictures: how much of the text that a prompt quotes can be read.

The score is that of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470; yifan123/flow_grpo, flow_grpo/ocr.py, commit
fc412d2): 1 - min(d, n) / n, where n is the length of the quoted text and d its Levenshtein distance from all text that
was read; d = 0 where the quoted text is a part of that. Both are in lower case and without spaces.

What differs:

- Flow-GRPO reads with PaddleOCR 2 (English models), this module with RapidOCR: the models PP-OCRv6 small, which its
  wheel contains, in ONNX Runtime on the CPU. Both leave out what they read with a confidence below 0.5.
- Flow-GRPO hands RGB to a model that expects BGR; here the channels are swapped.
- Flow-GRPO quotes by `"` only, and fails where a prompt has none; here “ ” and „ “ quote as well.
- Where reading fails with an error, Flow-GRPO scores 0; here the reward fails, and is asked again.

Of several quoted texts the first one counts in both.
"""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, ImageDraw, ImageFont

from digen_jax.errors import ConfigError
from digen_jax.rewards.sanity_check import SanityCheck

PACKAGES = ("rapidocr", "onnxruntime", "rapidfuzz")
QUOTED = re.compile(r'"([^"]*)"|“([^“”]*)”|„([^„“”]*)[“”]')
FRAMES = 4  # of a clip, each fourth is read


@dataclasses.dataclass(frozen=True)
class Ocr:
    """How much of the quoted text can be read, from 0 to 1; the models are loaded in the process that scores first.

    In clips every fourth frame is read, and the score is the mean over the frames in which any of the text is found,
    as in Flow-GRPO's `OcrScorer_video_or_image` (zhtmike/flow_grpo, flow_grpo/ocr.py, commit def7b84, and the
    rewards.py of yifan123/flow_grpo at 54809b5 that calls it). As there, a frame has no score of 1 for a text that is
    only a part of what is read.

    Attributes:
      threads: of ONNX Runtime.
    """

    threads: int = 1

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """The scores; the metadata is not read.

        Raises:
          ValueError: a prompt quotes no text.
        """
        del metadata
        read = reader(self.threads)
        wanted = [_quoted_or_raise(prompt) for prompt in prompts]
        score = of_picture if images.ndim == 4 else of_clip
        scores = [score(image, text, read) for image, text in zip(images, wanted, strict=True)]
        return np.array(scores, np.float32)


def ocr(threads: int = 1) -> Ocr:
    """The reward; `threads` are those of ONNX Runtime.

    Raises:
      ConfigError: its packages are not installed, or the number is not positive.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the reward 'ocr' needs {', '.join(missing)}: run pip install -r requirements-reward.txt"
        )
    if threads < 1:
        raise ConfigError(f"the reward 'ocr' has threads = {threads}: set it to 1 or more")
    return Ocr(threads)


def needs(record: dict, settings: Mapping[str, Any] | None = None) -> str | None:
    """What a prompt record lacks for this reward, as the end of a sentence about it; None: nothing."""
    del settings
    return None if quoted(record["prompt"]) else 'quotes no text, such as a sign that says "OPEN"'


def quoted(prompt: str) -> str | None:
    """The first text that a prompt quotes and that is not blank, None if there is none."""
    texts = (match[match.lastindex].strip() for match in QUOTED.finditer(prompt))
    return next(filter(None, texts), None)


def of_picture(
    picture: UInt8[np.ndarray, "h w 3"],
    wanted: str,
    read: Callable[[UInt8[np.ndarray, "h w 3"]], str],
) -> float:
    """The score of a picture in which the text `wanted` is to be read."""
    return of_text(read(picture), wanted)


def of_text(found: str, wanted: str) -> float:
    """The score of a picture in which a text was found, where `wanted` is to be read."""
    found, wanted = _bare(found), _bare(wanted)
    return 1.0 if wanted in found else similarity(found, wanted)


def of_clip(
    clip: UInt8[np.ndarray, "t h w 3"],
    wanted: str,
    read: Callable[[UInt8[np.ndarray, "h w 3"]], str],
) -> float:
    """The score of a clip: the mean over every fourth frame, without those that score 0."""
    wanted = _bare(wanted)
    scores = [similarity(_bare(read(frame)), wanted) for frame in clip[::FRAMES]]
    positive = [score for score in scores if score > 0]
    return sum(positive) / len(positive) if positive else 0.0


def similarity(found: str, wanted: str) -> float:
    """1 - min(d, n) / n for the Levenshtein distance d of two texts and the length n of the second, at least 1."""
    from rapidfuzz.distance import Levenshtein

    return 1 - min(Levenshtein.distance(found, wanted), len(wanted)) / len(wanted)


@functools.cache
def reader(threads: int) -> Callable[[UInt8[np.ndarray, "h w 3"]], str]:
    """A function that reads all text in a picture, from top to bottom and from left to right."""
    import cv2
    from rapidocr import RapidOCR

    cv2.setNumThreads(threads)
    engine = RapidOCR(
        params={
            "Global.use_cls": False,  # lines are not turned by 180 degrees, as in Flow-GRPO
            "Global.log_level": "critical",  # otherwise each picture without text is a warning
            # Larger pictures are looked for text in at this size; it is read at their own.
            "Det.limit_type": "max",
            "Det.limit_side_len": 512,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

    def read(picture: UInt8[np.ndarray, "h w 3"]) -> str:
        return "".join(engine(picture[..., ::-1]).txts or ())

    return read


def known() -> SanityCheck:
    """Pictures of one word with the font that Pillow contains: the word asked for, another one, and no text."""
    prompts = ['a sign that says "HELLO"', "a sign that says “WORLD”", 'a sign that says "HELLO"']
    images = np.stack([picture_of(text) for text in ("HELLO", "HELLO", "")])
    # Four of the five letters of WORLD must be changed.
    expected = np.array([1, 0.2, 0], np.float32)
    return SanityCheck(images, prompts, [{"prompt": prompt} for prompt in prompts], expected, 1e-6)


def picture_of(text: str) -> UInt8[np.ndarray, "128 256 3"]:
    """A text in black on white."""
    picture = Image.new("RGB", (256, 128), "white")
    font = ImageFont.load_default(48)
    ImageDraw.Draw(picture).text((128, 64), text, "black", font, anchor="mm")
    return np.asarray(picture)


def _quoted_or_raise(prompt: str) -> str:
    text = quoted(prompt)
    if text is None:
        raise ValueError(f"the prompt {prompt!r} quotes no text")
    return text


def _bare(text: str) -> str:
    return text.replace(" ", "").lower()
