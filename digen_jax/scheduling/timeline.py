"""Records what every worker executes or waits for, in real and simulated runs, and sums it up."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.scheduler import Scheduler

# Causes of waiting: "weights" in transfer, a "reward", others' "sampling" or "training", the "update", the "end".
CAUSES = ("sampling", "reward", "training", "update", "weights", "evaluation", "end")


class Interval(NamedTuple):
    """One activity of a worker from `start` to `end`, in seconds.

    `kind` is a command's kind, "evaluate" for an evaluation chunk, or "wait" for `cause`, one of CAUSES. The worker
    "reward" is all rewards; its intervals may overlap. Transfers to and from a rollout worker have separate rows, such
    as "sync rollout 0", and so has each server of a reward, such as "judge 127.0.0.1:8000", with
    "request" or, if it is retried, "failed request"; these may overlap, too.
    """

    worker: str
    kind: str
    start: float
    end: float
    chunk: Chunk | None = None
    cause: str = ""

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.end - self.start


class Recorder:
    """Records the intervals of workers' commands and waits."""

    def __init__(self):
        self.intervals: list[Interval] = []
        # Worker: (start of its wait or the last `split`, start of its wait, cause).
        self.waits: dict[str, tuple[float, float, str]] = {}

    def work(
        self, worker: str, kind: str, start: float, end: float, chunk: Chunk | None = None
    ) -> None:
        """Records work of a worker from `start`, which ends its wait, to `end`."""
        self.end_wait(worker, start)
        self.intervals.append(Interval(worker, kind, start, end, chunk))

    def look_at(self, scheduler: Scheduler, worker: str, now: float) -> None:
        """Records whether and for what a worker waits."""
        if scheduler.workers[worker].busy is None:
            self.wait(worker, scheduler.waits_for(worker), now)

    def wait(self, worker: str, cause: str, now: float) -> None:
        """Starts a worker's wait, unless it already waits for this cause."""
        if worker not in self.waits or self.waits[worker][2] != cause:
            self.end_wait(worker, now)
            self.waits[worker] = now, now, cause

    def end_wait(self, worker: str, now: float) -> None:
        """Ends and records a worker's wait."""
        start, _, cause = self.waits.pop(worker, (now, now, ""))
        if now > start:
            self.intervals.append(Interval(worker, "wait", start, now, None, cause))

    def split(self, now: float) -> None:
        """Ends every wait at `now`; waits that continue start again."""
        for worker, (_, since, cause) in list(self.waits.items()):
            self.end_wait(worker, now)
            self.waits[worker] = now, since, cause


def busy_seconds(
    intervals: Iterable[Interval], devices: Mapping[str, int], start: float, end: float
) -> float:
    """Returns device-seconds of work, without waiting, between two times; `devices` has each worker's count."""
    return sum(
        max(0.0, min(i.end, end) - max(i.start, start)) * devices[i.worker]
        for i in intervals
        if i.kind != "wait" and i.worker in devices
    )


def bubbles(intervals: Iterable[Interval], devices: Mapping[str, int]) -> dict[str, float]:
    """Returns device-seconds of waiting, by cause."""
    found = defaultdict[str, float](float)
    for interval in intervals:
        if interval.kind == "wait":
            found[interval.cause] += interval.seconds * devices[interval.worker]
    return dict(found)
