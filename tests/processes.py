"""Processes that a test starts, and that are gone when it ends."""

import contextlib
import itertools
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.pipelines import ROOT, environment
from tests.scripts import is_alive

NUMBERS = itertools.count()  # of processes


class Begun:
    """A process of its own group; what it prints is read as it comes."""

    def __init__(
        self,
        module: str,
        folder: pathlib.Path,
        devices: int,
        before: Sequence[str] = (),
        arguments: Sequence[str] = (),
        **variables: str,
    ):
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []  # what was read of them
        number = next(NUMBERS)
        self.errors = folder / f"{module}.{number}.stderr"
        self._mark = f"BEGUN={os.getpid()}.{number}"
        always = dict([self._mark.split("=")], PYTHONPATH=str(ROOT))
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment(devices, **always | variables),
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def line(self, seconds: float = 60) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            with contextlib.suppress(queue.Empty):
                self.said.append(self.lines.get(timeout=0.5))
                return self.said[-1]
            if ended:
                break
        raise AssertionError(f"nothing was printed: {self.errors.read_text()}")

    def until(self, text: str, seconds: float = 240) -> str:
        """The next line that has a text."""
        end = time.monotonic() + seconds
        while text not in self.line(max(0.0, end - time.monotonic())):
            pass
        return self.said[-1]

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def ends(self, seconds: float) -> tuple[int, str]:
        """(exit code, stderr)."""
        return self.process.wait(seconds), self.errors.read_text()

    def leaves_nothing(self, seconds: float = 10) -> None:
        """What it has started, such as a reward's process, ends with it, or soon after."""
        end = time.monotonic() + seconds
        while left := [number for number in self.started() if is_alive(number)]:
            assert time.monotonic() < end, [*map(_command, left)]
            time.sleep(0.1)

    def started(self) -> Iterator[int]:
        """All processes with its mark, which what it starts inherits."""
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)


def _alive_in_group(group: int) -> list[str]:
    """The commands of a process group's members; those that have ended, and that nobody waits for, do not count."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, member_of = path.read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state != "Z":
                found.append(_command(int(path.parent.name)))
    return found


def _command(number: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@pytest.fixture
def begin(tmp_path):
    """Starts `python -m MODULE` with variables, `before` it a command, and arguments; at the end its group is gone."""
    begun: list[Begun] = []

    def one(module: str, devices: int = 1, before=(), arguments=(), **variables: str) -> Begun:
        begun.append(Begun(module, tmp_path, devices, before, arguments, **variables))
        return begun[-1]

    yield one
    for each in begun:
        with contextlib.suppress(ProcessLookupError):
            each.signal(signal.SIGKILL)
        each.process.wait(10)
        end = time.monotonic() + 60
        while alive := _alive_in_group(each.process.pid):
            assert time.monotonic() < end, alive
            time.sleep(0.1)
