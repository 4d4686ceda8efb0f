"""Injects random faults into a run with workers on Ray, and checks the run after each of them."""

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable

from benchmarks.job import AGENTS_END, STEP, Job, Unexpected, metric_lines, processes, steps
from digen_jax.logging.metrics import CLOCK
from digen_jax.process.shutdown import STOPPED

ROLLOUT_WORKERS, TRAINING_WORKERS = 2, 2  # one training worker is the trainer's process
WORKERS = ROLLOUT_WORKERS + TRAINING_WORKERS - 1  # in separate processes
ENDLESS = 10**6  # steps of a run that only a signal ends
START = 300.0  # timeout in seconds for a step that includes a start
# Seconds until a worker that does not answer counts as disconnected, and until all processes end after the trainer or
# the driver failed.
TIMEOUT, END = 8.0, 10.0
BUSY = 10.0  # additional seconds for a busy machine
OVERLAP = 0.25  # share of the faults after which the next one follows without waiting


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault and its consequences.

    Attributes:
      kind: Key of `FaultInjection.kinds`.
      continued: Seconds until the end of a step that started after the fault. None means no wait for it.
      recovered: Seconds until all workers were ready. None means no wait for it.
      ended: Seconds until all processes had ended. None means that the fault does not end the run at once.
    """

    kind: str
    continued: float | None
    recovered: float | None
    ended: float | None = None


class FaultInjection:
    """Injects faults into a run.

    Attributes:
      faults: Faults so far.
      kinds: Weight of each kind in random choices, and the method that injects it, which returns False if that is
        currently impossible.
    """

    def __init__(self, job: Job, seed: int):
        self.faults: list[Fault] = []
        self._job, self._random = job, random.Random(seed)
        self._ended: float | None = None
        self._left: int | None = None  # number of steps when the run ended
        self._kept: dict[str, int] = {}  # processes of workers without a fault
        self.kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "worker killed": (4, lambda: self._signal_workers(1, signal.SIGKILL)),
            # The trainer does all work until a worker is ready again.
            "all workers killed": (1, lambda: self._signal_workers(WORKERS, signal.SIGKILL)),
            # The run detects that the worker does not answer, and kills it.
            "worker stopped": (3, lambda: self._signal_workers(1, signal.SIGSTOP)),
            "worker slowed": (2, self._slow_worker),
            "reward process killed": (3, self._kill_reward),
            "trainer killed": (2, self._kill_trainer),
            "driver killed": (2, self._kill_driver),
            "SIGTERM to the driver": (2, self._end_driver),
        }

    def start(self) -> None:
        """Starts the run, and waits for its second step and all workers."""
        self._start()
        self._wait(2)

    def next(self) -> Fault:
        """Injects a fault after a random time, and checks the run. Each kind is used once before any is repeated.

        Raises:
          Unexpected: the fault had an unexpected consequence.
        """
        time.sleep(self._random.uniform(0, 4))
        overlaps = self._random.random() < OVERLAP
        seen = {fault.kind for fault in self.faults}
        kinds = {k: v for k, v in self.kinds.items() if k not in seen} or self.kinds
        (kind,) = self._random.choices([*kinds], [weight for weight, _ in kinds.values()])
        start, done = 0.0, 0

        def inject() -> bool:
            nonlocal start, done
            start, done, self._ended, self._left = time.time(), self._done(), None, None
            return kinds[kind][1]()

        self._job.wait(inject, START, kind)
        # The step after the current one, or the first step after a restart.
        count = done + 2 if self._left is None else self._left + 1
        continued = recovered = None
        if not overlaps:
            recovered = self._wait(count) - start
            found = [one for one in metric_lines(self._job.workdir) if STEP in one]
            continued = found[count - 1][CLOCK] - start
        self.check()
        self.faults.append(Fault(kind, continued, recovered, self._ended))
        after = "the next one follows" if overlaps else f"continued after {continued:.1f} s"
        print(f"{len(self.faults)}: in step {done + 1}: {kind}: {after}", flush=True)
        return self.faults[-1]

    def check(self) -> None:
        """Raises Unexpected if a process is left, there is a traceback, or a step is missing or duplicated."""
        self._job.check_none_left(END)
        if "Traceback" in self._job.output():
            raise Unexpected(f"a traceback:\n{self._job.output(5000)}")
        found = steps(self._job.workdir)
        if found != list(range(1, len(found) + 1)):
            raise Unexpected(f"the metrics have these steps: {found}")

    def finish(self) -> int:
        """Ends the run by SIGTERM, and continues it for two steps to its end; returns the total number of steps.

        Raises:
          Unexpected: SIGTERM had an unexpected consequence.
        """
        self._job.wait(lambda: self._end_driver(start=False), START, "the trainer has started")
        last = self._done() + 2
        self._start(last)
        self._job.wait_for_end(0, START)
        self.check()
        if self._done() != last:
            raise Unexpected(f"the run has ended after {self._done()} steps of {last}")
        self._job.check_none_left(AGENTS_END, agents=True)
        return last

    def _signal_workers(self, count: int, number: int) -> bool:
        """Sends a signal to workers and waits until their processes end."""
        ready = self._job.workers()
        if len(ready) < count:
            return False
        chosen = self._random.sample([*ready], count)
        for name in chosen:
            self._kept.pop(name, None)
            os.kill(ready[name], number)
        pids = {ready[name] for name in chosen}
        self._job.wait(
            lambda: not pids & {one.pid for one in processes()}, TIMEOUT + BUSY, "workers ended"
        )
        return True

    def _slow_worker(self) -> bool:
        """Pauses a worker, which answers late but stays connected."""
        ready = self._job.workers()
        if ready:
            pid = self._random.choice([*ready.values()])
            for _ in range(3):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._random.uniform(2, 4))
                os.kill(pid, signal.SIGCONT)
                time.sleep(self._random.uniform(0.5, 1.5))
        return bool(ready)

    def _kill_reward(self) -> bool:
        owners = [pid for pid in (self._job.trainer(), *self._job.workers().values()) if pid]
        found = [pid for owner in owners for pid in self._job.rewards(owner)]
        if found:
            os.kill(self._random.choice(found), signal.SIGKILL)
        return bool(found)

    def _kill_trainer(self) -> bool:
        trainer = self._job.trainer()
        if trainer is not None:
            os.kill(trainer, signal.SIGKILL)
            self._ended = self._job.wait_for_end(STOPPED, END + BUSY)
            self._start()
        return trainer is not None

    def _kill_driver(self) -> bool:
        self._job.driver.kill()
        self._ended = self._job.wait_for_end(-signal.SIGKILL, END + BUSY)
        self._start()
        return True

    def _end_driver(self, start: bool = True) -> bool:
        """Ends the driver by SIGTERM, which finishes and saves its step."""
        if self._job.trainer() is None:
            return False
        self._job.driver.terminate()
        self._job.wait_for_end(128 + signal.SIGTERM, START)
        self.check()
        if start:
            self._start()
        return True

    def _start(self, count: int = ENDLESS) -> None:
        self._left, self._kept = self._done(), {}
        self._job.start(f"--config.steps={count}")

    def _done(self) -> int:
        return len(steps(self._job.workdir))

    def _wait(self, count: int) -> float:
        """Waits for a step and for all workers; returns the time at which the workers were ready."""
        ready: list[float] = []

        def over() -> bool:
            if not ready and len(self._job.workers()) == WORKERS:
                ready.append(time.time())
            return bool(ready) and self._done() >= count

        self._job.wait(over, START, f"step {count} has ended and all workers are ready")
        now = self._job.workers()
        if lost := [name for name, pid in self._kept.items() if now.get(name) != pid]:
            raise Unexpected(f"{lost} had no fault, but disconnected:\n{self._job.output(3000)}")
        self._kept = now
        return ready[0]
