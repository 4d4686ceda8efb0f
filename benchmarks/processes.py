"""Processes of a benchmark that answer requests, one at a time."""

import dataclasses
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ANSWER, END = 3600, 10  # timeouts in seconds for an answer, and for a process to end


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A duration: wall time, and CPU time of the complete process."""

    wall: float
    cpu: float


class Process:
    """A process that answers requests, one at a time.

    Args:
      context: Context of `multiprocessing`.
      target: Main function, which gets its end of the connection, then the arguments.
      arguments: Arguments, which must be picklable.
    """

    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any):
        self._connection, other = context.Pipe()
        self._process = context.Process(target=target, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()

    def request(self, method: str, *arguments: Any) -> None:
        """Requests a method's result, which `answer` returns."""
        self._connection.send((method, *arguments))

    def answer(self) -> tuple[Any, Seconds]:
        """Waits for the result.

        Raises:
          RuntimeError: the process has ended, or has not answered within `ANSWER` seconds.
        """
        if not self._connection.poll(ANSWER):
            raise RuntimeError(f"a process has not answered in {ANSWER} s")
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a process has failed: see its output above") from None

    def call(self, method: str, *arguments: Any) -> Any:
        """Requests a method's result and returns it."""
        self.request(method, *arguments)
        return self.answer()[0]

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join(END)
        if self._process.is_alive():
            self._process.kill()


def answer_requests(connection: Connection, worker: Any) -> None:
    """Answers each request with (result, `Seconds`) of the worker's method."""
    while True:
        method, *arguments = connection.recv()
        start, used = time.perf_counter(), time.process_time()
        result = getattr(worker, method)(*arguments)
        seconds = Seconds(time.perf_counter() - start, time.process_time() - used)
        connection.send((result, seconds))
