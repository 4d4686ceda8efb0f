"""Processes of a benchmark that do what they are asked for, one thing at a time."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

# Seconds for an answer, and for a process to end after it was told to.
LONGEST, ENDING = 3600, 10


class Seconds(NamedTuple):
    """How long something took: by the clock, and as CPU time of the whole process."""

    wall: float
    cpu: float


class Worker:
    """A process with a connection over which it is asked and answers.

    Args:
      context: of `multiprocessing`.
      target: its main function, which gets its end of the connection, then the arguments.
      arguments: can be pickled.
    """

    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any):
        self._control, control = context.Pipe()
        self._process = context.Process(target=target, args=(control, *arguments), daemon=True)
        self._process.start()
        control.close()

    def ask(self, what: str, *arguments: Any) -> None:
        """Asks for something; `answer` has the result."""
        self._control.send((what, *arguments))

    def answer(self) -> Any:
        """Waits for the result.

        Raises:
          RuntimeError: the process has ended, or has not answered in `LONGEST` seconds.
        """
        if not self._control.poll(LONGEST):
            raise RuntimeError(f"a process has not answered in {LONGEST} s")
        try:
            return self._control.recv()
        except EOFError:
            raise RuntimeError("a process has failed: what it says stands above") from None

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join(ENDING)
        if self._process.is_alive():
            self._process.kill()


def do_as_asked(control: Connection, worker: Any) -> None:
    """Answers with (result, `Seconds`) of the worker's method of each name that comes, with its arguments."""
    while True:
        what, *arguments = control.recv()
        begin, used = time.perf_counter(), time.process_time()
        result = getattr(worker, what)(*arguments)
        seconds = Seconds(time.perf_counter() - begin, time.process_time() - used)
        control.send((result, seconds))
