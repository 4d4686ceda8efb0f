"""What is printed: whole lines, which a terminal shows broken between words, above a progress bar."""

import contextlib
import errno
import io
import os
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
# Control characters, also those that change the direction of text.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Error numbers of a pipe without a reader and of a terminal that is gone.
UNREAD = (errno.EPIPE, errno.EIO)


@contextlib.contextmanager
def fitted(beside: bool = False) -> Iterator[None]:
    """In this block printed lines stay whole, whichever thread prints, and fit a terminal, above its bar.

    Args:
      beside: another process has the terminal's progress bar, which it draws again by itself.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams = [Lines(one, beside) for one in before]
    try:
        yield
    finally:
        for one in streams:
            one.end()
        sys.stdout, sys.stderr = before


class Output(io.FileIO):
    """A descriptor to which writing continues after its reader has closed it; that text is dropped.

    Args:
      descriptor: 1 or 2. It is not closed with this object.
    """

    unread = False  # whether text was dropped

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: bytes) -> int:
        """Writes to the descriptor, or to nowhere from the first failure on, as children and C code then do."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in UNREAD:
                raise
            self.unread = True
            _to_nowhere(self.fileno())
            return len(data)


def keep_writable() -> None:
    """Lets this process print after the reader of standard output or error has gone.

    Characters that a console cannot show are printed as escapes.
    """
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        before = getattr(sys, name)
        if before is not None:
            before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(Output(descriptor)),
            encoding=before and before.encoding,
            errors="backslashreplace",
            line_buffering=before is None or before.line_buffering,
        )
        setattr(sys, name, stream)


def is_read() -> bool:
    """Whether what this process prints to standard output may have a reader; see `keep_writable`."""
    return not sys.stdout.buffer.raw.unread


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def complain(text: str) -> None:
    """Prints a text to standard error, whose lines are broken between words on a terminal."""
    stream = sys.stderr if isinstance(sys.stderr, Lines) else Lines(sys.stderr)
    stream.write(f"{text}\n")


def printable(text: str) -> str:
    """Escapes control characters of a text from a file, which could change what a terminal shows or does."""
    return CONTROL.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


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
    """A stream to which whole lines are written, each thread's own; what a bar writes passes through.

    Python's print writes a line and its end one after the other, so that another thread's line may come between.

    Args:
      stream: a terminal's, or any.
      beside: see `fitted`.
    """

    def __init__(self, stream: TextIO, beside: bool = False):
        self._stream, self._beside = stream, beside
        self._begun: dict[int, str] = {}  # by thread: a line that has not ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Keeps text to the end of its line; returns the number of characters, as a stream does."""
        if "\r" in text:
            self._stream.write(text)
            return len(text)
        thread = threading.get_ident()
        *whole, self._begun[thread] = (self._begun.get(thread, "") + text).split("\n")
        if whole:
            self._show(whole)
        return len(text)

    def end(self) -> None:
        """Writes the lines that have not ended."""
        begun, self._begun = self._begun, {}
        self._stream.write("".join(begun.values()))
        self._stream.flush()

    def _show(self, lines: list[str]) -> None:
        clear = ""
        if self._stream.isatty():
            columns = shutil.get_terminal_size().columns
            lines = [broken(line, columns) for line in lines]
            clear = CLEAR * self._beside
        with tqdm.external_write_mode(file=self):
            self._stream.write(clear + "".join(f"{line}\n" for line in lines))
            self._stream.flush()
