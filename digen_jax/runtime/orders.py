"""Common work of a run's processes: an ordered log in jax.distributed's key-value store.

The first process decides. Before it starts work in which the devices of all processes take part, it writes an entry;
the others execute the entries in order, so that all enqueue the same work in the same order.
"""

import contextlib
import itertools
import json
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # JAX has no public way to its key-value store

from digen_jax.errors import ConfigError
from digen_jax.process import process_group, shutdown
from digen_jax.process.interrupt import Interrupt
from digen_jax.process.shutdown import STOPPED, Stopped, out_of_memory
from digen_jax.runtime.link import LOSS, LinkError, connection_broke, may_be_a_loss
from digen_jax.scheduling.saving import pack, unpack

LOG, STOP, ANSWER = "digen_jax/log", "digen_jax/stop", "digen_jax/answer"
WAIT = 1000  # milliseconds: between two waits a process checks for signals


class Orders:
    """The first process's end of the log; without other processes it writes nothing. For any thread."""

    def __init__(self):
        self._client = distributed.global_state.client if process_group.several() else None
        self.torn = False  # whether this process has failed during common work
        self._lock = threading.Lock()
        self._written, self._step, self._forgotten = 0, 0, 0

    def announce(self, kind: str, value: Any = None) -> None:
        """Writes the next entry; `value` is anything that `pack` accepts."""
        if self._client is None:
            return
        text = json.dumps([kind, pack(value)])
        with self._lock:
            self._client.key_value_set(f"{LOG}/{self._written}", text)
            self._written += 1

    def hear(self, seconds: float) -> None:
        """Waits until every other process has answered: see `answer`.

        Raises:
          ConfigError: The error that one of them has found.
          Stopped: One of them does not answer.
        """
        if self._client is None:
            return
        limit = int(min(seconds, process_group.LONGEST_WAIT) * 1000)
        for number in (process_group.members() or range(process_group.size()))[1:]:
            try:
                found = self._client.blocking_key_value_get(f"{ANSWER}/{number}", limit)
            except jax.errors.JaxRuntimeError as error:
                raise Stopped(
                    f"process {number} has not looked at the run within {seconds:g} seconds: look at what it printed, "
                    "and start the same command on all again"
                ) from error
            if found:
                raise ConfigError(found)

    @contextlib.contextmanager
    def together(self, kind: str, value: Any = None) -> Iterator[None]:
        """Announces a block that all processes execute. If it fails here, the others remain inside it."""
        self.announce(kind, value)
        try:
            yield
        except BaseException:
            self.torn = self._client is not None
            raise

    def step_done(self) -> None:
        """A step has ended: deletes the entries of the previous one, which all processes have executed."""
        if self._client is None:
            return
        with self._lock:
            for number in range(self._forgotten, self._step):
                self._client.key_value_delete(f"{LOG}/{number}")
            self._forgotten, self._step = self._step, self._written

    def asked_to_stop(self) -> int:
        """The signal that asked another process to stop, or 0."""
        found = self._client and self._client.key_value_dir_get(STOP)
        return int(found[0][1]) if found else 0


def answer(error: str) -> None:
    """Sends the first process, once, the error that this one has found before any common work; "": none."""
    state = distributed.global_state
    state.client.key_value_set(f"{ANSWER}/{state.process_id}", error)


def entries(interrupt: Interrupt) -> Iterator[tuple[str, Any]]:
    """The entries (kind, value) in order; passes a signal to this process on to the first."""
    state, passed_on = distributed.global_state, False
    for number in itertools.count():
        text = None
        while text is None:
            try:
                text = state.client.blocking_key_value_get(f"{LOG}/{number}", WAIT)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if interrupt.asked and not passed_on:
                state.client.key_value_set(f"{STOP}/{state.process_id}", str(int(interrupt.asked)))
                passed_on = True
        kind, value = json.loads(text)
        yield kind, unpack(value)


@contextlib.contextmanager
def leading() -> Iterator[Orders]:
    """The first process's orders in a run. If it fails between two orders, the others get its error."""
    orders = Orders()
    try:
        yield orders
    except BaseException as error:
        if orders.torn:
            leave(error)
        known = isinstance(error, ConfigError | Stopped)
        text = str(error) if known else f"the first process: {out_of_memory(error) or repr(error)}"
        orders.announce("end", (text, STOPPED if isinstance(error, Stopped) else None))
        raise


def leave(error: BaseException) -> None:
    """Ends a failed process without waiting for the others, because they may wait for it in common work.

    They notice its absence, and end, too. Its exit code is `run_main`'s for the same error.
    """
    message, code = out_of_memory(error), 1
    if isinstance(error, ConfigError) or message:
        code = 2
    elif isinstance(error, Stopped):
        code = STOPPED
    elif may_be_a_loss(error):
        # The thread that notices the loss reports it and ends this process.
        time.sleep(LOSS)
        code = STOPPED
    if not message and connection_broke(error):
        message = f"another process is lost ({str(error).partition(chr(10))[0]})"
    if not message:
        known = isinstance(error, ConfigError | Stopped | LinkError)
        message = str(error) if known else "".join(traceback.format_exception(error)).rstrip()
    number = distributed.global_state.process_id
    ends = f"process {number} has failed, which ends the run: the same command continues from the last checkpoint"
    shutdown.leave(shutdown.last_word(f"{message}\n{ends}", code))
