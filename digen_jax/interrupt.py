"""Ctrl-C and SIGTERM as a wish to stop, which a run may grant where it is whole."""

import signal
import sys
from typing import Any


class Interrupt:
    """Remembers a first Ctrl-C or SIGTERM, so that a step is finished and saved; a second one ends at once.

    `asked` is the signal's number, 0 while there was none.
    """

    def __init__(self):
        self.asked = 0

    def __enter__(self) -> "Interrupt":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number
        print("\nfinishing this step, then saving; once more ends at once", file=sys.stderr)
