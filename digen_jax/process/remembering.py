"""The last lines that a process has written to its standard error, for people who ask later how it is."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, TextIO

from digen_jax.process.progress import STEP_LINE

KEPT = 20
WIDEST = 500  # characters of a line

_lines: deque[tuple[float, str]] = deque(maxlen=KEPT)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """In this block what Python code writes to standard error is kept for `last_lines`, except progress."""
    before = sys.stderr
    sys.stderr = Remembering(before)
    _lines.clear()
    try:
        yield
    finally:
        sys.stderr = before


def last_lines() -> list[tuple[float, str]]:
    """(the system's time, the line) of the last ones."""
    return list(_lines)


class Remembering:
    """A stream that passes everything on and keeps the last whole lines."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._begun = ""
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes to the stream, and keeps the lines that end."""
        with self._lock:
            *whole, begun = (self._begun + text).split("\n")
            self._begun = _last_state(begun)[:WIDEST]
            found = [_last_state(line)[:WIDEST].rstrip() for line in whole]
            _lines.extend((time.time(), x) for x in found if x.strip() and not STEP_LINE.match(x))
        return self._stream.write(text)


def _last_state(line: str) -> str:
    """What a bar's line is after its last carriage return, without what empties a terminal's line."""
    return line.rpartition("\r")[2].removeprefix("\x1b[K")
