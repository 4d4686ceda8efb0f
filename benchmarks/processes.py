"""Processes of a benchmark that answer requests one at a time, and the use of the machine's cores by others."""

import dataclasses
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

ANSWER, END = 3600, 10  # timeouts in seconds for an answer, and for a process to end
QUIET = 0.03  # maximum share of the cores that other processes may use in a valid round


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A duration: wall time, and CPU time of the complete process."""

    wall: float
    cpu: float


class Process:
    """A process that answers requests, one at a time.

    Args:
      context: Context of `multiprocessing`.
      make: Returns the object whose methods are requested; called in the process.
      arguments: Its arguments, which must be picklable.
    """

    def __init__(self, context: Any, make: Callable[..., Any], *arguments: Any):
        self._connection, other = context.Pipe()
        arguments = (other, make, *arguments)
        self._process = context.Process(target=_answer_requests, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def call(self, method: str, *arguments: Any) -> tuple[Any, Seconds]:
        """Returns a method's result and its duration.

        Raises:
          RuntimeError: the process has ended, or has not answered within `ANSWER` seconds.
        """
        self._connection.send((method, *arguments))
        if not self._connection.poll(ANSWER):
            raise RuntimeError(f"a process has not answered in {ANSWER} s")
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a process has failed: see its output above") from None

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join(END)
        if self._process.is_alive():
            self._process.kill()


def _answer_requests(connection: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    """Answers each request with (result, `Seconds`) of a method."""
    worker = make(*arguments)
    while True:
        method, *arguments = connection.recv()
        start, used = time.perf_counter(), time.process_time()
        result = getattr(worker, method)(*arguments)
        seconds = Seconds(time.perf_counter() - start, time.process_time() - used)
        connection.send((result, seconds))


class Reading(NamedTuple):
    """Seconds summed over some cores: `busy` with any process, `stolen` by other virtual machines (Linux only)."""

    clock: float
    busy: float
    stolen: float


@dataclasses.dataclass(frozen=True)
class Load:
    """Use of the cores by other processes and virtual machines, as shares of the cores' time."""

    others: float
    stolen: float

    @property
    def quiet(self) -> bool:
        """Whether times that were measured meanwhile are valid."""
        return self.others + self.stolen <= QUIET


def read_cores(cores: Collection[int]) -> Reading:
    """Returns the current counters of these cores."""
    every = psutil.cpu_times(percpu=True)
    times = [every[core] for core in cores]
    busy = sum(t.user + t.nice + t.system + t.irq + t.softirq for t in times)
    return Reading(time.perf_counter(), busy, sum(t.steal for t in times))


def load_between(before: Reading, after: Reading, own: float, cores: int) -> Load:
    """Returns the load between two readings; `own` are the CPU-seconds of the measured processes."""
    available = (after.clock - before.clock) * cores
    others = max(0.0, after.busy - before.busy - own)
    return Load(others / available, (after.stolen - before.stolen) / available)
