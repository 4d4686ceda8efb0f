"""Per-thread timers that exclude compilation and pauses, and a watchdog for work that exceeds its deadline."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax

from digen_jax.process.shutdown import STOPPED, exit_now, log_fatal
from digen_jax.scheduling.settings import time_limit

COMPILING = "/jax/core/compile"
LOWERED = f"{COMPILING}/jaxpr_to_mlir_module_duration"  # the compiler runs next
CHECKS = 20  # per deadline, at least one per second

Parts = Sequence[tuple[str, float, float]]  # (kind, start, end)

_thread = threading.local()


def _current() -> "Stopwatch | None":
    return getattr(_thread, "watch", None)


class Stopwatch:
    """Times a block of work.

    Attributes:
      seconds: Seconds of work, set on exit. Before that, any thread can read `elapsed`.
      parts: (kind, start, end) of each nested `part` block, by `time.perf_counter`.
    """

    def __init__(self):
        self.seconds = 0.0
        self.parts: list[tuple[str, float, float]] = []
        self._start = time.perf_counter()
        self._uncounted: list[tuple[float, float]] = []  # (start, end), possibly nested
        self._paused: float | None = None  # start of the current pause
        self._remote: Callable[[], float] | None = None  # seconds of remote work during that pause

    def elapsed(self) -> float:
        """Returns the seconds of work so far."""
        paused, remote, now = self._paused, self._remote, time.perf_counter()
        spans = [*self._uncounted, *([(paused, now)] if paused is not None else [])]
        here = max(0.0, now - self._start - _length(spans, self._start))
        return here if remote is None else here + remote()

    def parts_ago(self) -> tuple[tuple[str, float, float], ...]:
        """Returns (kind, start, end) of each part, in seconds ago."""
        now = time.perf_counter()
        return tuple((kind, now - start, now - end) for kind, start, end in self.parts)

    def pause(self, remote: Callable[[], float] | None = None) -> None:
        """Pauses the timer; `remote` returns seconds of work in another process to count instead."""
        self._paused, self._remote = time.perf_counter(), remote

    def resume(self, uncounted: float = 0.0) -> None:
        """Resumes the timer, excluding the last `uncounted` seconds."""
        now = time.perf_counter()
        self._paused = self._remote = None
        self._uncounted.append((now - uncounted, now))


def _length(spans: list[tuple[float, float]], start: float) -> float:
    """Returns the length of the union of spans after `start`; tracing and compilation spans can be nested."""
    total, reached = 0.0, start
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextlib.contextmanager
def measured() -> Iterator[Stopwatch]:
    """Times a block in this thread, excluding pauses, tracing and compilation."""
    outer, watch = _current(), Stopwatch()
    _thread.watch = watch
    try:
        yield watch
    finally:
        _thread.watch = outer
        watch.resume()
        watch.seconds = watch.elapsed()


@contextlib.contextmanager
def part(kind: str) -> Iterator[None]:
    """Records a block in this thread as a part of the timed work; the timeline shows parts separately."""
    start = time.perf_counter()
    yield
    if watch := _current():
        watch.parts.append((kind, start, time.perf_counter()))


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Excludes a block, in which this thread waits for other threads, from the timed work."""
    watch, start = _current(), time.perf_counter()
    if watch:
        watch.pause()
    try:
        yield
    finally:
        if watch:
            watch.resume(time.perf_counter() - start)


@contextlib.contextmanager
def remote_work(elapsed: Callable[[], float]) -> Iterator[Callable[[float, Parts], None]]:
    """Times a block that waits for another process by that process's seconds of work.

    Args:
      elapsed: Returns these seconds so far; thread-safe.

    Yields:
      A function to call with the total seconds of the work, and its parts in seconds before the call.
    """
    watch, start, counted = _current(), time.perf_counter(), 0.0

    def done(seconds: float, parts: Parts = ()) -> None:
        nonlocal counted
        counted, now = seconds, time.perf_counter()
        if watch:
            # Clamped to the block: the reply takes time to arrive, and clocks differ slightly.
            spans = ((kind, now - first, now - last) for kind, first, last in parts)
            watch.parts += [(kind, max(start, a), max(start, b)) for kind, a, b in spans]

    if watch:
        watch.pause(elapsed)
    try:
        yield done
    finally:
        if watch:
            watch.resume(max(0.0, time.perf_counter() - start - counted))


def _compiled(event: str, seconds: float, **_: object) -> None:
    """JAX monitoring listener: excludes the seconds just spent on tracing, lowering or compilation in this thread."""
    watch = _current()
    if watch is None or not event.startswith(COMPILING):
        return
    watch.resume(seconds)
    if event == LOWERED:
        watch.pause()


jax.monitoring.register_event_duration_secs_listener(cast(Any, _compiled))


@contextlib.contextmanager
def limited(
    deadline: float, expected: float | None, late: Callable[[float], None]
) -> Iterator[Stopwatch]:
    """Times a block like `measured`, and calls `late(limit)` from another thread if it exceeds its limit.

    Args:
      deadline: `least` of `time_limit`.
      expected: Expected seconds of the block. None means unknown.
      late: Handler that gets the limit in seconds.
    """
    seconds = time_limit(deadline, expected)
    with measured() as stopwatch:
        if seconds == math.inf:
            yield stopwatch
            return
        done = threading.Event()
        watch = stopwatch, seconds, late, done
        threading.Thread(target=_watch, args=watch, name="watch", daemon=True).start()
        try:
            yield stopwatch
        finally:
            done.set()


def _watch(
    stopwatch: Stopwatch, seconds: float, late: Callable[[float], None], done: threading.Event
) -> None:
    every, seen, last = min(1.0, seconds / CHECKS), 0.0, time.perf_counter()
    while not done.wait(every):
        now = time.perf_counter()
        # Seconds in which this process ran, so that a suspended process does not time out.
        seen, last = seen + min(now - last, 2 * every), now
        if min(seen, stopwatch.elapsed()) > seconds:
            return late(seconds)


def end_process(name: str, what: str, seconds: float) -> None:
    """Exits without saving, because the main work hangs. The run can resume from the last checkpoint."""
    why = (
        f"{name} hangs: {what} has taken more than {seconds:g} seconds (config.runtime.deadline). The process ends "
        f"with code {STOPPED}; the same command continues from the last checkpoint."
    )
    exit_now(log_fatal(why, STOPPED))
