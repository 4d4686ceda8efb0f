"""Measures seconds of work, without compilation, which only a first call needs, and without pauses."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

import jax

COMPILING = "/jax/core/compile"
LOWERED = f"{COMPILING}/jaxpr_to_mlir_module_duration"  # the compiler runs next

_thread = threading.local()


class Stopwatch:
    """The seconds of a block: `so_far` inside it, for any thread, and `seconds` after it.

    `parts` are (kind, begin, end) of what `part` has noted in it, by `time.perf_counter`.
    """

    def __init__(self):
        self.seconds = 0.0
        self.parts: list[tuple[str, float, float]] = []
        self.began = time.perf_counter()
        self._apart: list[tuple[float, float]] = []  # spans that do not count
        self._since: float | None = None  # begin of such a span that has not ended

    def so_far(self) -> float:
        """Seconds of work up to now."""
        since, now = self._since, time.perf_counter()
        spans = [*self._apart, *([(since, now)] if since is not None else [])]
        return max(0.0, now - self.began - _length(spans, self.began))

    def parts_ago(self) -> tuple[tuple[str, float, float], ...]:
        """The parts, in seconds before now."""
        now = time.perf_counter()
        return tuple((kind, now - begin, now - end) for kind, begin, end in self.parts)

    def pause(self) -> None:
        """Stops the measurement."""
        self._since = time.perf_counter()

    def go_on(self, apart: float = 0.0) -> None:
        """Continues the measurement, without the last `apart` seconds."""
        now = time.perf_counter()
        self._since = None
        self._apart.append((now - apart, now))


@contextlib.contextmanager
def measured() -> Iterator[Stopwatch]:
    """Measures a block in this thread, without its pauses and the tracing and compilation in it."""
    outer, watch = getattr(_thread, "watch", None), Stopwatch()
    _thread.watch = watch
    try:
        yield watch
    finally:
        _thread.watch = outer
        watch.go_on()
        watch.seconds = watch.so_far()


@contextlib.contextmanager
def part(kind: str) -> Iterator[None]:
    """Notes a block in this thread as a part of the work that is measured, which the timeline shows apart."""
    begin = time.perf_counter()
    yield
    watch = getattr(_thread, "watch", None)
    if watch is not None:
        watch.parts.append((kind, begin, time.perf_counter()))


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A block in which this thread only waits for other threads, and which does not count as work."""
    watch = getattr(_thread, "watch", None)
    if watch is None:
        yield
        return
    begin = time.perf_counter()
    watch.pause()
    try:
        yield
    finally:
        watch.go_on(time.perf_counter() - begin)


def done_elsewhere(
    began: float, seconds: float, parts: Iterable[tuple[str, float, float]] = ()
) -> None:
    """Of the time since `began`, by `time.perf_counter`, only the seconds of another process's work count as work.

    Its `parts` are in seconds before now.
    """
    watch = getattr(_thread, "watch", None)
    if watch is None:
        return
    now = time.perf_counter()
    watch.go_on(max(0.0, now - began - seconds))
    # The answer was on its way for a while, and clocks differ a little.
    watch.parts += [
        (kind, max(began, now - begin), max(began, now - end)) for kind, begin, end in parts
    ]


def _length(spans: list[tuple[float, float]], begin: float) -> float:
    """The length of the union of spans after `begin`; tracing and compiling are nested."""
    total, reached = 0.0, begin
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _compiled(event: str, seconds: float, **_: object) -> None:
    """JAX reports the seconds that it has just traced, lowered or compiled in this thread."""
    watch = getattr(_thread, "watch", None)
    if watch is None or not event.startswith(COMPILING):
        return
    watch.go_on(seconds)
    if event == LOWERED:
        watch.pause()


jax.monitoring.register_event_duration_secs_listener(_compiled)
