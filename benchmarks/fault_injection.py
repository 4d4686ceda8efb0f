"""Injects random faults into a run of `launch/train.py` on Ray, and checks it after each of them; Linux only.

With --ray=local the command's process is the driver, which starts Ray. Ray starts the trainer's process and the
rollout workers.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from digen_jax.logging.metrics import CLOCK
from digen_jax.logging.status import FILE
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
STEP = "images_per_second"  # a metric that only a step's line has
POLL = 0.1  # seconds between two checks
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
# Ray's own processes that end up to a minute after a killed driver, because they first try to reach Ray: its agents,
# and processes that were starting and run no worker yet.
AGENTS = b"ray::DashboardAgent", b"ray::RuntimeEnvAgent", b"ray/_private/workers/default_worker.py"
AGENTS_END = 90.0  # timeout in seconds for their end
REWARDS = b"digen_jax.rewards.pool"  # on the command line of a process that scores


class Unexpected(RuntimeError):
    """An unexpected consequence of a fault, with the end of the run's output."""


class ProcessInfo(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    command: bytes


class Job:
    """A run, which can be restarted.

    A process whose parent has ended becomes a child of this process, so that orphaned processes are found.

    Args:
      command: Python file and its options, or -m and a module.
      workdir: Workdir of the run. The output of each start is a file next to it.
      environment: Additional variables of all processes.
    """

    def __init__(
        self, command: Sequence[str], workdir: pathlib.Path, environment: Mapping[str, str]
    ):
        _adopt(True)
        self.workdir, self.starts = workdir, 0
        self._command = [sys.executable, *command, f"--workdir={workdir}"]
        self._environment = {"PYTHONUNBUFFERED": "1", **os.environ, **environment}
        self._others = {one.pid for one in processes() if one.parent == os.getpid()}

    def start(self, *options: str) -> None:
        """Starts the command."""
        self._log = self.workdir.with_name(f"{self.workdir.name}.{self.starts:03d}.txt")
        self.starts += 1
        with self._log.open("w") as out:
            self.driver = subprocess.Popen(
                [*self._command, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def output(self, characters: int = 0) -> str:
        """Returns the last `characters` of the output since the last start; 0 means all of it."""
        return self._log.read_text(errors="replace")[-characters:]

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Waits for a condition.

        Raises:
          Unexpected: it does not become true in time, or the driver ends first.
        """
        end = time.monotonic() + seconds
        while not condition():
            code = self.driver.poll()
            if (code is not None and not condition()) or time.monotonic() > end:
                late = f"not within {seconds:g} s" if code is None else f"ended with {code} before"
                raise Unexpected(f"{late}: {what}:\n{self.output(3000)}")
            time.sleep(POLL)

    def wait_for_end(self, code: int, seconds: float) -> float:
        """Waits until the driver and all other processes have ended; returns the seconds.

        Raises:
          Unexpected: they have not ended in time, or the driver's exit code is another one.
        """
        start = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            self.driver.wait(seconds)
        if (found := self.driver.poll()) != code:
            raise Unexpected(f"the driver's exit code is {found}, not {code}:\n{self.output(3000)}")
        self.check_none_left(start + seconds - time.monotonic())
        return time.monotonic() - start

    def trainer(self) -> int | None:
        """Returns the trainer's process id. None means that it has not started the run."""
        pid = self._status().get("process")
        return pid if pid in self._started() else None

    def workers(self) -> dict[str, int]:
        """Returns the process ids of the ready rollout workers, by name."""
        trainer, started = self.trainer(), self._started()
        return {
            name: one["process"]
            for name, one in sorted(self._status().get("workers", {}).items())
            if trainer and one["lost"] is None and one["process"] in started - {trainer}
        }

    def rewards(self, of: int) -> list[int]:
        """Returns the ids of the reward processes of a process."""
        return [one.pid for one in processes() if one.parent == of and REWARDS in one.command]

    def left(self, agents: bool = True) -> list[ProcessInfo]:
        """Returns the processes whose parents have ended, with or without `AGENTS`."""
        running = {self.driver.pid} if self.driver.poll() is None else set()
        known = running | self._others
        found = [one for one in processes() if one.parent == os.getpid() and one.pid not in known]
        return [one for one in found if agents or not any(name in one.command for name in AGENTS)]

    def check_none_left(self, seconds: float, agents: bool = False) -> None:
        """Waits until `left` returns no process; raises Unexpected after `seconds`."""
        end = time.monotonic() + seconds
        while found := self.left(agents):
            if time.monotonic() > end:
                raise Unexpected(f"processes are left: {found}")
            time.sleep(POLL)

    def close(self) -> None:
        """Kills all processes."""
        while self.starts and (found := self._started() | {one.pid for one in self.left()}):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _adopt(False)

    def _started(self) -> set[int]:
        """Returns the ids of the driver and all processes that it started."""
        found, every = set(), processes()
        new = {self.driver.pid} if self.driver.poll() is None else set()
        while new:
            found |= new
            new = {one.pid for one in every if one.parent in new}
        return found

    def _status(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return json.loads((self.workdir / FILE).read_text())
        return {}


def _adopt(orphans: bool) -> None:
    """Sets whether descendants become children of this process when their parents end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def processes() -> list[ProcessInfo]:
    """Returns all running processes of this machine."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ")[:300]
            if state not in "ZX":
                found.append(ProcessInfo(int(path.name), int(parent), command))
    return found


def metric_lines(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a run's metrics, in order."""
    file = workdir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps that have a line in a run's metrics, in order."""
    return [line["step"] for line in metric_lines(workdir) if STEP in line]


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
