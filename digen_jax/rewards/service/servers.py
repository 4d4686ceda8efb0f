"""The choice among several servers: the one with the fewest requests, and one that fails is left alone for a while."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

FIRST, MOST = 0.5, 30.0  # seconds that a server is left alone after a failure, doubling


@dataclasses.dataclass
class Server:
    """A server as its users know it."""

    url: str
    outstanding: int = 0  # requests
    total: int = 0  # requests so far
    failures: int = 0  # in a row
    free_at: float = 0.0  # when it may be asked again
    marked: float = 0.0  # time of the last failure that counts


class Servers:
    """Servers for requests of several threads.

    Args:
      urls: of each.
      first: seconds that one is left alone after its first failure.
      most: seconds at most, as they double with each failure in a row.
    """

    def __init__(
        self,
        urls: Sequence[str],
        first: float = FIRST,
        most: float = MOST,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._servers = [Server(url) for url in urls]
        self._first, self._most, self.clock = first, most, clock
        self._changed = threading.Condition()

    def __iter__(self):
        return iter(self._servers)

    def all_failed(self, times: int) -> bool:
        """Whether every server has failed so often in a row, whichever request asked."""
        return all(one.failures >= times for one in self._servers)

    def take(self, until: float) -> Server | None:
        """The server to ask now; waits while all are left alone, None if that lasts `until` a time.

        A server that has failed gets a single request until one succeeds.
        """
        with self._changed:
            while True:
                now = self.clock()
                if free := [one for one in self._servers if self._free(one, now)]:
                    chosen = min(free, key=lambda one: (one.outstanding, one.total))
                    chosen.outstanding += 1
                    chosen.total += 1
                    return chosen
                if now >= until:
                    return None
                soonest = min(
                    (one.free_at for one in self._servers if one.free_at > now), default=until
                )
                self._changed.wait(min(soonest, until) - now)

    def succeeded(self, server: Server) -> None:
        """The request was answered."""
        self._give(server, answered=True)

    def passed(self, server: Server, pause: float = 0.0) -> None:
        """The server answered that it cannot now, or not this request; it is left alone for a pause."""
        self._give(server, pause=pause)

    def failed(self, server: Server, begun: float) -> float:
        """The server did not answer well a request that began at a time; returns the seconds that it is left alone.

        Requests that were under way when it failed before are the same failure.
        """
        with self._changed:
            now = self.clock()
            if begun >= server.marked:
                server.failures += 1
                server.marked = now
                alone = min(self._most, self._first * 2 ** min(server.failures - 1, 32))
                server.free_at = max(server.free_at, now + alone)
            server.outstanding -= 1
            self._changed.notify_all()
            return max(0.0, server.free_at - now)

    def _give(self, server: Server, answered: bool = False, pause: float = 0.0) -> None:
        with self._changed:
            server.outstanding -= 1
            if answered:
                server.failures, server.free_at = 0, 0.0
            elif pause:
                server.free_at = max(server.free_at, self.clock() + pause)
            self._changed.notify_all()

    @staticmethod
    def _free(server: Server, now: float) -> bool:
        return now >= server.free_at and not (server.failures and server.outstanding)
