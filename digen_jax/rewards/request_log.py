"""Records requests of rewards to servers, for the timeline.

Requests are recorded in the scoring process and returned with the answer, as times relative to it. The processes need
not share a clock; the error is the latency of the answer.
"""

import collections
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

ADDRESS = 40  # maximum characters of an address in a row name
KEPT = 10_000  # maximum requests kept until the next answer; older ones are dropped


class Exchange(NamedTuple):
    """A request in the timeline; times are `time.perf_counter` seconds unless stated otherwise."""

    server: str
    begin: float
    end: float
    images: int
    failure: str | None  # reason for a retry


_recorded: collections.deque[Exchange] = collections.deque(maxlen=KEPT)


def recorder(kind: str) -> Callable[[Exchange], None]:
    """Returns a thread-safe listener for a `FailoverClient` with servers of a kind, such as "judge"."""
    return lambda exchange: _recorded.append(exchange._replace(server=row(kind, exchange.server)))


def row(kind: str, address: str) -> str:
    """Returns a server's row name, such as "judge 127.0.0.1:8000"; long addresses are shortened."""
    short = address.partition("://")[2]
    if len(short) > ADDRESS:
        short = f"{short[: ADDRESS // 2]}…{short[-ADDRESS // 2 + 1 :]}"
    return f"{kind} {short}"


def take_exchanges() -> tuple[Exchange, ...]:
    """Returns and clears the recorded requests, with (negative) times relative to now."""
    found = []
    while _recorded:
        found.append(_recorded.popleft())
    return moved(found, -time.perf_counter())


def moved(exchanges: Iterable[Exchange], seconds: float) -> tuple[Exchange, ...]:
    """Shifts the times of exchanges by some seconds, such as to another clock."""
    return tuple(e._replace(begin=e.begin + seconds, end=e.end + seconds) for e in exchanges)
