"""Processes of a benchmark that answer requests one at a time, and the use of the machine's cores by others."""

import dataclasses
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import psutil

ANSWER = 3600  # timeout in seconds for an answer
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
        self._pool = ProcessPoolExecutor(1, context, _make, (make, *arguments))

    def call(self, method: str, *arguments: Any) -> tuple[Any, Seconds]:
        """Returns a method's result and its duration. Raises its exception, or TimeoutError after `ANSWER` seconds."""
        return self._pool.submit(_timed, method, *arguments).result(ANSWER)

    def close(self) -> None:
        """Ends the process after its last request."""
        self._pool.shutdown(cancel_futures=True)


_made: Any = None  # in a `Process`: the object whose methods are requested


def _make(make: Callable[..., Any], *arguments: Any) -> None:
    global _made
    _made = make(*arguments)


def _timed(method: str, *arguments: Any) -> tuple[Any, Seconds]:
    start, used = time.perf_counter(), time.process_time()
    result = getattr(_made, method)(*arguments)
    return result, Seconds(time.perf_counter() - start, time.process_time() - used)


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
