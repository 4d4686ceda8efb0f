"""Each request scored once: a repeated id gets the first answer, or waits for it."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from digen_jax.rewards.service.limits import Refused


class Answers:
    """Answers by the ids of requests, for one event loop.

    Args:
      seconds: how long an answer is kept.
      most: answers that are kept; the oldest are dropped first. Those that are being made are not counted, as the
        server's queue limits them.
    """

    def __init__(self, seconds: float, most: int, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._most, self._clock = seconds, most, clock
        self._running: dict[str, tuple[bytes, asyncio.Task]] = {}
        self._kept: OrderedDict[str, tuple[bytes, float, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    async def once(
        self, id: str | None, digest: bytes, make: Callable[[], Awaitable[Any]]
    ) -> tuple[Any, bool]:
        """(the answer, whether it was repeated); one that fails is not kept.

        The answer is made to its end if its sender goes away, as a repeated request will ask for it.

        Raises:
          Refused: the id belongs to another content; and whatever `make` raises.
        """
        if id is None:
            return await asyncio.shield(asyncio.ensure_future(make())), False
        self._forget()
        if id in self._kept:
            known, _, answer = self._kept[id]
            self._check(known, digest)
            return answer, True
        if id in self._running:
            known, task = self._running[id]
            self._check(known, digest)
            return await asyncio.shield(task), True
        task = asyncio.ensure_future(make())
        self._running[id] = digest, task
        task.add_done_callback(lambda done: self._keep(id, digest, done))
        return await asyncio.shield(task), False

    def _keep(self, id: str, digest: bytes, done: asyncio.Task) -> None:
        del self._running[id]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[id] = digest, self._clock() + self._seconds, done.result()
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def _forget(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values()))[1] <= now:
            self._kept.popitem(last=False)

    @staticmethod
    def _check(known: bytes, digest: bytes) -> None:
        if known != digest:
            raise Refused(422, "id belongs to a request with another content: give each its own")
