"""Requests that wait are scored together, several calls at a time."""

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from digen_jax.rewards.service.limits import Limits, Refused
from digen_jax.rewards.service.wire import Asked

# (images, prompts, metadata) -> scores by name.
Score = Callable[..., Awaitable[Mapping[str, Float32[np.ndarray, "b"]]]]
LONGEST = 60.0  # seconds that a sender is asked to wait, at most


class Batcher:
    """A queue of requests and the calls that empty it, for one event loop.

    Args:
      score: is called with images of one size.
      at_once: calls at the same time.
      limits: of a batch and of the queue, in images. A request is never divided.
    """

    def __init__(self, score: Score, at_once: int, limits: Limits):
        self._score, self._at_once, self._limits = score, at_once, limits
        self._waiting: collections.deque[tuple[Asked, asyncio.Future]] = collections.deque()
        self._calls: set[asyncio.Task] = set()
        self.queued = 0  # images that wait
        self.scored, self._seconds = 0, 0.0  # images that were scored, and seconds of their calls

    async def __call__(self, asked: Asked) -> tuple[dict[str, Float32[np.ndarray, "b"]], float]:
        """(scores by name, seconds of the call that made them).

        Raises:
          Refused: 503, the queue is full; and whatever `score` raises for this request alone.
        """
        count = len(asked.prompts)
        if self.queued + count > self._limits.queue:
            raise Refused(503, f"{self.queued} images wait already", self.after())
        self.queued += count
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, future))
        self._start()
        return await future

    def after(self) -> float:
        """Seconds in which half of the queue will be scored, as measured: when a sender may ask again."""
        each = self._seconds / self.scored if self.scored else 0.0
        return min(LONGEST, max(1.0, self.queued * each / self._at_once / 2))

    @property
    def busy(self) -> int:
        """Calls that run."""
        return len(self._calls)

    def _start(self) -> None:
        """Begins calls while there are requests and room."""
        while self._waiting and len(self._calls) < self._at_once:
            call = asyncio.ensure_future(self._call(self._next()))
            self._calls.add(call)
            call.add_done_callback(self._done)

    def _done(self, call: asyncio.Task) -> None:
        self._calls.discard(call)
        self._start()

    def _next(self) -> list[tuple[Asked, asyncio.Future]]:
        """The oldest request, and those after it that have its images' size and fit into a batch."""
        first = self._waiting.popleft()
        batch, left, room = [first], [], self._limits.batch - len(first[0].prompts)
        size = first[0].images.shape[1:]
        for one in self._waiting:
            count = len(one[0].prompts)
            if one[0].images.shape[1:] == size and count <= room:
                batch.append(one)
                room -= count
            else:
                left.append(one)
        self._waiting = collections.deque(left)
        self.queued -= sum(len(asked.prompts) for asked, _ in batch)
        return batch

    async def _call(self, batch: list[tuple[Asked, asyncio.Future]]) -> None:
        """Scores a batch; one that fails is scored request by request, so that each gets its own answer."""
        try:
            found = await self._scores([asked for asked, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0][1], error)
                return
            for one in batch:
                await self._call([one])
            return
        except asyncio.CancelledError:  # the server ends
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), answer in zip(batch, found, strict=True):
            _settle(future, answer)

    async def _scores(self, batch: list[Asked]) -> list[tuple[dict[str, Any], float]]:
        images = [asked.images for asked in batch]
        prompts = [prompt for asked in batch for prompt in asked.prompts]
        metadata = [record for asked in batch for record in asked.metadata]
        begin = time.perf_counter()
        together = images[0] if len(images) == 1 else np.concatenate(images)
        scores = await self._score(together, prompts, metadata)
        seconds = time.perf_counter() - begin
        self.scored += len(prompts)
        self._seconds += seconds
        ends = np.cumsum([len(asked.prompts) for asked in batch])[:-1]
        columns = {name: np.split(column, ends) for name, column in scores.items()}
        return [({name: columns[name][i] for name in columns}, seconds) for i in range(len(batch))]


def _settle(future: asyncio.Future, answer: Any) -> None:
    """Gives an answer or an error to the thread that still waits for it."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
