"""Measures seconds of work, without compilation, which only a first call needs, and without pauses."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax

COMPILING = "/jax/core/compile"
LOWERED = f"{COMPILING}/jaxpr_to_mlir_module_duration"  # the compiler runs next

Parts = Sequence[tuple[str, float, float]]  # (kind, begin, end)

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
        self._elsewhere: Callable[[], float] | None = (
            None  # seconds of work in it, in another process
        )

    def so_far(self) -> float:
        """Seconds of work up to now."""
        since, elsewhere, now = self._since, self._elsewhere, time.perf_counter()
        spans = [*self._apart, *([(since, now)] if since is not None else [])]
        here = max(0.0, now - self.began - _length(spans, self.began))
        return here if elsewhere is None else here + elsewhere()

    def parts_ago(self) -> tuple[tuple[str, float, float], ...]:
        """The parts, in seconds before now."""
        now = time.perf_counter()
        return tuple((kind, now - begin, now - end) for kind, begin, end in self.parts)

    def pause(self, elsewhere: Callable[[], float] | None = None) -> None:
        """Stops the measurement, in favour of one of another process where there is one."""
        self._since, self._elsewhere = time.perf_counter(), elsewhere

    def go_on(self, apart: float = 0.0) -> None:
        """Continues the measurement, without the last `apart` seconds."""
        now = time.perf_counter()
        self._since = self._elsewhere = None
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


@contextlib.contextmanager
def elsewhere(so_far: Callable[[], float]) -> Iterator[Callable[[float, Parts], None]]:
    """A block in which this thread waits for another process, whose seconds of work count in place of its own.

    Args:
      so_far: these seconds up to now, for any thread.

    Yields:
      a function to call with the seconds of the whole work, and with its parts in seconds before then.
    """
    watch, begin, counted = getattr(_thread, "watch", None), time.perf_counter(), [0.0]

    def done(seconds: float, parts: Parts = ()) -> None:
        counted.append(seconds)
        if watch is not None:
            now = time.perf_counter()
            # The answer was on its way for a while, and clocks differ a little.
            watch.parts += [
                (kind, *(max(begin, now - ago) for ago in span)) for kind, *span in parts
            ]

    if watch is None:
        yield done
        return
    watch.pause(so_far)
    try:
        yield done
    finally:
        watch.go_on(max(0.0, time.perf_counter() - begin - counted[-1]))


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
