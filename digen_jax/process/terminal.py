"""What is printed on a terminal: whole lines, broken between words where the terminal ends, above a progress bar."""

import contextlib
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from tqdm import tqdm

# What a broken line is continued under: the second column of a line of two, else the line's beginning.
HANGING = re.compile(r"\s*\S.*?\s{2,}(?=\S)")
CLEAR = "\r\x1b[K"  # to the begin of the line, which is emptied


@contextlib.contextmanager
def fitted(beside: bool = False) -> Iterator[None]:
    """In this block all that Python code prints on a terminal is broken between words and leaves a bar whole.

    Standard output and errors that are no terminal are left as they are.

    Args:
      beside: another process has the terminal's progress bar, which it draws again by itself.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (Lines(one, beside) if one.isatty() else one for one in before)
    try:
        yield
    finally:
        for one in (sys.stdout, sys.stderr):
            one.flush()
            if isinstance(one, Lines):
                one.end()
        sys.stdout, sys.stderr = before


def complain(text: str) -> None:
    """Prints a text to standard error, whose lines are broken between words on a terminal."""
    with fitted():
        print(text, file=sys.stderr)


def broken(text: str, columns: int) -> str:
    """A line in as many as it needs; a word stays whole, however long."""
    if len(text) <= columns:
        return text
    hanging = HANGING.match(text)
    under = len(hanging[0]) if hanging else len(text) - len(text.lstrip()) + 2
    return textwrap.fill(
        text,
        columns,
        subsequent_indent=" " * (under if under <= columns // 2 else 2),
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Lines:
    """A terminal's stream, to which whole lines are written; what a bar writes passes through.

    Args:
      stream: the terminal's.
      beside: see `fitted`.
    """

    def __init__(self, stream: TextIO, beside: bool = False):
        self._stream, self._beside = stream, beside
        self._begun = ""  # a line that has not ended
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Keeps text to the end of its line; returns the number of characters, as a stream does."""
        if "\r" in text:
            self._stream.write(text)
            return len(text)
        with self._lock:
            *whole, self._begun = (self._begun + text).split("\n")
        if whole:
            columns = shutil.get_terminal_size().columns
            self._show("".join(f"{broken(line, columns)}\n" for line in whole))
        return len(text)

    def end(self) -> None:
        """Writes a line that has not ended."""
        with self._lock:
            begun, self._begun = self._begun, ""
        if begun:
            self._stream.write(begun)
            self._stream.flush()

    def _show(self, lines: str) -> None:
        with tqdm.external_write_mode(file=self):
            self._stream.write(CLEAR + lines if self._beside else lines)
            self._stream.flush()
