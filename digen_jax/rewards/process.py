"""A process that scores: how it is started, asked and killed, and what it does.

It holds all rewards of a run and is asked one at a time, so that each has its own time limit.

It is a process group of its own, so that everything the reward starts is killed with it. It ends with the
process that asks. It imports JAX only if the user's reward does, and then without an accelerator unless told otherwise.
"""

import contextlib
import json
import math
import multiprocessing.connection
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Any, NamedTuple

from digen_jax import rewards
from digen_jax.process.shutdown import SIGNALS, at_leaving
from digen_jax.process.terminal import fitted
from digen_jax.rewards.mistakes import blamed

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from digen_jax.process.terminal import keep_writable; keep_writable(); "
    "from digen_jax.rewards.process import serve; serve(int(sys.argv[2]))"
)


class Limit(NamedTuple):
    """The time that a reward may take, and the field of the config that sets it."""

    seconds: float = math.inf
    field: str = "config.runtime.deadline"


class Gone(RuntimeError):
    """A process died while it scored, or took too long and was killed; `advice` says what to do."""

    def __init__(
        self, text: str, advice: str = "call it by itself, such as in a Python shell, to see why"
    ):
        super().__init__(text)
        self.advice = advice

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.advice)  # pickle would leave out the advice


class Late(Gone):
    """It took too long."""


class RewardProcess:
    """A process that scores and is started again after it has died. For one thread; `close` is for any.

    Args:
      payload: `rewards.Rewards`, pickled.
      names: the name of each reward in errors.
      accelerator: whether JAX has the machine's accelerators there, or only the CPU.
    """

    def __init__(self, payload: bytes, names: tuple[str, ...], accelerator: bool = False):
        self._told, self._names = (payload, names), names
        self._environment = {} if accelerator else {"JAX_PLATFORMS": "cpu"}
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def ask(self, number: int, batch: rewards.Batch, limit: Limit) -> rewards.Answer:
        """What one of the rewards says of images to which it applies.

        Raises:
          Gone: the process died, or was killed at the limit (Late).
          ConfigError: see `calling.called`.
        """
        if self._link.closed or self._process.poll() is not None:
            self._start()
        late = threading.Event()
        timer = threading.Timer(limit.seconds, self._kill, [late])
        timer.daemon = True
        if limit.seconds < math.inf:
            timer.start()
        try:
            self._link.send((number, batch))
            found = self._link.recv()
        except (EOFError, OSError):
            self._kill()
            self._link.close()
            reward = f"reward {self._names[number]!r}"
            if late.is_set():
                raise Late(
                    f"{reward} took more than {limit.seconds:g} seconds and was killed",
                    f"fix it, or raise {limit.field}",
                ) from None
            raise Gone(
                f"{reward} died in its process ({self._end()}), perhaps because memory ran out"
            ) from None
        finally:
            timer.cancel()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Kills the process and starts no other one."""
        with self._lock:
            self._closed = True
            self._kill()
        self._end()
        _running.discard(self)

    def _start(self) -> None:
        """Starts a process and sends it the reward."""
        here, there = socket.socketpair()
        with self._lock, here, there:
            if self._closed:
                raise Gone("the process of a reward was closed")
            path = json.dumps([str(folder) for folder in sys.path])
            command = [sys.executable, "-c", START, path, str(there.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=os.environ | self._environment,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
            self._link = multiprocessing.connection.Connection(here.detach())
        _running.add(self)
        with contextlib.suppress(OSError):  # if it has died already, `score` says so
            self._link.send(self._told)

    def _kill(self, late: threading.Event | None = None) -> None:
        """Kills the process and everything that it started."""
        if late is not None:
            late.set()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "and cannot be killed"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


_running: set[RewardProcess] = set()


def _kill_all() -> None:
    for process in list(_running):
        process._kill()


at_leaving(_kill_all)


# -------------------------------------------------------------------------------- in the process


@fitted(beside=True)
def serve(descriptor: int) -> None:
    """Scores batches as they come, until the asking process has gone."""
    # The run handles signals to all processes of a job. SIG_IGN is not used, as children would inherit it.
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    os.set_inheritable(descriptor, False)
    link = multiprocessing.connection.Connection(descriptor)
    # So that the asking process sees the end of this one although a child that the reward has forked lives on.
    os.register_at_fork(after_in_child=link.close)
    told: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, told), daemon=True).start()
    payload, names = told.get()
    try:
        with blamed(", ".join(names), "cannot be imported in its process:"):
            found, failed = pickle.loads(payload), None
    except BaseException as error:
        found, failed = None, error
    while True:
        number, batch = told.get()
        try:
            if failed is not None:
                raise failed
            answer: Any = found.members[number].answer(batch)
        except BaseException as error:
            answer = _sendable(error)
        link.send(answer)


def _listen(link: multiprocessing.connection.Connection, told: queue.SimpleQueue) -> None:
    """Receives batches also while the reward works, so that this process ends when the asking one does."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            told.put(link.recv())
    os.killpg(0, signal.SIGKILL)


def _sendable(error: BaseException) -> BaseException:
    """An error pickled for another process, with its origin."""
    where = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    # Pickling may raise anything, as the exception's own class decides.
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"In the process of the reward:\n{where}")
    return error
