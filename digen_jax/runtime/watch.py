"""Supervises the work of threads: detects work that exceeds its deadline."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator

from digen_jax.process.ending import STOPPED, last_word, leave
from digen_jax.runtime.clock import Stopwatch, measured
from digen_jax.scheduling.deadlines import Deadline

LOOKS = 20  # checks within a deadline, at most a second apart


@dataclasses.dataclass
class _Work:
    stopwatch: Stopwatch
    seconds: float  # its limit
    late: Callable[[float], None]
    # Seconds in which this process ran, so that a process that was suspended is not late.
    seen: float = 0.0


class Watch:
    """One thread, started by the first work with a deadline, that calls the handlers of late work."""

    def __init__(self, deadline: Deadline):
        self._deadline = deadline
        self._works: dict[int, _Work] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def over(self, expected: float | None, late: Callable[[float], None]) -> Iterator[Stopwatch]:
        """Times a block, as `measured`; another thread calls `late(seconds)` when the block exceeds its limit.

        Compilation and pauses do not count. `expected` are the block's expected seconds; None: unknown.
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
        """Ends the supervision."""
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
        """Work that is late now; it is removed."""
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
    """Ends this process when its main work hangs, so that nothing can be saved; its last checkpoint remains."""
    why = (
        f"{who} hangs: {what} has taken more than {seconds:g} seconds (config.runtime.deadline). The process ends with "
        f"code {STOPPED}; the same command continues from the last checkpoint."
    )
    leave(last_word(why, STOPPED))
