"""Reward "ocr": how much of the text quoted in a prompt is readable in the image.

The score is that of Flow-GRPO (Liu et al. 2025, arXiv 2505.05470; yifan123/flow_grpo, flow_grpo/ocr.py, commit
fc412d2): 1 - min(d, n) / n, where n is the length of the quoted text and d its Levenshtein distance to all recognized
text; d = 0 if the quoted text is a substring. Both are in lower case and without spaces.

Differences:

- Flow-GRPO uses PaddleOCR 2 (English models), this module RapidOCR with the PP-OCRv6 small models of its wheel, in
  ONNX Runtime on the CPU. Both drop text with a confidence below 0.5.
- Flow-GRPO passes RGB to a model that expects BGR; here the channels are swapped.
- Flow-GRPO only supports `"` as quotation mark, and fails for prompts without one; here also “ ” and „ “.
- If recognition raises an error, Flow-GRPO scores 0; here the reward fails and is retried.

Both use the first of several quoted texts.
"""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, ImageDraw, ImageFont

from digen_jax.errors import ConfigError, check_range
from digen_jax.rewards.sanity_check import SanityCheck

PACKAGES = ("rapidocr", "onnxruntime", "rapidfuzz")
QUOTED = re.compile(r'"([^"]*)"|“([^“”]*)”|„([^„“”]*)[“”]')
FRAMES = 4  # every fourth frame of a clip is read

Reader = Callable[[UInt8[np.ndarray, "h w 3"]], str]


@dataclasses.dataclass(frozen=True)
class Ocr:
    """Scores the readability of the quoted text in [0, 1]. Models are loaded at the first call in a process.

    In clips, every fourth frame is read, and the score is the mean over the frames with nonzero score, as in
    Flow-GRPO's `OcrScorer_video_or_image` (zhtmike/flow_grpo, flow_grpo/ocr.py, commit def7b84, called by rewards.py
    of yifan123/flow_grpo at 54809b5). As in the source, a substring match does not score 1 in clips.
    """

    threads: int = 1  # of ONNX Runtime

    def __post_init__(self):
        """Raises ConfigError if packages are not installed, or `threads` is not positive."""
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            text = f"the reward 'ocr' needs {', '.join(missing)}"
            raise ConfigError(f"{text}: run pip install -r requirements-reward.txt")
        check_range("threads", self.threads, 1)

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns the scores. The metadata is ignored. Raises ValueError if a prompt quotes no text."""
        del metadata
        read, scores = reader(self.threads), []
        for image, prompt in zip(images, prompts, strict=True):
            text = quoted(prompt)
            if text is None:
                raise ValueError(f"the prompt {prompt!r} quotes no text")
            is_clip = image.ndim == 4
            scores.append(of_clip(image, text, read) if is_clip else of_text(read(image), text))
        return np.array(scores, np.float32)


def needs(record: dict, settings: Mapping[str, Any] | None = None) -> str | None:
    """Describes the missing input of a record, such as "quotes no text", or returns None."""
    del settings
    return None if quoted(record["prompt"]) else 'quotes no text, such as a sign that says "OPEN"'


def quoted(prompt: str) -> str | None:
    """Returns the first non-blank quoted text of a prompt, or None."""
    texts = (match[match.lastindex or 0].strip() for match in QUOTED.finditer(prompt))
    return next(filter(None, texts), None)


def of_text(found: str, quoted: str) -> float:
    """Returns the score of an image with the text `found`."""
    found, quoted = _normalize(found), _normalize(quoted)
    return 1.0 if quoted in found else similarity(found, quoted)


def of_clip(clip: UInt8[np.ndarray, "t h w 3"], quoted: str, read: Reader) -> float:
    """Returns the score of a clip: the mean over every fourth frame, excluding frames that score 0."""
    quoted = _normalize(quoted)
    scores = [similarity(_normalize(read(frame)), quoted) for frame in clip[::FRAMES]]
    positive = [score for score in scores if score > 0]
    return sum(positive) / len(positive) if positive else 0.0


def similarity(found: str, quoted: str) -> float:
    """Returns 1 - min(d, n) / n for the Levenshtein distance d of two texts and the length n >= 1 of the second."""
    from rapidfuzz.distance import Levenshtein

    return 1 - min(Levenshtein.distance(found, quoted), len(quoted)) / len(quoted)


@functools.cache
def reader(threads: int) -> Reader:
    """Returns a function that recognizes all text in an image, from top to bottom and left to right."""
    import cv2
    from rapidocr import RapidOCR

    cv2.setNumThreads(threads)
    engine = RapidOCR(
        params={
            "Global.use_cls": False,  # no correction of 180 degree rotations, as in Flow-GRPO
            "Global.log_level": "critical",  # otherwise images without text log warnings
            # In larger images, text is detected at this size but recognized at the original size.
            "Det.limit_type": "max",
            "Det.limit_side_len": 512,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

    def read(image: UInt8[np.ndarray, "h w 3"]) -> str:
        return "".join(cast(Any, engine(image[..., ::-1])).txts or ())

    return read


def sanity_check() -> SanityCheck:
    """Returns images of the quoted word, another word, and no text, in Pillow's font."""
    prompts = ['a sign that says "HELLO"', "a sign that says “WORLD”", 'a sign that says "HELLO"']
    images = np.stack([draw_text(text) for text in ("HELLO", "HELLO", "")])
    # WORLD differs in four of five letters.
    expected = np.array([1, 0.2, 0], np.float32)
    return SanityCheck(images, prompts, [{"prompt": prompt} for prompt in prompts], expected, 1e-6)


def draw_text(text: str) -> UInt8[np.ndarray, "128 256 3"]:
    """Renders a text in black on white."""
    image, font = Image.new("RGB", (256, 128), "white"), ImageFont.load_default(48)
    ImageDraw.Draw(image).text((128, 64), text, "black", font, anchor="mm")
    return np.asarray(image)


def _normalize(text: str) -> str:
    return text.replace(" ", "").lower()
