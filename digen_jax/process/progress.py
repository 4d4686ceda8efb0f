"""Progress: on a terminal a bar, elsewhere a line from time to time."""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import SupportsFloat, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

EVERY = 20.0  # seconds between two lines without a terminal
BAR = 4  # characters of a bar at least
STEP_LINE = re.compile(r"step \d+ of \d+: ")  # how the plain lines of `Progress` begin


def watched(
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
      items: to iterate over.
      head: the name of the work, such as "evaluating".
      unit: the name of an item, such as "batch".
      total: the number of items in all; None: `len(items)`.
      done: the number of items that were done before.
      note: gives words on what was done, for the end of the line.
    """
    total = len(items) if total is None else total
    if sys.stderr.isatty():
        bar = tqdm(items, head, total, unit=unit, initial=done, leave=False)
        for item in bar:
            yield item
            bar.set_postfix_str(note(), refresh=False)
        return
    begun = said = time.monotonic()
    for number, item in enumerate(items, start=done + 1):
        yield item
        now = time.monotonic()
        if now - said >= EVERY:
            left = (now - begun) / (number - done) * (total - number)
            text = f"{head}: {unit} {number} of {total}, {tqdm.format_interval(left)} left"
            text += f", {note()}" if note() else ""
            print(text, file=sys.stderr, flush=True)
            said = now


class Progress:
    """A progress bar with reward, images/s and time left; plain lines without a terminal.

    Args:
      total: steps of the whole run.
      done: steps done before this process began.
      every: steps between two plain lines, where stderr is not a terminal.
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
        """The numbers for which the terminal has room next to a bar; speed and utilisation are left out first."""
        room = self._bar.ncols - len(f"100% |{'':{BAR}}| step {step} of {self._total}")
        kept = list(numbers)
        while len(", ".join(["", *kept])) > room and len(kept) > 1:
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
