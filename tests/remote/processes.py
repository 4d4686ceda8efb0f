"""Processes that a test starts, and that are gone when it ends."""

import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading

import pytest

from tests.pipelines import ROOT, environment
from tests.remote.mesh_process import TOKEN


class Begun:
    """A process of its own group; what it prints is read as it comes."""

    def __init__(
        self,
        module: str,
        folder: pathlib.Path,
        devices: int,
        before: tuple[str, ...] = (),
        **variables: str,
    ):
        self.lines: queue.Queue[str] = queue.Queue()
        self.errors = folder / f"{module}.{len(list(folder.iterdir()))}.stderr"
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module],
            cwd=ROOT,
            env=environment(devices, PYTHONPATH=str(ROOT), DIGEN_JAX_TOKEN=TOKEN, **variables),
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
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"nothing was printed: {self.errors.read_text()}") from None

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def ends(self, seconds: float) -> tuple[int, str]:
        """(exit code, stderr)."""
        return self.process.wait(seconds), self.errors.read_text()


@pytest.fixture
def begin(tmp_path):
    """Starts `python -m MODULE` with variables, `before` it a command; at the end no process of its group is left."""
    begun: list[Begun] = []

    def one(module: str, devices: int = 1, before: tuple[str, ...] = (), **variables: str) -> Begun:
        begun.append(Begun(module, tmp_path, devices, before, **variables))
        return begun[-1]

    yield one
    for each in begun:
        with contextlib.suppress(ProcessLookupError):
            each.signal(signal.SIGKILL)
        each.process.wait(10)
        with pytest.raises(ProcessLookupError):
            os.killpg(each.process.pid, 0)
