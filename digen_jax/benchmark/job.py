"""A run by `launch/train.py --ray=local`, and all processes that it has started; Linux only.

The command's own process is the driver, which starts Ray, which starts the trainer's process and the rollout workers.
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

from digen_jax.records.status import FILE

LOOK = 0.1  # seconds between two looks
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
REWARDS = b"digen_jax.rewards.process"  # on the command line of a process that scores


class Wrong(RuntimeError):
    """A consequence of a fault that it must not have, with the output of the run."""


class Process(NamedTuple):
    """A process that has not ended."""

    pid: int
    parent: int
    command: bytes


class Job:
    """A run, which can be started again.

    A process whose parent has ended becomes a child of this process, which is how processes that are left are found.

    Args:
      command: a Python file and its options, or -m and a module.
      workdir: the run's folder.
      logs: the folder for the output of each start.
      environment: variables of all processes in addition.
    """

    def __init__(
        self,
        command: Sequence[str],
        workdir: pathlib.Path,
        logs: pathlib.Path,
        environment: Mapping[str, str] | None = None,
    ):
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
        self.starts = 0
        self._command, self._workdir, self._logs = command, workdir, logs
        self._environment = {"PYTHONUNBUFFERED": "1"} | os.environ | (environment or {})
        self._others = {one.pid for one in processes() if one.parent == os.getpid()}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, *options: str) -> None:
        """Starts the command."""
        self.log = self._logs / f"{self.starts:03d}.txt"
        self.starts += 1
        with self.log.open("w") as out:
            self.driver = subprocess.Popen(
                [sys.executable, *self._command, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def output(self, characters: int = 0) -> str:
        """The end of the output since the last start; all of it by default."""
        return self.log.read_text(errors="replace")[-characters:]

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """Waits for a condition; returns the seconds.

        Raises:
          Wrong: it does not become true in time, or the driver ends before.
        """
        begin = time.monotonic()
        while not condition():
            code = self.driver.poll()
            if code is not None and not condition():
                raise Wrong(f"the driver ended with {code} before {what}:\n{self.output(3000)}")
            if time.monotonic() - begin > seconds:
                raise Wrong(f"not within {seconds:g} s: {what}:\n{self.output(3000)}")
            time.sleep(LOOK)
        return time.monotonic() - begin

    def ends(self, code: int, seconds: float) -> float:
        """Waits until the driver and all other processes have ended; returns the seconds.

        Raises:
          Wrong: they have not in time, or the driver ends with another exit code.
        """
        begin = time.monotonic()
        try:
            found = self.driver.wait(seconds)
        except subprocess.TimeoutExpired:
            found = None
        if found != code:
            raise Wrong(f"the driver's exit code is {found}, not {code}:\n{self.output(3000)}")
        self.check_none_left(max(LOOK, begin + seconds - time.monotonic()))
        return time.monotonic() - begin

    # ------------------------------------------------------------------------------ processes

    def trainer(self) -> int | None:
        """The trainer's process; None if it has not begun the run."""
        pid = self._status().get("process")
        return pid if pid in self._started() else None

    def workers(self) -> dict[str, int]:
        """The processes of the rollout workers that are ready, by name."""
        trainer, started = self.trainer(), self._started()
        return {
            name: one["process"]
            for name, one in sorted(self._status().get("workers", {}).items())
            if trainer and one["lost"] is None and one["process"] in started.keys() - {trainer}
        }

    def rewards(self, of: int) -> list[int]:
        """The processes that score for a process."""
        return [one.pid for one in processes() if one.parent == of and REWARDS in one.command]

    def left(self) -> list[Process]:
        """Processes whose parents have ended."""
        with suppress(ChildProcessError):
            for one in processes(ended=True):
                if one.parent == os.getpid() and one.pid not in {self.driver.pid, *self._others}:
                    os.waitpid(one.pid, os.WNOHANG)
        running = {self.driver.pid} if self.driver.poll() is None else set()
        known = running | self._others
        return [one for one in processes() if one.parent == os.getpid() and one.pid not in known]

    def check_none_left(self, seconds: float = 10.0) -> None:
        """Waits until no process is left.

        Raises:
          Wrong: there still are some.
        """
        until = time.monotonic() + seconds
        while found := self.left():
            if time.monotonic() > until:
                raise Wrong(f"processes are left: {found}")
            time.sleep(LOOK)

    def close(self) -> None:
        """Kills all processes."""
        while self.starts and (found := [*self._started(), *(one.pid for one in self.left())]):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.driver.poll()

    def _started(self) -> dict[int, Process]:
        """The driver and all processes below it."""
        found, every = {}, processes()
        parents = {self.driver.pid} if self.driver.poll() is None else set()
        while parents:
            found |= {one.pid: one for one in every if one.pid in parents}
            parents = {one.pid for one in every if one.parent in parents}
        return found

    def _status(self) -> dict[str, Any]:
        try:
            return json.loads((self._workdir / FILE).read_text())
        except FileNotFoundError:
            return {}


def processes(ended: bool = False) -> list[Process]:
    """All processes of this machine; with `ended`, those that have ended and were not waited for."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ends meanwhile
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if (state in "ZX") == ended:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ")[:300]
                found.append(Process(int(path.name), int(parent), command))
    return found


def memory(pid: int) -> int:
    """Bytes of a process that are in memory; 0 if it has ended."""
    with suppress(OSError):
        pages = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
