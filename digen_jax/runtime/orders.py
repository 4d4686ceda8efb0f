"""Common work of a run's processes: an ordered log in jax.distributed's key-value store.

The first process decides. Before it begins work in which the devices of all processes take part, it
writes an entry; the others execute the entries in order, so that all enqueue the same work in the same order.
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
from digen_jax.process import ending, team
from digen_jax.process.ending import STOPPED, Stopped
from digen_jax.process.exhausted import out_of_memory
from digen_jax.process.interrupt import Interrupt
from digen_jax.runtime.link import LOSS, LinkError, connection_broke, may_be_a_loss
from digen_jax.scheduling.saving import pack, unpack

LOG, STOP, MEETING = "digen_jax/log", "digen_jax/stop", "digen_jax/meeting"
ANSWER = "digen_jax/answer"
LONGEST_WAIT = 10**6  # seconds, for waits without a deadline
WAIT = 1000  # milliseconds: between two waits a process checks for signals

_meetings = itertools.count()  # a name for each, as all processes come to the same ones


def is_first() -> bool:
    """Whether this process decides; always true in a run of one process."""
    return team.is_first()


def several() -> bool:
    """Whether this run has more than one process."""
    return team.size() > 1


def meet(what: str, seconds: float) -> None:
    """Waits until all processes have come to this call; with one process it does nothing.

    Args:
      what: the work that all have done by then, in words.
      seconds: the longest wait, which may be infinite.

    Raises:
      Stopped: another process has not come, or has ended.
    """
    if not several():
        return
    limit = int(min(seconds, LONGEST_WAIT) * 1000)
    try:
        name, client = f"{MEETING}/{next(_meetings)}", distributed.global_state.client
        client.wait_at_barrier(name, limit, process_ids=team.members())
    except jax.errors.JaxRuntimeError as error:
        late = "DEADLINE_EXCEEDED" in str(error)
        why = f"not there within {seconds:g} seconds (config.runtime.deadline)" if late else "gone"
        raise Stopped(
            f"another process is {why} after {what}: look at what it printed, and start the same command on all again, "
            "which continues"
        ) from error


class Orders:
    """The first process's end of the log; without other processes it writes nothing. For any thread."""

    def __init__(self):
        self._client = distributed.global_state.client if several() else None
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
          ConfigError: the mistake that one of them has found.
          Stopped: one of them does not answer.
        """
        if self._client is None:
            return
        limit = int(min(seconds, LONGEST_WAIT) * 1000)
        for number in (team.members() or range(team.size()))[1:]:
            try:
                mistake = self._client.blocking_key_value_get(f"{ANSWER}/{number}", limit)
            except jax.errors.JaxRuntimeError as error:
                raise Stopped(
                    f"process {number} has not looked at the run within {seconds:g} seconds: look at what it printed, "
                    "and start the same command on all again"
                ) from error
            if mistake:
                raise ConfigError(mistake)

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
        if self._client is None:
            return 0
        found = self._client.key_value_dir_get(STOP)
        return int(found[0][1]) if found else 0


def answer(mistake: str) -> None:
    """Tells the first process, once, the mistake that this one has found before any common work; "": none."""
    state = distributed.global_state
    state.client.key_value_set(f"{ANSWER}/{state.process_id}", mistake)


def orders(interrupt: Interrupt) -> Iterator[tuple[str, Any]]:
    """The entries (kind, value) in order; passes a signal to this process on to the first."""
    client, passed_on = distributed.global_state.client, False
    for number in itertools.count():
        text = None
        while text is None:
            with contextlib.suppress(TimeoutError):
                text = _wait_for(client, f"{LOG}/{number}")
            if interrupt.asked and not passed_on:
                key = f"{STOP}/{distributed.global_state.process_id}"
                client.key_value_set(key, str(int(interrupt.asked)))
                passed_on = True
        kind, value = json.loads(text)
        yield kind, unpack(value)


def _wait_for(client: Any, key: str) -> str:
    """The value of a key; raises TimeoutError if it does not come for a while."""
    try:
        return client.blocking_key_value_get(key, WAIT)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError from error


@contextlib.contextmanager
def leading() -> Iterator[Orders]:
    """The first process's orders in a run. If it fails between two orders, it tells the others."""
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
    sentence, code = out_of_memory(error), 1
    if isinstance(error, ConfigError) or sentence:
        code = 2
    elif isinstance(error, Stopped):
        code = STOPPED
    elif may_be_a_loss(error):
        # Who hears of the loss says so and ends this process.
        time.sleep(LOSS)
        code = STOPPED
    known = isinstance(error, ConfigError | Stopped | LinkError)
    if not sentence and connection_broke(error):
        sentence = f"another process is lost ({str(error).partition(chr(10))[0]})"
    text = sentence or (
        str(error) if known else "".join(traceback.format_exception(error)).rstrip()
    )
    number = distributed.global_state.process_id
    ends = f"process {number} has failed, which ends the run: the same command continues from the last checkpoint"
    ending.leave(ending.last_word(f"{text}\n{ends}", code))
