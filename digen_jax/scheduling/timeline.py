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
        self._waiting: dict[str, tuple[float, str]] = {}  # worker: (start, cause)
        self.waits_since: dict[str, float] = {}  # worker: start of its wait, before any `split`

    def work(
        self, worker: str, kind: str, start: float, end: float, chunk: Chunk | None = None
    ) -> None:
        """Records work of a worker from `start`, which ends its wait, to `end`."""
        self.end_wait(worker, start)
        self.intervals.append(Interval(worker, kind, start, end, chunk))

    def look_at(self, scheduler: Scheduler, worker: str, now: float) -> None:
        """Records whether and for what a worker waits."""
        if not scheduler.is_busy(worker):
            self.wait(worker, scheduler.waits_for(worker), now)

    def wait(self, worker: str, cause: str, now: float) -> None:
        """Starts a worker's wait, unless it already waits for this cause."""
        since = self._waiting.get(worker)
        if since is None or since[1] != cause:
            self.end_wait(worker, now)
            self._waiting[worker] = (now, cause)
            self.waits_since[worker] = now

    def waits(self, worker: str) -> bool:
        """Returns whether a worker waits."""
        return worker in self._waiting

    def end_wait(self, worker: str, now: float) -> None:
        """Ends and records a worker's wait."""
        since, cause = self._waiting.pop(worker, (now, ""))
        self.waits_since.pop(worker, None)
        if now > since:
            self.intervals.append(Interval(worker, "wait", since, now, None, cause))

    def split(self, now: float) -> None:
        """Ends every wait at `now`; waits that continue start again."""
        starts = dict(self.waits_since)
        for worker, (_, cause) in list(self._waiting.items()):
            self.end_wait(worker, now)
            self._waiting[worker] = (now, cause)
        self.waits_since.update(starts)


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
