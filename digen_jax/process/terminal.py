"""Terminal output: complete lines, a progress bar, and a tail of standard error for `status.py`."""

import contextlib
import errno
import io
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsFloat, TextIO, TypeVar

from tqdm import tqdm

# Indentation of a continued line: the second column of a line with two, else two more than the line's own.
HANGING = re.compile(r"\s*\S.*?\s{2,}(?=\S)")
CLEAR = "\r\x1b[K"  # empties the line
# Control characters, also those that change the direction of text.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Error numbers of a pipe without a reader and of a closed terminal.
UNREAD = (errno.EPIPE, errno.EIO)


@contextlib.contextmanager
def complete_lines(beside: bool = False) -> Iterator[None]:
    """In this block each thread prints complete lines, which fit the terminal and stay above its progress bar.

    Args:
      beside: Whether another process draws the progress bar.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams = [LineStream(one, beside) for one in before]
    try:
        yield
    finally:
        for one in streams:
            one.end()
        sys.stdout, sys.stderr = before


class Output(io.FileIO):
    """A descriptor to which writing never fails: text is dropped after its reader has closed it.

    Args:
      descriptor: 1 or 2. It is not closed with this object.
    """

    unread = False  # whether text was dropped

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: bytes) -> int:
        """Writes to the descriptor; from the first failure on it is /dev/null, for children and C code, too."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in UNREAD:
                raise
            self.unread = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def keep_writable() -> None:
    """Lets this process print after the reader of standard output or error has closed it.

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


def has_reader() -> bool:
    """Returns whether standard output may have a reader; see `keep_writable`."""
    return not sys.stdout.buffer.raw.unread


def print_error(text: str) -> None:
    """Prints a text to standard error; on a terminal its lines are wrapped."""
    stream = sys.stderr if isinstance(sys.stderr, LineStream) else LineStream(sys.stderr)
    stream.write(f"{text}\n")


def printable(text: str) -> str:
    """Escapes control characters of a text from a file, which could change what a terminal shows or does."""
    return CONTROL.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def wrapped(text: str, columns: int) -> str:
    """Wraps a line between words; a word longer than the line is not broken."""
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


class LineStream:
    """Writes each thread's text to a stream line by line; the text of a progress bar passes through.

    Python's print writes a line and its end separately, so that another thread's line could be written in between.

    Args:
      stream: A terminal's stream, or any.
      beside: See `complete_lines`.
    """

    def __init__(self, stream: TextIO, beside: bool = False):
        self._stream, self._beside = stream, beside
        self._begun: dict[int, str] = {}  # by thread: a line that has not ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Buffers text until its line ends; returns the number of characters, as a stream does."""
        if "\r" in text:
            self._stream.write(text)
            return len(text)
        thread = threading.get_ident()
        *complete, self._begun[thread] = (self._begun.get(thread, "") + text).split("\n")
        if complete:
            self._show(complete)
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
            lines = [wrapped(line, columns) for line in lines]
            clear = CLEAR * self._beside
        with tqdm.external_write_mode(file=self):
            self._stream.write(clear + "".join(f"{line}\n" for line in lines))
            self._stream.flush()


Item = TypeVar("Item")

EVERY = 20.0  # seconds between two lines without a terminal
BAR = 4  # characters of a bar at least
STEP_LINE = re.compile(r"step \d+ of \d+: ")  # how the plain lines of `Progress` begin


def track(
    items: Iterable[Item],
    head: str,
    unit: str,
    total: int | None = None,
    done: int = 0,
    note: Callable[[], str] = str,
) -> Iterator[Item]:
    """Yields the items, and shows on stderr how many of them are done.

    Without a terminal nothing is printed about work of less than `EVERY` seconds.

    Args:
      items: Items to iterate over.
      head: Name of the work, such as "evaluating".
      unit: Name of an item, such as "batch".
      total: Number of items in all. None means `len(items)`.
      done: Number of items that were done before.
      note: Returns a text for the end of the line.
    """
    total = len(items) if total is None else total
    if sys.stderr.isatty():
        bar = tqdm(items, head, total, unit=unit, initial=done, leave=False)
        for item in bar:
            yield item
            bar.set_postfix_str(note(), refresh=False)
        return
    start = reported = time.monotonic()
    for number, item in enumerate(items, start=done + 1):
        yield item
        now = time.monotonic()
        if now - reported >= EVERY:
            left = (now - start) / (number - done) * (total - number)
            text = f"{head}: {unit} {number} of {total}, {tqdm.format_interval(left)} left"
            text += f", {note()}" if note() else ""
            print(text, file=sys.stderr, flush=True)
            reported = now


class Progress:
    """A progress bar with reward, images/s and time left; plain lines without a terminal.

    Args:
      total: Steps of the run.
      done: Steps done before this process started.
      every: Steps between two plain lines, where stderr is not a terminal.
    """

    def __init__(self, total: int, done: int = 0, every: int = 10):
        self._total, self._every = total, every
        self._first: tuple[int, float] | None = None
        self._bar = tqdm(
            total=total,
            initial=done,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            ncols=_columns(),
            bar_format="{percentage:3.0f}% |{bar}| step {n_fmt} of {total_fmt}{postfix}",
        )

    def update(
        self,
        step: int,
        reward: SupportsFloat,
        images_per_second: SupportsFloat,
        utilisation: SupportsFloat | None,
    ) -> None:
        """Shows that `step` steps are done, with reward, speed and utilisation of the last one.

        `utilisation` is the share of the devices' time that they worked, from 0 to 1. None leaves it out.
        """
        now = time.monotonic()
        # The first step is mostly compilation and says nothing about the others.
        self._first = self._first or (step, now)
        numbers = [
            f"reward {float(reward):.3f}",
            f"{float(images_per_second):.1f} images/s",
        ]
        if utilisation is not None:
            numbers.append(f"devices {float(utilisation):.0%} busy")
        if step > self._first[0]:
            seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
            numbers.append(f"{tqdm.format_interval(seconds)} left")
        if not self._bar.disable:
            self._bar.ncols = _columns()  # the terminal may have another width now
            self._bar.set_postfix_str(self._fitting(step, numbers), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._every == 0 or step in (self._first[0], self._total):
            print(
                f"step {step} of {self._total}: {', '.join(numbers)}", file=sys.stderr, flush=True
            )

    def _fitting(self, step: int, numbers: list[str]) -> str:
        """Returns the numbers that fit next to the bar; speed and utilisation are left out first."""
        space = self._bar.ncols - len(f"100% |{'':{BAR}}| step {step} of {self._total}")
        kept = list(numbers)
        while len(", ".join(["", *kept])) > space and len(kept) > 1:
            del kept[-2 if len(kept) > 2 else -1]
        return ", ".join(kept)

    def note(self, text: str) -> None:
        """Writes a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        self._bar.close()


def _columns() -> int:
    return shutil.get_terminal_size().columns


KEPT = 20
WIDEST = 500  # characters of a line

_lines: deque[tuple[float, str]] = deque(maxlen=KEPT)


@contextlib.contextmanager
def keep_log_tail() -> Iterator[None]:
    """In this block the last lines that Python code writes to standard error, except progress, are in `log_tail`."""
    before = sys.stderr
    sys.stderr = LogTail(before)
    _lines.clear()
    try:
        yield
    finally:
        sys.stderr = before


def log_tail() -> list[tuple[float, str]]:
    """Returns (time, line) of the last lines; times are those of `time.time`."""
    return list(_lines)


class LogTail:
    """Writes to a stream, and keeps its last complete lines."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._begun = ""
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes to the stream, and keeps the lines that are complete."""
        with self._lock:
            *complete, begun = (self._begun + text).split("\n")
            self._begun = _last_state(begun)[:WIDEST]
            found = [_last_state(line)[:WIDEST].rstrip() for line in complete]
            _lines.extend((time.time(), x) for x in found if x.strip() and not STEP_LINE.match(x))
        return self._stream.write(text)


def _last_state(line: str) -> str:
    """Returns what a progress bar's line shows at last."""
    return line.rpartition("\r")[2].removeprefix("\x1b[K")
