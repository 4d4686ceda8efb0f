"""Notices a reward that was written for pictures in [0, 1], or that computes with bytes past their range.

Both give wrong scores without an exception: numpy's 8-bit numbers wrap at 256, so that `images * 255` shows the
negative, and `images[..., 0] - images[..., 1]` is 254 where it should be -2. A trial therefore calls a reward with an
array that compares each of its element-wise operations with the same one in wide numbers. What leaves numpy, such as
a tensor of torch, is not followed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.errors import RewardError, own_lines

ADVICE = (
    "Images are uint8, from 0 to 255: convert them with images.astype(np.float32), and divide by 255 where the "
    "function was written for numbers from 0 to 1"
)
# Operations that may leave the range of a byte.
LEAVING = (np.add, np.subtract, np.multiply, np.power, np.negative, np.left_shift)


class Misread(Exception):
    """Pictures are not read as what they are; the text says what was computed."""


class Watched(np.ndarray):
    """Pictures as bytes that notice how they are read; what follows from them notices it, too."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """As numpy, after a look at the operation.

        Raises:
          Misread: 8-bit numbers wrap, or pictures are multiplied by 255.
        """
        plain = [_plain(one) for one in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(map(_plain, kwargs["out"]))
        if method == "__call__" and ufunc in LEAVING and not kwargs.keys() - {"out"}:
            _look(ufunc, plain)
        found = getattr(ufunc, method)(*plain, **kwargs)
        return found.view(Watched) if type(found) is np.ndarray else found


def watched(name: str, score: Callable[[np.ndarray], Any], images: Watched) -> Any:
    """What a reward returns for watched images.

    Args:
      name: the reward's.
      score: calls it with a copy of images.
      images: to score.

    An error that only watching causes is none: the reward is then called with plain pictures.

    Raises:
      RewardError: it misreads the pictures, with the lines of the user's own code.
      Exception: the reward's own.
    """
    try:
        return score(images)
    except Misread as error:
        said = f"reward {name!r} misreads its pictures: {error}. {ADVICE}"
        raise RewardError("\n".join([said, *own_lines(error)])) from error
    except (ConfigError, Stopped):
        raise  # said on purpose, such as of a server that does not answer
    except Exception:
        return score(_plain(images))


def _plain(one: Any) -> Any:
    return one.view(np.ndarray) if isinstance(one, Watched) else one


def _look(ufunc: np.ufunc, inputs: list[Any]) -> None:
    """Raises Misread for an operation that wraps or that brings bytes to another range."""
    found = np.asarray(ufunc(*inputs))
    if found.dtype.kind in "iu" and found.dtype.itemsize == 1:
        exact = ufunc(*(np.asarray(one).astype(np.int64) for one in inputs))
        if (exact != found).any():
            raise Misread(f"8-bit numbers wrap in np.{ufunc.__name__}")
    by_255 = any(np.ndim(one) == 0 and one == 255 for one in inputs)
    if ufunc is np.multiply and by_255 and found.size and found.max() > 255.5:
        raise Misread("numbers from 0 to 255 are multiplied by 255")


KINDS = 8  # of records, at most


def dry_run(
    score: Callable[..., Any], files: Iterable[Sequence[dict[str, Any]]], height: int, width: int
) -> None:
    """Scores two made-up images for the first record of each kind in every prompt file.

    Two, because a reward that returns one number for any batch would pass with one. Records are of one kind where
    they have the same task, the same rewards and the same fields. The images notice a reward that reads them as
    something else than bytes: see `bytes_watch`.

    Args:
      score: as `RewardPool.score`.
      files: the records of each.
      height: of the images, in pixels.
      width: likewise.

    Raises:
      ConfigError: the reward raises an exception or returns something wrong; Stopped, see `RewardPool.score`.
    """
    for records in files:
        chosen = _kinds(records)
        bright = picture(height, width)
        made_up = np.stack([bright, bright // 2] * len(chosen)).view(Watched)
        chosen = [record for record in chosen for _ in range(2)]
        prompts = [record["prompt"] for record in chosen]
        try:
            score(made_up, prompts, chosen)
        except ConfigError as error:
            what = (
                "it was tried on made-up images (uint8, from 0 to 255), two for each of the first prompts, before "
                "anything was computed"
            )
            raise type(error)(f"{error}\n  {what}") from error


def picture(height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Ramps of colours: red rises from left to right, green from top to bottom, and blue falls in both directions."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    ramps = np.stack([red, green, 255 - (red + green) / 2], axis=-1)
    return ramps.round().astype(np.uint8)


def _kinds(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first record of each kind, in the file's order."""
    found: dict[tuple, dict[str, Any]] = {}
    for record in records:
        kind = (record.get("tag"), str(record.get("rewards")), *sorted(record))
        found.setdefault(kind, record)
        if len(found) == KINDS:
            break
    return list(found.values())
