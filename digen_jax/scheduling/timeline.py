"""What every worker did and waited for, recorded and summed up: of real and of simulated runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from digen_jax.scheduling.commands import Fragment
from digen_jax.scheduling.scheduler import Scheduler

# What a worker may wait for; "end" is that of the run.
CAUSES = ("generation", "reward", "trainer", "faster worker", "publish", "evaluation", "end")


class Interval(NamedTuple):
    """What a worker did from `start` to `end`, in seconds.

    `kind` is a command's, "tag" for a fragment that the trainer generates beside rollout workers,
    "evaluate" for one of an evaluation, or "wait" for `cause`, one of CAUSES. The rewards are the worker
    "reward", and scoring overlaps there. Transfers to and from a rollout worker have rows of their own,
    such as "publish rollout 0".
    """

    worker: str
    kind: str
    start: float
    end: float
    fragment: Fragment | None = None
    cause: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


class Recorder:
    """Notes down what workers do, and between that what they wait for."""

    def __init__(self):
        self.intervals: list[Interval] = []
        self._waiting: dict[str, tuple[float, str]] = {}  # worker: since when, for what

    def work(
        self, worker: str, kind: str, start: float, end: float, fragment: Fragment | None = None
    ) -> None:
        """A worker does something from `start`, when its wait ends, to `end`."""
        self.end_wait(worker, start)
        self.intervals.append(Interval(worker, kind, start, end, fragment))

    def look_at(self, scheduler: Scheduler, worker: str, now: float) -> None:
        """Whether a worker waits, and for what."""
        if not scheduler.is_busy(worker):
            self.wait(worker, scheduler.waits_for(worker), now)

    def wait(self, worker: str, cause: str, now: float) -> None:
        """A worker waits from now on, if it does not do so for this cause already."""
        since = self._waiting.get(worker)
        if since is None or since[1] != cause:
            self.end_wait(worker, now)
            self._waiting[worker] = (now, cause)

    def waits(self, worker: str) -> bool:
        """Whether a worker waits."""
        return worker in self._waiting

    def end_wait(self, worker: str, now: float) -> None:
        """Notes down a wait that is over."""
        since, cause = self._waiting.pop(worker, (now, ""))
        if now > since:
            self.intervals.append(Interval(worker, "wait", since, now, None, cause))

    def cut(self, now: float) -> None:
        """Ends every wait; those that go on begin anew."""
        for worker, (_, cause) in list(self._waiting.items()):
            self.end_wait(worker, now)
            self._waiting[worker] = (now, cause)


def busy_seconds(
    intervals: Iterable[Interval], devices: Mapping[str, int], start: float, end: float
) -> float:
    """Device-seconds of work, not of waiting, between two times; `devices` of each worker."""
    return sum(
        max(0.0, min(i.end, end) - max(i.start, start)) * devices[i.worker]
        for i in intervals
        if i.kind != "wait" and i.worker in devices
    )


def bubbles(intervals: Iterable[Interval], devices: Mapping[str, int]) -> dict[str, float]:
    """Device-seconds of waiting, by cause."""
    found: Counter[str] = Counter()
    for interval in intervals:
        if interval.kind == "wait":
            found[interval.cause] += interval.seconds * devices[interval.worker]
    return dict(found)
