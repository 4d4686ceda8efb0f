"""Ctrl-C and SIGTERM: as a request to stop, which a run follows at the end of a step, and before that as the end."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from digen_jax.process.shutdown import last_word, leave

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 5.0  # seconds in which KeyboardInterrupt must end a process

_forking = threading.local()  # the signal mask of a thread that forks


def _before_fork() -> None:
    """Blocks `SIGNALS`: one that is sent to the child at once waits for the child's own handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    """Restores the default handlers of `SIGNALS` in a forked child if this package has replaced them.

    A child that a reward starts by `multiprocessing` must end by `terminate()`. What it would write to the wakeup
    descriptor would be read as signals of the parent.
    """
    for number in SIGNALS:
        module = getattr(signal.getsignal(number), "__module__", None) or ""
        if module.startswith("digen_jax."):
            signal.set_wakeup_fd(-1)
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


def _finishing(number: int) -> None:
    print("\nfinishing this step, then saving; once more ends at once", file=sys.stderr)


class Interrupt:
    """Remembers a first Ctrl-C or SIGTERM, so that a step is finished and saved; a second one ends at once.

    `asked` is the signal's number, 0 before the first. It is for the main thread, which may hang in a call
    that no signal interrupts: therefore another thread waits for the second signal. `told` is called with the first
    one, in the main thread.
    """

    def __init__(self, told: Callable[[int], None] = _finishing):
        self.asked, self._told = 0, told

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        came, writes = os.pipe()
        os.set_blocking(writes, False)
        self._pipe = writes
        self._wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=_count, args=(came,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe)

    def _note(self, number: int, frame: Any) -> None:
        first, self.asked = not self.asked, number
        if first:
            self._told(number)


def _count(came: int) -> None:
    """Reads the numbers of the signals as they come, and ends the process at the second request to stop."""
    asked = 0
    while number := os.read(came, 1):
        asked += number[0] in SIGNALS
        if asked == 2:
            os.write(2, b"\nended at once: the same command continues from the last checkpoint\n")
            leave(128 + number[0])
    os.close(came)


def _open_standard_descriptors() -> None:
    """Opens those of the descriptors 0 to 2 that are closed, for children too, so that no pipe gets their numbers."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)
    os.close(lowest)


def end_by_ctrl_c() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, and end this process after `PATIENCE` seconds if that has not.

    KeyboardInterrupt alone is lost inside a callback of the garbage collector or code that catches everything, and it
    waits for calls in which no Python runs. During an import, which it would break, the process ends at once. Does
    nothing where Ctrl-C is ignored. For the main thread, once; other handlers may follow, such as an `Interrupt`.
    """
    _open_standard_descriptors()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    # A config file that is read has its own name there for a while.
    said = f"{os.path.basename(sys.argv[0])}: stopped by Ctrl-C"
    came, writes = os.pipe()
    os.set_blocking(writes, False)

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                # Not by `last_word`, whose own modules may be the ones that are imported.
                os.write(2, f"{said}\n".encode())
                leave(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    def end_late() -> None:
        while number := os.read(came, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is interrupt:
                select.select([came], [], [], PATIENCE)  # until another signal
                leave(last_word(said, 128 + signal.SIGINT))

    signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=end_late, name="ctrl-c", daemon=True).start()
