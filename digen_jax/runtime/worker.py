"""The threads of a worker: each executes calls in order, and may be given up during a call."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any

from digen_jax.scheduling.commands import Command, Deliver, SyncWeights


class Gone(RuntimeError):
    """A worker's process is lost, or was given up; the driver is notified separately."""


class WorkerThreads:
    """A worker's thread, and the threads of the transfers to and from it.

    Attributes:
      given_up: Set when the worker is lost or given up.
      failed: Number of failed calls in a row, by thread.
    """

    def __init__(self, name: str):
        self.name = name
        self.given_up = threading.Event()
        self.thread = Line(name)
        self._transfers = {SyncWeights: Line(f"sync {name}"), Deliver: Line(f"deliver {name}")}
        self._lines = self.thread, *self._transfers.values()
        self.failed = dict.fromkeys(self._lines, 0)

    def line(self, command: Command) -> "Line":
        """The thread that executes a command."""
        return self._transfers.get(type(command), self.thread)

    def close(self) -> None:
        """Ends the threads after their present calls; calls that have not begun are cancelled."""
        for line in self._lines:
            line.close()

    def give_up(self) -> None:
        """The same, without waiting for the present calls."""
        self.given_up.set()
        for line in self._lines:
            line.give_up()


class Line:
    """Executes calls in order. Unlike a ThreadPoolExecutor's, its thread does not delay the exit of Python."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True
        self._current: Future | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future:
        """The future result of a call; cancelled if the line was closed."""
        future = Future()
        with self._lock:
            if self._open:
                self._calls.put((future, call, arguments))
            else:
                future.cancel()
        return future

    def close(self) -> None:
        """Waits for the end of the present call, unless it is given up; cancels the calls that have not begun."""
        self._cancel()
        self._ended.wait()

    def give_up(self) -> None:
        """Also gives up the present call: its future gets an error, and its thread is left alone."""
        self._cancel()
        current = self._current
        if current is not None:
            with suppress(InvalidStateError):
                current.set_exception(CancelledError())
        self._ended.set()

    def _cancel(self) -> None:
        with self._lock, suppress(queue.Empty):
            self._open = False
            self._calls.put(None)
            while (waiting := self._calls.get_nowait()) is not None:
                waiting[0].cancel()
            self._calls.put(None)

    def _work(self) -> None:
        while (waiting := self._calls.get()) is not None:
            self._current, call, arguments = waiting
            if self._current.set_running_or_notify_cancel():
                _fulfil(self._current, call, arguments)
            self._current = None
        self._ended.set()


def _fulfil(future: Future, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Executes a call; ignores the result of a call that was given up."""
    with suppress(InvalidStateError):
        try:
            result = call(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
