"""A run of `launch/train.py` with all its processes; Linux only.

With --ray=local the command's process is the driver, which starts Ray. Ray starts the trainer's process and the
rollout workers.
"""

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from digen_jax.logging.status import FILE

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
