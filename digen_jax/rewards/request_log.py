"""Records of requests that rewards send to servers, for the timeline of the run.

A reward records them in the process in which it scores. They return with its answer, as seconds before that answer: so
the two processes need not share a clock, and the run places them to within the answer's travel time.
"""

import collections
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

ADDRESS = 40  # characters of an address in a row's name
KEPT = 10_000  # newest requests that are kept until the next answer


class Exchange(NamedTuple):
    """A request as the timeline shows it; times are seconds of `time.perf_counter` unless stated otherwise."""

    server: str
    begin: float
    end: float
    images: int
    failure: str | None  # why it is retried


_recorded: collections.deque[Exchange] = collections.deque(maxlen=KEPT)


def recorder(kind: str) -> Callable[[Exchange], None]:
    """Returns a thread-safe listener for a `FailoverClient` of servers of some kind, such as "judge"."""
    return lambda exchange: _recorded.append(exchange._replace(server=row(kind, exchange.server)))


def row(kind: str, address: str) -> str:
    """Returns the name of a server's row, such as "judge 127.0.0.1:8000"; a long address is shortened."""
    short = address.partition("://")[2]
    if len(short) > ADDRESS:
        short = f"{short[: ADDRESS // 2]}…{short[-ADDRESS // 2 + 1 :]}"
    return f"{kind} {short}"


def take_exchanges() -> tuple[Exchange, ...]:
    """Returns what was recorded since the last call, with times before now, which are negative."""
    found = []
    while _recorded:
        found.append(_recorded.popleft())
    return moved(found, -time.perf_counter())


def moved(exchanges: Iterable[Exchange], seconds: float) -> tuple[Exchange, ...]:
    """Returns the exchanges with times later by some seconds, such as on another clock."""
    return tuple(e._replace(begin=e.begin + seconds, end=e.end + seconds) for e in exchanges)
