"""Dry run of rewards on synthetic images and real prompts before training, which finds errors and misread images.

A reward that expects images in [0, 1], or that overflows uint8, silently gives wrong scores: numpy's uint8 wraps at
256, so `images * 255` is the negative, and `images[..., 0] - images[..., 1]` is 254 instead of -2. Each element-wise
numpy operation on the synthetic images is therefore compared with the same operation in wide integers. Other libraries,
such as torch, are not covered.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from digen_jax.errors import ConfigError
from digen_jax.images import Size
from digen_jax.rewards.errors import DELIBERATE, RewardError, user_lines

KINDS = 8  # maximum number of record kinds
PIXELS = 2**24  # of the clips of one call
ADVICE = (
    "Images are uint8, from 0 to 255: convert them with images.astype(np.float32), and divide by 255 if the "
    "function expects numbers from 0 to 1"
)
# Operations that may overflow uint8.
LEAVING = (np.add, np.subtract, np.multiply, np.power, np.negative, np.left_shift)


def dry_run(
    score: Callable[..., Any], files: Iterable[Sequence[dict[str, Any]]], size: Size
) -> None:
    """Scores two synthetic images or clips for the first record of each kind in every file, by `RewardPool.score`.

    Two detect a reward that returns one number per batch. Records of one kind have the same task, rewards and fields.

    Raises:
      ConfigError: The reward raises an exception or returns something invalid.
      Stopped: See `RewardPool.score`.
    """
    for records in files:
        kinds: dict[tuple, dict[str, Any]] = {}
        for record in records:
            kind = (record.get("tag"), str(record.get("rewards")), *sorted(record))
            kinds.setdefault(kind, record)
            if len(kinds) == KINDS:
                break
        # Of long clips one kind at a time, because eight would take a gigabyte.
        records, at_once = list(kinds.values()), max(1, PIXELS // math.prod(size))
        for start in range(0, len(records), at_once):
            _score_kinds(score, records[start : start + at_once], size)


def _score_kinds(score: Callable[..., Any], records: Sequence[dict[str, Any]], size: Size) -> None:
    bright = synthetic_image(size.height, size.width)
    if size.frames > 1:
        bright = np.stack([np.roll(bright, frame, axis=1) for frame in range(size.frames)])
    images = np.stack([bright, bright // 2] * len(records)).view(Watched)
    metadata = [record for record in records for _ in range(2)]
    try:
        score(images, [record["prompt"] for record in metadata], metadata)
    except ConfigError as error:
        kind = "images" if size.frames == 1 else f"clips of {size.frames} frames"
        note = f"this was a dry run before the run, on synthetic {kind} (uint8, from 0 to 255)"
        raise type(error)(f"{error}\n  {note}") from error


def synthetic_image(height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Returns color ramps: red increases to the right, green to the bottom; blue decreases in both directions."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    ramps = np.stack([red, green, 255 - (red + green) / 2], axis=-1)
    return ramps.round().astype(np.uint8)


class Misread(Exception):
    """Raised if images are misinterpreted; the message describes the operation."""


class Watched(np.ndarray):
    """Array of uint8 images with checked operations, including those on derived arrays."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Runs a numpy operation after checking it.

        Raises:
          Misread: An operation overflows uint8, or images are multiplied by 255.
        """
        plain = [_plain(one) for one in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(map(_plain, kwargs["out"]))
        if method == "__call__" and ufunc in LEAVING and not kwargs.keys() - {"out"}:
            _check_operation(ufunc, plain)
        found = getattr(ufunc, method)(*plain, **kwargs)
        return found.view(Watched) if type(found) is np.ndarray else found


def call_watched(name: str, score: Callable[[np.ndarray], Any], images: np.ndarray) -> Any:
    """Calls a reward by `score`, which copies its images.

    After an error with watched images, it is called again with plain ones, because watching may cause errors.

    Raises:
      RewardError: The reward misinterprets the images; shows the lines of the user's code.
      Exception: Any exception of the reward.
    """
    try:
        return score(images)
    except Misread as error:
        text = f"reward {name!r} misreads its images: {error}. {ADVICE}"
        raise RewardError("\n".join([text, *user_lines(error)])) from error
    except DELIBERATE:
        raise
    except Exception:
        if not isinstance(images, Watched):
            raise
    return score(_plain(images))


def _plain(one: Any) -> Any:
    return one.view(np.ndarray) if isinstance(one, Watched) else one


def _check_operation(ufunc: np.ufunc, inputs: list[Any]) -> None:
    """Raises Misread for an operation that overflows, or that rescales uint8 images."""
    found = np.asarray(ufunc(*inputs))
    if found.dtype.kind in "iu" and found.dtype.itemsize == 1:
        exact = ufunc(*(np.asarray(one).astype(np.int64) for one in inputs))
        if (exact != found).any():
            raise Misread(f"8-bit numbers wrap in np.{ufunc.__name__}")
    by_255 = any(np.ndim(one) == 0 and one == 255 for one in inputs)
    if ufunc is np.multiply and by_255 and found.size and found.max() > 255.5:
        raise Misread("numbers from 0 to 255 are multiplied by 255")
