"""Use of the machine's cores by measured and by other processes."""

import dataclasses
import time
from collections.abc import Collection

import psutil

QUIET = 0.03  # maximum share of the cores that other processes may use in a valid round


@dataclasses.dataclass(frozen=True)
class Reading:
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


def read(cores: Collection[int]) -> Reading:
    """Returns the current counters of these cores."""
    every = psutil.cpu_times(percpu=True)
    times = [every[core] for core in cores]
    busy = sum(t.user + t.nice + t.system + t.irq + t.softirq for t in times)
    return Reading(time.perf_counter(), busy, sum(t.steal for t in times))


def between(before: Reading, after: Reading, own: float, cores: int) -> Load:
    """Returns the load between two readings; `own` are the CPU-seconds of the measured processes."""
    available = (after.clock - before.clock) * cores
    others = max(0.0, after.busy - before.busy - own)
    return Load(others / available, (after.stolen - before.stolen) / available)
