"""Faults of random kinds in a run with rollout workers on Ray, and the checks after each of them."""

import dataclasses
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable

from digen_jax.benchmark.equality import STEP, lines, steps
from digen_jax.benchmark.job import Job, Wrong, memory, processes
from digen_jax.process.ending import STOPPED
from digen_jax.records.metrics import CLOCK

WORKERS = 2
ENDLESS = 10**6  # steps of a run that a signal ends
START = 300.0  # seconds for a step with a start before it
# Seconds until a worker that does not answer is lost, and until all processes end without the trainer or the driver.
SILENCE, END = 8.0, 10.0
BUSY = 10.0  # seconds that a busy machine may take in addition
OVERLAP = 0.25  # share of the faults after which the next one does not wait


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and its consequences.

    Attributes:
      kind: a key of `FaultInjection.kinds`.
      continued: seconds until a step that began after the fault had ended; None: the next fault did not wait for it.
      recovered: seconds until all rollout workers were ready; None likewise.
      ended: seconds until all processes had ended, where the fault ends the run.
    """

    kind: str
    continued: float | None
    recovered: float | None
    ended: float | None = None


class FaultInjection:
    """A run in which faults happen.

    Attributes:
      faults: those that have happened.
      memory: the largest bytes so far of the trainer's process and of a rollout worker's.
      kinds: the weight of each in random choices, and the method that makes it happen, which returns False if it
        cannot at present.
    """

    def __init__(
        self, job: Job, workdir: pathlib.Path, seed: int, report: Callable[[str], None] = print
    ):
        self.faults: list[Fault] = []
        self.memory = {"trainer": 0, "rollout worker": 0}
        self._job, self._workdir, self._report = job, workdir, report
        self._random = random.Random(seed)
        self._ended: float | None = None
        self._left: int | None = None  # the steps that were done when the run ended
        self._kept: dict[str, int] = {}  # processes of workers that had no fault
        self.kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "rollout worker killed": (4, self._kill_worker),
            "all rollout workers killed": (1, self._kill_workers),
            "rollout worker stopped": (3, self._stop_worker),
            "rollout worker slowed": (2, self._slow_worker),
            "reward process killed": (3, self._kill_reward),
            "trainer killed": (2, self._kill_trainer),
            "driver killed": (2, self._kill_driver),
            "SIGTERM to the driver": (2, self._end_driver),
        }

    def begin(self) -> None:
        """Starts the run, and waits for its second step and all workers."""
        self._start()
        self._wait(2)

    def next(self) -> Fault:
        """A fault after a random time, and its checks. Its kind is a new one until all kinds have happened.

        Raises:
          Wrong: it had a consequence that it must not have.
        """
        time.sleep(self._random.uniform(0, 4))
        overlaps = self._random.random() < OVERLAP
        until = time.monotonic() + START
        while True:  # some kinds need a worker that is ready
            seen = {fault.kind for fault in self.faults}
            kinds = {k: v for k, v in self.kinds.items() if k not in seen} or self.kinds
            kind = self._random.choices([*kinds], [weight for weight, _ in kinds.values()])[0]
            begin, done, self._ended, self._left = time.time(), self._done(), None, None
            if kinds[kind][1]():
                break
            if time.monotonic() > until:
                raise Wrong(f"no fault is possible for {START:g} s:\n{self._job.output(3000)}")
            time.sleep(0.5)
        # The step after the one in progress, or the first one of a new start.
        count = done + 2 if self._left is None else self._left + 1
        continued = recovered = None
        if not overlaps:
            recovered = self._wait(count, begin)
            (line,) = [one for one in lines(self._workdir) if STEP in one and one["step"] == count]
            continued = line[CLOCK] - begin
        self.check()
        self.faults.append(Fault(kind, continued, recovered, self._ended))
        after = "the next one follows" if overlaps else f"continued after {continued:.1f} s"
        self._report(f"{len(self.faults)}: in step {done + 1}: {kind}: {after}")
        return self.faults[-1]

    def check(self) -> None:
        """Raises Wrong if a process is left, there is a traceback, or a step is missing or there twice."""
        self._job.check_none_left()
        if "Traceback" in self._job.output():
            raise Wrong(f"a traceback:\n{self._job.output(5000)}")
        found = steps(self._workdir)
        if found != list(range(1, len(found) + 1)):
            raise Wrong(f"the metrics have these steps: {found}")
        pids = {"trainer": [self._job.trainer()], "rollout worker": self._job.workers().values()}
        for name, ones in pids.items():
            self.memory[name] = max([self.memory[name], *(memory(one) for one in ones if one)])

    def conclude(self) -> int:
        """Ends the run by SIGTERM, continues it for two steps to its end; returns the number of all steps.

        Raises:
          Wrong: as `next`.
        """
        self._job.wait(self._job.trainer, START, "the trainer has started")
        self._end_driver(start=False)
        last = self._done() + 2
        self._start(last)
        self._job.ends(0, START)
        self.check()
        if self._done() != last:
            raise Wrong(f"the run has ended after {self._done()} steps of {last}")
        return last

    # ------------------------------------------------------------------------------- the faults

    def _kill_worker(self) -> bool:
        return self._signal_workers(1, signal.SIGKILL)

    def _kill_workers(self) -> bool:
        """The trainer generates until a worker is ready again."""
        return self._signal_workers(WORKERS, signal.SIGKILL)

    def _stop_worker(self) -> bool:
        """The run notices that the worker does not answer, and kills it."""
        return self._signal_workers(1, signal.SIGSTOP)

    def _signal_workers(self, count: int, number: int) -> bool:
        """Sends a signal to workers, after which their processes end."""
        ready = self._job.workers()
        if len(ready) < count:
            return False
        chosen = self._random.sample([*ready], count)
        for name in chosen:
            self._kept.pop(name, None)
            os.kill(ready[name], number)
        pids = {ready[name] for name in chosen}
        self._job.wait(
            lambda: not pids & {one.pid for one in processes()},
            SILENCE + BUSY,
            f"processes {pids} have ended",
        )
        return True

    def _slow_worker(self) -> bool:
        """A worker that answers late is not lost."""
        ready = self._job.workers()
        if not ready:
            return False
        name = self._random.choice([*ready])
        for _ in range(3):
            os.kill(ready[name], signal.SIGSTOP)
            time.sleep(self._random.uniform(2, 4))
            os.kill(ready[name], signal.SIGCONT)
            time.sleep(self._random.uniform(0.5, 1.5))
        return True

    def _kill_reward(self) -> bool:
        owners = [pid for pid in (self._job.trainer(), *self._job.workers().values()) if pid]
        found = [pid for owner in owners for pid in self._job.rewards(owner)]
        if not found:
            return False
        os.kill(self._random.choice(found), signal.SIGKILL)
        return True

    def _kill_trainer(self) -> bool:
        trainer = self._job.trainer()
        if trainer is None:
            return False
        os.kill(trainer, signal.SIGKILL)
        self._ended = self._job.ends(STOPPED, END + BUSY)
        self._start()
        return True

    def _kill_driver(self) -> bool:
        self._job.driver.kill()
        self._ended = self._job.ends(-signal.SIGKILL, END + BUSY)
        self._start()
        return True

    def _end_driver(self, start: bool = True) -> bool:
        """The run ends its step and saves it."""
        if self._job.trainer() is None:
            return False
        before = self._done()
        self._job.driver.terminate()
        self._job.ends(128 + signal.SIGTERM, START)
        self.check()
        if self._done() < before:
            raise Wrong("a stopped run has lost a step")
        if start:
            self._start()
        return True

    # ---------------------------------------------------------------------------------- helpers

    def _start(self, count: int = ENDLESS) -> None:
        self._left, self._kept = self._done(), {}
        self._job.start(f"--config.steps={count}")

    def _done(self) -> int:
        return len(steps(self._workdir))

    def _wait(self, count: int, begin: float = 0.0) -> float:
        """Waits for a step and for all workers; returns the seconds from `begin` until the workers were ready."""
        ready: list[float] = []

        def over() -> bool:
            if not ready and len(self._job.workers()) == WORKERS:
                ready.append(time.time() - begin)
            return bool(ready) and self._done() >= count

        self._job.wait(over, START, f"step {count} has ended and all workers are ready")
        now = self._job.workers()
        if lost := [name for name, pid in self._kept.items() if now.get(name) != pid]:
            raise Wrong(f"{lost} had no fault, but were lost:\n{self._job.output(3000)}")
        self._kept = now
        return ready[0]
