"""Notices a reward that was written for pictures in [0, 1], or that computes with bytes past their range.

Both give wrong scores without an exception: numpy's 8-bit numbers wrap at 256, so that `images * 255` shows the
negative, and `images[..., 0] - images[..., 1]` is 254 where it should be -2. A trial therefore calls a reward with an
array that compares each of its element-wise operations with the same one in wide numbers. What leaves numpy, such as
a tensor of torch, is not followed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.mistakes import RewardMistake, own_lines

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
      RewardMistake: it misreads the pictures, with the lines of the user's own code.
      Exception: the reward's own.
    """
    try:
        return score(images)
    except Misread as error:
        said = f"reward {name!r} misreads its pictures: {error}. {ADVICE}"
        raise RewardMistake("\n".join([said, *own_lines(error)])) from error
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
