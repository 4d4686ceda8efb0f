"""Process shutdown: signals, fatal errors, and exits despite hung threads.

During a run, Ctrl-C and SIGTERM request a stop at the end of the step. Before a run, they end the process.
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
from typing import Any, NoReturn

from digen_jax.process.terminal import print_error

STOPPED = 75  # exit code of a run that cannot continue but can be retried: EX_TEMPFAIL
PATIENCE = 1.0  # seconds for exit actions
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CTRL_C_PATIENCE = 5.0  # seconds for KeyboardInterrupt to end a process

_hung: list[str] = []
_interrupted: list[bool] = []  # not empty once `end_by_ctrl_c` has raised KeyboardInterrupt
_last: list[Callable[[], None]] = []
_exit = os._exit  # `guard_exit` replaces it
_raises = contextvars.ContextVar("raises", default=False)  # see `exits_raise`
_fatal_lock = threading.Lock()
# At most one (exit code, thread that prints the reason).
_fatal: list[tuple[int, threading.Thread]] = []


class Stopped(RuntimeError):
    """Raised if a run cannot continue for a reason other than invalid input. The message is one line."""


def mark_hung(what: str) -> None:
    """Registers a hung thread, so that the process exits without waiting for threads."""
    _hung.append(what)


def before_exit(call: Callable[[], None]) -> None:
    """Registers a short action for `exit_now`, such as ending child processes."""
    _last.append(call)


def log_fatal(text: str, code: int) -> int:
    """Prints a fatal error to stderr, unless another thread already has. Thread-safe.

    Returns:
      The exit code of the printed error.
    """
    with _fatal_lock:
        if not _fatal:
            # In a separate thread, because a hung thread may hold a lock that printing needs.
            _fatal.append((code, threading.Thread(target=print_error, args=(text,), daemon=True)))
            _fatal[0][1].start()
    code, printing = _fatal[0]
    printing.join(PATIENCE)
    return code


def exit_now(code: int) -> NoReturn:
    """Exits immediately, regardless of other threads, after flushing output."""

    def act() -> None:
        for call in (*_last, sys.stdout.flush, sys.stderr.flush):
            with contextlib.suppress(Exception):
                call()

    # In a separate thread, because a hung thread may hold a lock that the actions need.
    last = threading.Thread(target=act, daemon=True)
    last.start()
    last.join(PATIENCE)
    _exit(code)


def guard_exit() -> None:
    """Replaces `os._exit`, so that user code cannot end this process silently, or with exit code 0.

    The replacement raises SystemExit inside `exits_raise`. Elsewhere, such as in a thread of a reward, it reports the
    caller's line and exits with code 75. Forked children and C code are not affected.
    """
    process = os.getpid()

    def exit_(status: int) -> NoReturn:
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
    """Makes a guarded `os._exit` raise SystemExit in this block and thread."""
    token = _raises.set(True)
    try:
        yield
    finally:
        _raises.reset(token)


def abort_later() -> None:
    """Delays an abort of this process (SIGABRT) by 6 seconds, in which another thread may call `exit_now`.

    JAX aborts a process as soon as its coordinator disconnects, before the thread that detects this can report it.
    The handler is C's `sleep`, which interprets the signal number 6 as seconds. It runs no Python, so nothing can block
    the abort that follows.
    """
    library = ctypes.CDLL(None)
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


@contextlib.contextmanager
def ends_process() -> Iterator[None]:
    """Exits after this block with Python's exit code, but without finalizing the interpreter.

    During finalization, threads of native libraries that need Python may abort the process ("FATAL: exception not
    rethrown", seen at the end of complete runs). Runs exit handlers and joins threads unless one is marked as hung.
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
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
    finally:
        exit_now(code)


_forking = threading.local()  # signal mask of a forking thread


def _before_fork() -> None:
    """Blocks `SIGNALS`, so that early signals to the child stay pending until it has set its handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """Restores the default handlers of `SIGNALS` in a forked child if this package replaced them.

    Otherwise `terminate()` would not end a reward's `multiprocessing` children, and their signals would reach the
    parent through the wakeup descriptor.
    """
    for number in SIGNALS:
        module = getattr(signal.getsignal(number), "__module__", None) or ""
        if module.startswith("digen_jax."):
            signal.set_wakeup_fd(-1)
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


class Interrupt:
    """Records a first Ctrl-C or SIGTERM, so that the step is finished and saved. A second one exits immediately.

    Must be entered in the main thread. Another thread handles the second signal, because the main thread may be blocked
    in a call that signals do not interrupt.

    Attributes:
      requested: Number of the first signal, or 0.
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
            text = "\nFinishing this step, then saving. Press Ctrl-C again to exit now."
            print(text, file=sys.stderr)

    @staticmethod
    def _count(reads: int) -> None:
        """Counts signals from the wakeup pipe, and exits at the second stop request."""
        requests = 0
        while number := os.read(reads, 1):
            requests += number[0] in SIGNALS
            if requests == 2:
                again = b"the same command continues from the last checkpoint"
                os.write(2, b"\nExiting now; %s.\n" % again)
                exit_now(128 + number[0])
        os.close(reads)


def interrupted() -> bool:
    """Returns whether Ctrl-C has raised KeyboardInterrupt, which other code may have lost."""
    return bool(_interrupted)


def end_by_ctrl_c() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, and exit after `CTRL_C_PATIENCE` seconds if the process still runs.

    KeyboardInterrupt alone is lost in code that catches everything, and is delayed by native calls. During an import
    and in callbacks of the garbage collector, which cannot raise it, Ctrl-C exits immediately. No-op if Ctrl-C is
    ignored. Call it once, in the main thread; later handlers, such as `Interrupt`, take precedence.
    """
    # Opens closed descriptors 0 to 2, also for children, so that no pipe gets these numbers.
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)
    os.close(lowest)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return
    # Computed now: sys.argv[0] is changed while a config file is loaded.
    text = f"{os.path.basename(sys.argv[0])}: stopped by Ctrl-C"
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                # Not `log_fatal`, whose modules may be partially imported.
                os.write(2, f"{text}\n".encode())
                exit_now(128 + number)
            frame = frame.f_back
        _interrupted.append(True)
        raise KeyboardInterrupt

    def end_late() -> None:
        while number := os.read(reads, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is interrupt:
                select.select([reads], [], [], CTRL_C_PATIENCE)  # until another signal
                exit_now(log_fatal(text, 128 + signal.SIGINT))

    print_unraisable = sys.unraisablehook

    def end_or_print(error: Any) -> None:
        if error.exc_type is KeyboardInterrupt:
            exit_now(log_fatal(text, 128 + signal.SIGINT))
        print_unraisable(error)

    sys.unraisablehook = end_or_print
    signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=end_late, name="ctrl-c", daemon=True).start()


# RESOURCE_EXHAUSTED alone is also the status of messages too large for a connection.
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED\b.*?(memory|allocat)", re.IGNORECASE | re.DOTALL)
MESSAGE_LIMIT = 300  # characters of the first line of XLA's error


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Adds a description of this block to out-of-memory errors, for `out_of_memory`."""
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error):
            error.add_note(what)
        raise


def out_of_memory(error: BaseException) -> str | None:
    """Returns an out-of-memory summary with the first line of XLA's error, or None if `error` is not an OOM."""
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
    """Returns a message if `error` means that JAX found no devices, otherwise None."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    # JAX raises an AssertionError without a message if there is no NVIDIA driver.
    if not isinstance(error, RuntimeError | AssertionError) or not last:
        return None
    if not last[0].filename.endswith("xla_bridge.py"):
        return None
    platforms = sys.modules["jax"].config.jax_platforms or ""
    first = str(error).strip().partition("\n")[0]
    return f"JAX finds no devices of JAX_PLATFORMS={platforms}" + (f" ({first})" if first else "")


def _is_out_of_memory(error: BaseException) -> bool:
    # Does not import JAX: without the import there are no JAX errors.
    jax = sys.modules.get("jax")
    known = jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
    return known and OUT_OF_MEMORY.match(str(error)) is not None
