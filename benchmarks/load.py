"""Use of the machine by measured and by other processes, from Linux's counters in /proc."""

import contextlib
import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Collection

STAT = pathlib.Path("/proc/stat")
# The share of the cores that other processes may use in a round whose times count.
QUIET = 0.03


@dataclasses.dataclass(frozen=True)
class Reading:
    """The counters of some cores, summed, in seconds: `busy` by any process, `stolen` by other virtual machines."""

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
        """Whether times that were measured meanwhile count."""
        return self.others + self.stolen <= QUIET


def read(cores: Collection[int]) -> Reading:
    """The counters of these cores now."""
    return parse(STAT.read_text(), cores, time.perf_counter(), os.sysconf("SC_CLK_TCK"))


def parse(text: str, cores: Collection[int], clock: float, ticks: int) -> Reading:
    """The counters in the text of /proc/stat, which has `ticks` a second.

    A core's line is `cpuN user nice system idle iowait irq softirq steal ...` (Linux, man 5 proc_stat).
    """
    busy = stolen = 0
    names = {f"cpu{core}" for core in cores}
    for line in text.splitlines():
        name, *counts = line.split()
        if name in names:
            user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return Reading(clock, busy / ticks, stolen / ticks)


def between(before: Reading, after: Reading, own: float, cores: int) -> Load:
    """The load between two readings; `own` are the CPU-seconds of the measured processes."""
    available = (after.clock - before.clock) * cores
    others = max(0.0, after.busy - before.busy - own)
    return Load(others / available, (after.stolen - before.stolen) / available)


def descendants(process: int) -> set[int]:
    """The processes that a process has started, and those that they have started."""
    parents = {}
    for path in STAT.parent.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {process}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {process}


def used(process: int) -> float:
    """CPU-seconds of a process so far; 0 if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # Behind its name, which may have spaces: the fields from the third on; utime and stime are the 14th and 15th.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(process: int) -> int:
    """Bytes of memory of a process, shared pages in proportion; 0 if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * int(re.search(r"^Pss: +(\d+) kB$", text, re.M)[1])
