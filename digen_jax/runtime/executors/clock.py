"""Seconds of work without those of compilation, which a first call spends and no later one."""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax

_thread = threading.local()


class Stopwatch:
    """The seconds of a block, once it is left."""

    def __init__(self):
        self.seconds = 0.0
        self.compiling: list[tuple[float, float]] = []


@contextlib.contextmanager
def measured() -> Iterator[Stopwatch]:
    """Takes the time of a block in this thread, apart from tracing and compiling in it."""
    watch = _thread.watch = Stopwatch()
    begin = time.perf_counter()
    try:
        yield watch
    finally:
        _thread.watch = None
        end = time.perf_counter()
        watch.seconds = max(0.0, end - begin - _length(watch.compiling, begin))


def _length(spans: list[tuple[float, float]], begin: float) -> float:
    """The length of the union of spans after `begin`; tracing and compiling are nested."""
    total, reached = 0.0, begin
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _compiled(event: str, seconds: float, **_: object) -> None:
    """JAX tells how long it has just traced or compiled in this thread."""
    watch = getattr(_thread, "watch", None)
    if watch is not None and event.startswith("/jax/core/compile"):
        now = time.perf_counter()
        watch.compiling.append((now - seconds, now))


jax.monitoring.register_event_duration_secs_listener(_compiled)
