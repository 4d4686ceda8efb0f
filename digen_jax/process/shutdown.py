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

_hung: list[str] = []
_last: list[Callable[[], None]] = []
_deciding = threading.Lock()
_exit = os._exit  # `guard_exit` replaces it
_raises = contextvars.ContextVar("raises", default=False)  # see `exits_raise`
# What the process's last word was: its exit code, and the thread that prints it.
_said: list[tuple[int, threading.Thread]] = []


class Stopped(RuntimeError):
    """A run cannot continue, but not by a mistake of the user; its text is one sentence that says why."""


def mark_hung(what: str) -> None:
    """Registers a thread that hangs, so that this process does not wait for it at its end."""
    _hung.append(what)


def before_exit(call: Callable[[], None]) -> None:
    """Registers a short action for `exit_now` to do before it ends the process, such as ending its children."""
    _last.append(call)


def log_fatal(text: str, code: int) -> int:
    """Prints why this process ends to standard error, unless another thread has; for any thread.

    Returns:
      The exit code that belongs to what was said.
    """
    with _deciding:
        if not _said:
            # In a thread of its own, as a thread that hangs may hold a lock that this needs.
            _said.append((code, threading.Thread(target=print_error, args=(text,), daemon=True)))
            _said[0][1].start()
    code, printing = _said[0]
    printing.join(PATIENCE)
    return code


def exit_now(code: int) -> None:
    """Ends this process at once, whatever its threads do; printed text is flushed."""
    # In a thread of its own, as a thread that hangs may hold a lock that this needs.
    last = threading.Thread(target=_do_last, daemon=True)
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
        exit_now(
            log_fatal(
                f"os._exit({status}) was called in {where}: raise an exception there", STOPPED
            )
        )

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
    """From now on an abort of this process (SIGABRT) takes some seconds, in which another thread may `exit_now`.

    JAX aborts a process as soon as its job's first one is lost, before the thread that hears of the loss can say so.
    The handler is C's `sleep`, which takes the signal's number for seconds: 6. No Python runs in it, so that nothing
    keeps the process from its end, and then it ends as without this.
    """
    library = ctypes.CDLL(None)
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _do_last() -> None:
    for call in (*_last, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            call()


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


# The status is also that of messages too large for a connection.
STATUS = re.compile(r"RESOURCE_EXHAUSTED\b.*?(memory|allocat)", re.IGNORECASE | re.DOTALL)
LONGEST = 300  # letters of XLA's first line


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Notes what this block does in an error by which a device runs out of memory, for `out_of_memory`."""
    try:
        yield
    except Exception as error:
        if _exhausted(error):
            error.add_note(what)
        raise


def out_of_memory(error: BaseException) -> str | None:
    """What a device ran out of memory by, with the first line of XLA's error; None: `error` has another reason."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if _exhausted(found):
            first = str(found).strip().partition("\n")[0]
            shown = first if len(first) <= LONGEST else f"{first[:LONGEST]}..."
            notes = getattr(found, "__notes__", [])
            where = f" during {notes[0]}" if notes else ""
            return f"a device ran out of memory{where} ({shown.rstrip('.')})"
        seen.add(id(found))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def no_devices(error: BaseException) -> str | None:
    """What devices JAX did not find, with the first line of its error; None: `error` has another reason."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    # JAX raises an AssertionError without a text where it finds no driver of NVIDIA's.
    if not isinstance(error, RuntimeError | AssertionError) or not last:
        return None
    if not last[0].filename.endswith("xla_bridge.py"):
        return None
    asked = sys.modules["jax"].config.jax_platforms
    first = str(error).strip().partition("\n")[0]
    return f"JAX finds no devices of JAX_PLATFORMS={asked or ''}" + (f" ({first})" if first else "")


def _exhausted(error: BaseException) -> bool:
    # A script that has not imported JAX cannot have its errors, and need not import it for this.
    jax = sys.modules.get("jax")
    return (
        jax is not None
        and isinstance(error, jax.errors.JaxRuntimeError)
        and STATUS.match(str(error)) is not None
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM)
CTRL_C_PATIENCE = 5.0  # seconds in which KeyboardInterrupt must end a process

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
        self.requested, self._told = 0, told

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
        first, self.requested = not self.requested, number
        if first:
            self._told(number)


def _count(came: int) -> None:
    """Reads the numbers of the signals as they come, and ends the process at the second request to stop."""
    asked = 0
    while number := os.read(came, 1):
        asked += number[0] in SIGNALS
        if asked == 2:
            os.write(2, b"\nended at once: the same command continues from the last checkpoint\n")
            exit_now(128 + number[0])
    os.close(came)


def _open_standard_descriptors() -> None:
    """Opens those of the descriptors 0 to 2 that are closed, for children too, so that no pipe gets their numbers."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(lowest, True)
    os.close(lowest)


def end_by_ctrl_c() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, and end this process after `CTRL_C_PATIENCE` seconds if that has not.

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
                # Not by `log_fatal`, whose own modules may be the ones that are imported.
                os.write(2, f"{said}\n".encode())
                exit_now(128 + number)
            frame = frame.f_back
        raise KeyboardInterrupt

    def end_late() -> None:
        while number := os.read(came, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is interrupt:
                select.select([came], [], [], CTRL_C_PATIENCE)  # until another signal
                exit_now(log_fatal(said, 128 + signal.SIGINT))

    signal.signal(signal.SIGINT, interrupt)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=end_late, name="ctrl-c", daemon=True).start()
