"""Times work in threads, without compilation and pauses, and detects work that exceeds its deadline."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from digen_jax.process.shutdown import STOPPED, exit_now, log_fatal
from digen_jax.scheduling.settings import Deadline

COMPILING = "/jax/core/compile"
LOWERED = f"{COMPILING}/jaxpr_to_mlir_module_duration"  # the compiler runs next
CHECKS = 20  # within a deadline, at most a second apart

Parts = Sequence[tuple[str, float, float]]  # (kind, start, end)

_thread = threading.local()


def _current() -> "Stopwatch | None":
    return getattr(_thread, "watch", None)


class Stopwatch:
    """Times a block of work.

    Attributes:
      seconds: Seconds of work, after the block; `elapsed` has them inside it, for any thread.
      parts: (kind, start, end) of the blocks of `part` in it, by `time.perf_counter`.
    """

    def __init__(self):
        self.seconds = 0.0
        self.parts: list[tuple[str, float, float]] = []
        self._start = time.perf_counter()
        self._uncounted: list[tuple[float, float]] = []  # spans, which may be nested
        self._paused: float | None = None  # start of a pause in progress
        self._remote: Callable[[], float] | None = None  # seconds of work in another process in it

    def elapsed(self) -> float:
        """Returns the seconds of work up to now."""
        paused, remote, now = self._paused, self._remote, time.perf_counter()
        spans = [*self._uncounted, *([(paused, now)] if paused is not None else [])]
        here = max(0.0, now - self._start - _length(spans, self._start))
        return here if remote is None else here + remote()

    def parts_ago(self) -> tuple[tuple[str, float, float], ...]:
        """Returns the parts, in seconds before now."""
        now = time.perf_counter()
        return tuple((kind, now - start, now - end) for kind, start, end in self.parts)

    def pause(self, remote: Callable[[], float] | None = None) -> None:
        """Stops the measurement; `remote` returns seconds of work in another process that count instead."""
        self._paused, self._remote = time.perf_counter(), remote

    def resume(self, uncounted: float = 0.0) -> None:
        """Continues the measurement, without the last `uncounted` seconds."""
        now = time.perf_counter()
        self._paused = self._remote = None
        self._uncounted.append((now - uncounted, now))


def _length(spans: list[tuple[float, float]], start: float) -> float:
    """Returns the length of the union of spans after `start`; tracing and compiling are nested."""
    total, reached = 0.0, start
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextlib.contextmanager
def measured() -> Iterator[Stopwatch]:
    """Measures a block in this thread, without its pauses and the tracing and compilation in it."""
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
    """Records a block in this thread as a part of the measured work, which the timeline shows separately."""
    start = time.perf_counter()
    yield
    if watch := _current():
        watch.parts.append((kind, start, time.perf_counter()))


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Does not count a block, in which this thread waits for other threads, as work."""
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
    """Counts the seconds of work in another process, for which this thread waits in the block.

    Args:
      elapsed: Returns these seconds up to now. Any thread may call.

    Yields:
      A function to call with the seconds of the complete work, and its parts in seconds before then.
    """
    watch, start, counted = _current(), time.perf_counter(), 0.0

    def done(seconds: float, parts: Parts = ()) -> None:
        nonlocal counted
        counted, now = seconds, time.perf_counter()
        if watch:
            # The answer took a while to arrive, and clocks differ a little.
            watch.parts += [
                (kind, *(max(start, now - ago) for ago in span)) for kind, *span in parts
            ]

    if watch:
        watch.pause(elapsed)
    try:
        yield done
    finally:
        if watch:
            watch.resume(max(0.0, time.perf_counter() - start - counted))


def _compiled(event: str, seconds: float, **_: object) -> None:
    """Called by JAX with the seconds that it has just traced, lowered or compiled in this thread."""
    watch = _current()
    if watch is None or not event.startswith(COMPILING):
        return
    watch.resume(seconds)
    if event == LOWERED:
        watch.pause()


jax.monitoring.register_event_duration_secs_listener(_compiled)


@dataclasses.dataclass
class _Work:
    stopwatch: Stopwatch
    seconds: float  # its limit
    late: Callable[[float], None]
    # Seconds in which this process ran, so that a process that was suspended is not late.
    seen: float = 0.0


class Watch:
    """Calls handlers of late work, in one thread that the first work with a deadline starts."""

    def __init__(self, deadline: Deadline):
        self._deadline = deadline
        self._works: dict[int, _Work] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def over(self, expected: float | None, late: Callable[[float], None]) -> Iterator[Stopwatch]:
        """Times a block, as `measured`; another thread calls `late(seconds)` if the block exceeds its limit.

        Compilation and pauses do not count.

        Args:
          expected: Expected seconds of the block. None means unknown.
          late: The handler.
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
            every, start = min(1.0, shortest / CHECKS), time.perf_counter()
            if shortest == math.inf:
                self._changed.wait()
            else:
                time.sleep(every)
            self._changed.clear()
            passed, late = min(time.perf_counter() - start, 2 * every), []
            with self._lock:
                for work in list(self._works.values()):
                    work.seen += passed
                    if min(work.seen, work.stopwatch.elapsed()) > work.seconds:
                        late.append(self._works.pop(id(work)))
            for work in late:
                work.late(work.seconds)


def end_process(name: str, what: str, seconds: float) -> None:
    """Ends this process when its main work hangs, so that nothing can be saved; its last checkpoint remains."""
    why = (
        f"{name} hangs: {what} has taken more than {seconds:g} seconds (config.runtime.deadline). The process ends "
        f"with code {STOPPED}; the same command continues from the last checkpoint."
    )
    exit_now(log_fatal(why, STOPPED))
