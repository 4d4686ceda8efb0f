"""The calls of a pool as the server makes them, and what it tells of their failures."""

import asyncio
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8

from digen_jax.errors import ConfigError
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.pool import RewardHung, RewardProcessDied, RewardTimeout
from digen_jax.rewards.service.limits import Refused

GRACE = 2.0  # seconds after which a pool that should have killed a call is not waited for
SENTENCE = 200  # characters of a reason
PATH = re.compile(r"\S*[/\\]\S*")
FAILURES = 3  # calls in a row that fail, after which a server is not well


@runtime_checkable
class Pool(Protocol):
    """What the server needs of `RewardPool`."""

    def submit(self, images: np.ndarray, prompts: list[str], metadata: list[dict]) -> Future:
        """A future with `scores`, or that is the scores."""
        ...


class Failed(Refused):
    """A call of the reward that failed: 500; 504 if it took too long; 422 if the reward refuses the request."""


class Scorer:
    """Calls a pool, and remembers how it is.

    Args:
      names: of the reward's scores, in the order of the columns where the pool returns an array.
      limit: seconds of a call. The pool should kill it then; a little later it is not waited for.
    """

    def __init__(self, pool: Pool, names: tuple[str, ...], limit: float):
        self._pool, self.names, self._limit = pool, names, limit
        self.hung: str | None = None
        self.failures = 0  # in a row
        self.last: str | None = None  # reason of the last failure

    @property
    def alive(self) -> bool:
        """Whether calls can succeed, as far as the last ones tell."""
        return self.hung is None and self.failures < FAILURES

    async def __call__(
        self, images: UInt8[np.ndarray, "..."], prompts: list[str], metadata: list[dict]
    ) -> dict[str, Float32[np.ndarray, "b"]]:
        """The scores by name.

        Raises:
          Failed: a short reason; the whole error is printed.
        """
        try:
            called = asyncio.wrap_future(self._pool.submit(images, prompts, metadata))
            found = await asyncio.wait_for(called, self._limit + GRACE)
            scores = by_name(found, self.names, len(prompts))
        except Exception as error:
            raise self._failed(error) from error
        self.failures, self.last = 0, None
        return scores

    def _failed(self, error: BaseException) -> Failed:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, ConfigError) and not isinstance(error, RewardError):
            return Failed(422, reason(error))  # the request lacks what the reward needs
        label = ", ".join(self.names)
        self.failures += 1
        late = isinstance(error, RewardTimeout | RewardHung | TimeoutError)
        if isinstance(error, RewardHung):
            self.hung = (
                f"reward {label!r} hangs in a thread of the server: it must be started again"
            )
        if late:
            self.last = f"reward {label!r} took more than {self._limit:g} seconds"
        elif isinstance(error, RewardProcessDied):
            self.last = f"reward {label!r} died in its process"
        else:
            self.last = reason(error)
        return Failed(504 if late else 500, self.last)


def by_name(found: Any, names: tuple[str, ...], count: int) -> dict[str, Float32[np.ndarray, "b"]]:
    """A pool's result as a column for each name.

    Args:
      found: has `scores`, or is them: by name, an array [b], or [b, k] for k names, or `columns` [b, k] and others
        `shown` by name.
      names: of an array's columns.
      count: of the images.

    Raises:
      RewardError: there is not one finite number an image and name.
    """
    scores = getattr(found, "scores", found)
    shown = getattr(scores, "shown", {})
    scores = getattr(scores, "columns", scores)
    if not isinstance(scores, Mapping):
        columns = np.asarray(scores).reshape(count, -1).T
        scores = dict(zip(names, columns, strict=True))
    scores = {name: np.asarray(column, np.float32) for name, column in {**scores, **shown}.items()}
    for name, column in scores.items():
        if column.shape != (count,) or not np.isfinite(column).all():
            raise RewardError(
                f"reward {name!r} has not one finite score for each of {count} images"
            )
    return scores


def reason(error: BaseException) -> str:
    """An error's first line for others: short, without paths and traces."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return PATH.sub("(a path)", line)[:SENTENCE]
