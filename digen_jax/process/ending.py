"""The end of a process that something in it may not let end: a thread that hangs, a child that hears nothing.

Python waits for neither at its exit where this module's `leave` takes its place.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

STOPPED = (
    75  # exit code of a run that cannot go on: EX_TEMPFAIL, as the same command may be tried again
)
PATIENCE = 1.0  # seconds for what is done last

_hung: list[str] = []
_last: list[Callable[[], None]] = []


class Stopped(RuntimeError):
    """A run cannot go on, for no mistake in what was asked for; its text is one sentence that says why."""


def hangs(what: str) -> None:
    """Notes down a thread that will not come back, so that this process's end does not wait for it."""
    _hung.append(what)


def at_leaving(call: Callable[[], None]) -> None:
    """Has something short done before `leave` ends the process, such as ending its children."""
    _last.append(call)


def leave(code: int) -> None:
    """Ends this process at once, whatever its threads do; what was printed is written out."""
    # In a thread of its own: whoever hangs may hold what this needs.
    last = threading.Thread(target=_do_last, daemon=True)
    last.start()
    last.join(PATIENCE)
    os._exit(code)


def _do_last() -> None:
    for call in (*_last, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            call()


@contextlib.contextmanager
def without_the_hung() -> Iterator[None]:
    """Where a thread hangs, the process ends with this block, as Python and the devices' drivers would wait for it."""
    try:
        yield
    except SystemExit as end:
        if not _hung:
            raise
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        if not _hung:
            raise
        traceback.print_exc()
        leave(1)
