"""Ends a process: by signals, by errors that users can act on, and also when a thread hangs.

Ctrl-C and SIGTERM are a request to stop, which a run follows at the end of a step. Before a run they end the process.
"""

import atexit
import contextlib
import contextvars
import ctypes
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from digen_jax.process.terminal import print_error

STOPPED = 75  # exit code of a run that cannot continue: EX_TEMPFAIL, as the same command may be tried again
PATIENCE = 1.0  # seconds for the last actions
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CTRL_C_PATIENCE = 5.0  # seconds in which KeyboardInterrupt must end a process

_hung: list[str] = []
_last: list[Callable[[], None]] = []
_exit = os._exit  # `guard_exit` replaces it
_raises = contextvars.ContextVar("raises", default=False)  # see `exits_raise`
_fatal_lock = threading.Lock()
_fatal: list[
    tuple[int, threading.Thread]
] = []  # (exit code, thread that prints the reason), at most one


class Stopped(RuntimeError):
    """A run cannot continue, for a reason that is not the user's error. The message is one sentence."""


# ------------------------------------------------------------------------------ ending at once


def mark_hung(what: str) -> None:
    """Registers a thread that hangs, for which the end of the process must not wait."""
    _hung.append(what)


def before_exit(call: Callable[[], None]) -> None:
    """Registers a short action of `exit_now`, such as ending child processes."""
    _last.append(call)


def log_fatal(text: str, code: int) -> int:
    """Prints why this process ends to standard error, unless another thread has. Any thread may call.

    Returns:
      The exit code that belongs to the printed reason.
    """
    with _fatal_lock:
        if not _fatal:
            # In a separate thread, because a thread that hangs may hold a lock that printing needs.
            _fatal.append((code, threading.Thread(target=print_error, args=(text,), daemon=True)))
            _fatal[0][1].start()
    code, printing = _fatal[0]
    printing.join(PATIENCE)
    return code


def exit_now(code: int) -> None:
    """Ends this process at once, whatever its threads do; printed text is flushed."""

    def act() -> None:
        for call in (*_last, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):
                call()

    # In a separate thread, because a thread that hangs may hold a lock that the actions need.
    last = threading.Thread(target=act, daemon=True)
    last.start()
    last.join(PATIENCE)
    _exit(code)


def guard_exit() -> None:
    """Replaces `os._exit`, with which a user's code would end this process silently, even as if it had finished.

    It raises SystemExit inside `exits_raise`. Anywhere else, such as in a thread that a reward has started, it reports
    the line that called it and ends the process with code 75. Forked children exit as before, and so does C code.
    """
    process = os.getpid()

    def exit_(status: int) -> None:
        if os.getpid() != process:
            _exit(status)
        if _raises.get():
            raise SystemExit(status)
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
        text = f"os._exit({status}) was called in {where}: raise an exception there"
        exit_now(log_fatal(text, STOPPED))

    os._exit = exit_


@contextlib.contextmanager
def exits_raise() -> Iterator[None]:
    """In this block, and in this thread, a guarded `os._exit` raises SystemExit."""
    token = _raises.set(True)
    try:
        yield
    finally:
        _raises.reset(token)


def abort_later() -> None:
    """Delays an abort of this process (SIGABRT) by some seconds, in which another thread may call `exit_now`.

    JAX aborts a process as soon as its job's first one disconnects, before the thread that detects this can report it.
    The handler is C's `sleep`, which takes the signal's number for seconds: 6. No Python runs in it, so that nothing
    keeps the process from its end, and then it ends as without this.
    """
    library = ctypes.CDLL(None)
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


@contextlib.contextmanager
def ends_process() -> Iterator[None]:
    """Ends the process after this block, with the exit code that Python would give it.

    The interpreter is not finalized: threads of native libraries may abort the process when they need Python meanwhile
    ("FATAL: exception not rethrown", seen at the end of complete runs). Exit handlers are called, and threads awaited,
    unless one of them hangs.
    """
    code = 0
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        if not _hung:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
    finally:
        exit_now(code)


# ------------------------------------------------------------------------------------- signals

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


class Interrupt:
    """Notes a first Ctrl-C or SIGTERM, so that a step is finished and saved; a second one ends the process at once.

    For the main thread, which may hang in a call that no signal interrupts: another thread waits for the second signal.

    Attributes:
      requested: Number of the first signal; 0 before it.
    """

    def __init__(self):
        self.requested = 0

    def __enter__(self) -> "Interrupt":
        self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        self._pipe = writes
        self._wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=self._count, args=(reads,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe)

    def _note(self, number: int, frame: Any) -> None:
        first, self.requested = not self.requested, number
        if first:
            message = "\nFinishing this step, then saving. Press Ctrl-C again to exit now."
            print(message, file=sys.stderr)

    @staticmethod
    def _count(reads: int) -> None:
        """Reads the numbers of the signals, and ends the process at the second request to stop."""
        requests = 0
        while number := os.read(reads, 1):
            requests += number[0] in SIGNALS
            if requests == 2:
                os.write(
                    2, b"\nExiting now; the same command continues from the last checkpoint.\n"
                )
                exit_now(128 + number[0])
        os.close(reads)


def end_by_ctrl_c() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, and end this process after `CTRL_C_PATIENCE` seconds if that has not.

    KeyboardInterrupt alone is lost inside a callback of the garbage collector or code that catches everything, and it
    waits for calls in which no Python runs. During an import, which it would break, the process ends at once. Does
    nothing where Ctrl-C is ignored. For the main thread, once; other handlers may follow, such as an `Interrupt`.
    """
    # Opens closed descriptors 0 to 2, for children too, so that no pipe gets their numbers.
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)
    os.close(lowest)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    # While a config file is read, its own name is there.
    text = f"{os.path.basename(sys.argv[0])}: stopped by Ctrl-C"
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                # Not by `log_fatal`, whose own modules may be the ones that are imported.
                os.write(2, f"{text}\n".encode())
                exit_now(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    def end_late() -> None:
        while number := os.read(reads, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is interrupt:
                select.select([reads], [], [], CTRL_C_PATIENCE)  # until another signal
                exit_now(log_fatal(text, 128 + signal.SIGINT))

    signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=end_late, name="ctrl-c", daemon=True).start()


# ------------------------------------------------------------------------ errors of the devices

# The status is also that of messages too large for a connection.
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED\b.*?(memory|allocat)", re.IGNORECASE | re.DOTALL)
MESSAGE_LIMIT = 300  # characters of XLA's first line


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Notes what this block does in an out-of-memory error, for `out_of_memory`."""
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error):
            error.add_note(what)
        raise


def out_of_memory(error: BaseException) -> str | None:
    """Returns an out-of-memory summary with the first line of XLA's error, or None if `error` has another reason."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if _is_out_of_memory(found):
            first = str(found).strip().partition("\n")[0]
            shown = first if len(first) <= MESSAGE_LIMIT else f"{first[:MESSAGE_LIMIT]}..."
            notes = getattr(found, "__notes__", [])
            where = f" during {notes[0]}" if notes else ""
            return f"a device ran out of memory{where} ({shown.rstrip('.')})"
        seen.add(id(found))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def no_devices(error: BaseException) -> str | None:
    """Returns which devices JAX did not find, with the first line of its error, or None for another reason."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    # JAX raises an AssertionError without a text where it finds no driver of NVIDIA's.
    if not isinstance(error, RuntimeError | AssertionError) or not last:
        return None
    if not last[0].filename.endswith("xla_bridge.py"):
        return None
    platforms = sys.modules["jax"].config.jax_platforms or ""
    first = str(error).strip().partition("\n")[0]
    return f"JAX finds no devices of JAX_PLATFORMS={platforms}" + (f" ({first})" if first else "")


def _is_out_of_memory(error: BaseException) -> bool:
    # A script that has not imported JAX cannot have its errors, and need not import it for this.
    jax = sys.modules.get("jax")
    return (
        jax is not None
        and isinstance(error, jax.errors.JaxRuntimeError)
        and OUT_OF_MEMORY.match(str(error)) is not None
    )
