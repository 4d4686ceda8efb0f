"""The requests that rewards send to servers, for the timeline of the run that asked.

A reward notes them in the process in which it scores. They travel with its answer as seconds before that answer: so
the two processes need not have the same clock, and the run places them to within the time that the answer travels.
"""

import collections
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

SHOWN = 40  # characters of an address in a row's name
KEPT = 10_000  # requests that wait for an answer to travel with; of more the newest


class Exchange(NamedTuple):
    """A request as the timeline shows it; times are in seconds, of `time.perf_counter` where nothing else is said."""

    server: str
    begin: float
    end: float
    images: int
    failure: str | None  # why it is repeated


_noted: collections.deque[Exchange] = collections.deque(maxlen=KEPT)


def noting(what: str) -> Callable[[Exchange], None]:
    """Notes what an `asking.Asker` tells it of servers of some kind, such as "judge", in any thread."""

    def note(exchange: Exchange) -> None:
        _noted.append(exchange._replace(server=row(what, exchange.server)))

    return note


def row(what: str, address: str) -> str:
    """The name of a server's row, such as "judge 127.0.0.1:8000"; the middle of a long address is left out."""
    short = address.partition("://")[2]
    if len(short) > SHOWN:
        short = f"{short[: SHOWN // 2]}…{short[-SHOWN // 2 + 1 :]}"
    return f"{what} {short}"


def taken() -> tuple[Exchange, ...]:
    """What was noted since the last call, with times before now, which are negative."""
    found = []
    while _noted:
        found.append(_noted.popleft())
    return moved(found, -time.perf_counter())


def moved(exchanges: Iterable[Exchange], seconds: float) -> tuple[Exchange, ...]:
    """Exchanges on another clock, on which all is so much later."""
    return tuple(e._replace(begin=e.begin + seconds, end=e.end + seconds) for e in exchanges)
