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
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, SupportsFloat, TextIO, TypeVar, cast

from tqdm import tqdm

# Matches up to the second column of a two-column line, where continuation lines are indented to.
HANGING = re.compile(r"\s*\S.*?\s{2,}(?=\S)")
CLEAR = "\r\x1b[K"  # clears the line
# Control characters, including bidirectional formatting.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# errno of a pipe without a reader and of a closed terminal.
UNREAD = (errno.EPIPE, errno.EIO)
STEP_LINE = re.compile(r"step \d+ of \d+: ")  # start of plain `Progress` lines
LONGEST_LINE = 500  # characters of a line in `log_tail`

_lines: deque[tuple[float, str]] = deque(maxlen=20)


@contextlib.contextmanager
def complete_lines(external_bar: bool = False) -> Iterator[None]:
    """Makes all threads print complete lines, wrapped to the terminal and above its progress bar.

    If `external_bar`, another process shows the progress bar. `log_tail` returns the last lines of stderr.
    """
    before = sys.stdout, sys.stderr
    _lines.clear()
    sys.stdout, sys.stderr = streams = [
        LineStream(sys.stdout, external_bar),
        LineStream(sys.stderr, external_bar, _lines),
    ]
    try:
        yield
    finally:
        for one in streams:
            one.end()
        sys.stdout, sys.stderr = before


class Output(io.FileIO):
    """Raw stream on descriptor 1 or 2 that drops text after its reader has closed it, instead of raising."""

    unread = False  # whether text was dropped

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Writes to the descriptor. Redirects it to /dev/null on the first failure, also for children and C code."""
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
    """Keeps stdout and stderr writable after their readers have closed them.

    Characters that the console's encoding lacks are escaped.
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
    """Returns False if the reader of stdout has closed it; see `keep_writable`."""
    return not cast(Any, sys.stdout.buffer).raw.unread


def log_tail() -> list[tuple[float, str]]:
    """Returns (`time.time()`, line) of the last lines that Python code wrote to stderr, except progress."""
    return list(_lines)


def print_error(text: str) -> None:
    """Prints to stderr, wrapped on a terminal."""
    stream = sys.stderr if isinstance(sys.stderr, LineStream) else LineStream(sys.stderr)
    stream.write(f"{text}\n")


def printable(text: str) -> str:
    """Escapes control characters in text from files, which could manipulate a terminal."""
    return CONTROL.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def wrapped(text: str, columns: int) -> str:
    """Wraps a line between words. Longer words are not broken."""
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
    """Line-buffers each thread's text to a stream. Text of a progress bar passes through.

    Python's print writes a line and its end separately, so that lines of several threads could be interleaved. See
    `complete_lines` for `external_bar`. Appends the lines, except progress, to `kept`, if any.
    """

    def __init__(
        self,
        stream: TextIO,
        external_bar: bool = False,
        kept: deque[tuple[float, str]] | None = None,
    ):
        self._stream, self._external_bar, self._kept = stream, external_bar, kept
        self._partial: dict[int, str] = {}  # incomplete line by thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Buffers text until its line is complete; returns the number of characters, like a stream."""
        if "\r" in text:
            self._stream.write(text)
            return len(text)
        thread = threading.get_ident()
        *complete, self._partial[thread] = (self._partial.get(thread, "") + text).split("\n")
        if complete:
            self._show(complete)
        return len(text)

    def end(self) -> None:
        """Flushes incomplete lines."""
        partial, self._partial = self._partial, {}
        self._stream.write("".join(partial.values()))
        self._stream.flush()

    def _show(self, lines: list[str]) -> None:
        if self._kept is not None:
            found = (line[:LONGEST_LINE] for line in lines)
            now = time.time()
            self._kept.extend((now, x) for x in found if x.strip() and not STEP_LINE.match(x))
        clear = ""
        if self._stream.isatty():
            columns = shutil.get_terminal_size().columns
            lines = [wrapped(line, columns) for line in lines]
            clear = CLEAR * self._external_bar
        with tqdm.external_write_mode(file=self):
            self._stream.write(clear + "".join(f"{line}\n" for line in lines))
            self._stream.flush()


Item = TypeVar("Item")

EVERY = 20.0  # seconds between progress lines without a terminal
BAR = 4  # minimum width of the bar


def track(
    items: Iterable[Item],
    head: str,
    unit: str,
    total: int | None = None,
    done: int = 0,
    note: Callable[[], str] = str,
) -> Iterator[Item]:
    """Yields the items with progress on stderr: a bar, or without a terminal a line every `EVERY` seconds.

    `head` is the name of the work, such as "evaluating", and `unit` that of an item, such as "batch". Of `total` items,
    by default `len(items)`, `done` were already done. `note` returns a text for the end of the line.
    """
    total = len(cast(Sized, items)) if total is None else total
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
    """Progress bar with reward, speed and remaining time; plain lines every few steps without a terminal.

    `total` and `done` are the steps of the run, and those before this process started.
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
        self, step: int, value: SupportsFloat, speed: Sequence[str], name: str = "reward"
    ) -> None:
        """Shows progress after `step` steps, with the value of a metric `name` and the speed of the last one.

        `speed` has texts, the most important first; the last ones are omitted next to a bar if space is short.
        """
        now = time.monotonic()
        # The first step is mostly compilation, so the estimate ignores it.
        self._first = self._first or (step, now)
        numbers = [f"{name} {float(value):.3f}", *speed]
        if step > self._first[0]:
            seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
            numbers.append(f"{tqdm.format_interval(seconds)} left")
        if not self._bar.disable:
            self._bar.ncols = _columns()  # the terminal may have been resized
            self._bar.set_postfix_str(self._fitting(step, numbers), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._every == 0 or step in (self._first[0], self._total):
            text = f"step {step} of {self._total}: {', '.join(numbers)}"
            print(text, file=sys.stderr, flush=True)

    def _fitting(self, step: int, numbers: list[str]) -> str:
        """Returns the numbers that fit next to the bar; omits speed first."""
        space = self._bar.ncols - len(f"100% |{'':{BAR}}| step {step} of {self._total}")
        kept = list(numbers)
        while len(", ".join(["", *kept])) > space and len(kept) > 1:
            del kept[-2 if len(kept) > 2 else -1]
        return ", ".join(kept)

    def note(self, text: str) -> None:
        """Writes a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Closes the bar and leaves it on screen."""
        self._bar.close()


def _columns() -> int:
    return shutil.get_terminal_size().columns
