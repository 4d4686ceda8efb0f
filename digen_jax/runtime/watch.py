"""Looks after what threads do: whether it takes longer than it may."""

import contextlib
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from digen_jax.process.ending import STOPPED, leave
from digen_jax.runtime.clock import Stopwatch, measured
from digen_jax.scheduling.deadlines import Deadline

LOOKS = 20  # within a deadline, at most a second apart


@dataclasses.dataclass
class _Work:
    stopwatch: Stopwatch
    seconds: float  # it may take
    late: Callable[[float], None]
    seen: float = 0.0  # seconds in which this process ran, so that one that was stopped for a while is not late


class Watch:
    """One thread, which begins with the first work that has a deadline, and calls who is to be told of late work."""

    def __init__(self, deadline: Deadline):
        self._deadline = deadline
        self._works: dict[int, _Work] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def over(self, expected: float | None, late: Callable[[float], None]) -> Iterator[Stopwatch]:
        """Times a block, as `measured`; another thread calls `late(seconds)` once it has taken more than it may.

        Compilation and pauses do not count. `expected` are the block's seconds, None: they are unknown.
        """
        seconds = self._deadline.seconds(expected)
        with measured() as stopwatch:
            if seconds == math.inf:
                yield stopwatch
                return
            work = _Work(stopwatch, seconds, late)
            with self._lock:
                self._works[id(work)] = work
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
                    self._thread.start()
            self._changed.set()
            try:
                yield stopwatch
            finally:
                with self._lock:
                    self._works.pop(id(work), None)

    def close(self) -> None:
        """Looks no more."""
        self._closed = True
        self._changed.set()

    def _look(self) -> None:
        while not self._closed:
            with self._lock:
                shortest = min((work.seconds for work in self._works.values()), default=math.inf)
            every, begin = min(1.0, shortest / LOOKS), time.perf_counter()
            if shortest == math.inf:
                self._changed.wait()
            else:
                time.sleep(every)
            self._changed.clear()
            passed = min(time.perf_counter() - begin, 2 * every)
            for work in self._late(passed):
                work.late(work.seconds)

    def _late(self, passed: float) -> list[_Work]:
        """What is late now, and not looked at again."""
        with self._lock:
            for work in self._works.values():
                work.seen += passed
            late = {
                key: work
                for key, work in self._works.items()
                if min(work.seen, work.stopwatch.so_far()) > work.seconds
            }
            for key in late:
                del self._works[key]
        return list(late.values())


def end_process(who: str, what: str, seconds: float) -> None:
    """Ends this process, in which whoever would save hangs; its last checkpoint stays."""
    print(
        f"\n{who} hangs: {what} has taken more than {seconds:g} seconds (config.runtime.deadline). The process "
        f"ends with code {STOPPED}; the same command goes on from the last checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    leave(STOPPED)
