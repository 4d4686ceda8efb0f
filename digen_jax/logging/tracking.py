"""Sends a run's metrics to trackers (wandb, trackio), in addition to its records.

Each tracker has a process of its own, so that nothing of it can slow, stop or print into the run: not its import, nor
a network that hangs, nor an exception. What it is not told, or does not send, is in the workdir's own files.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from digen_jax.logging.tracking_process import Told

WAITING = 1000  # messages that wait for a tracker; what comes then is left out
PATIENCE = 60.0  # seconds that the end of a run waits for a tracker
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from digen_jax.logging.tracking_process import main; main()"
)


class Tracker:
    """A tracker's process. A failing, hanging or slow tracker is logged once and does not stop the run.

    Args:
      told: what it is started with; its output is appended to KIND.log in the workdir.
      patience: seconds that `close` waits for it.
    """

    def __init__(self, told: Told, patience: float = PATIENCE):
        self._kind, self._patience = told.kind, patience
        self._log = Path(told.workdir, f"{told.kind}.log")
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._said, self._over = False, False
        path = json.dumps([str(folder) for folder in sys.path])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run, which then ends the input
            )
        self._threads = [
            threading.Thread(target=work, name=told.kind, daemon=True)
            for work in (self._write, self._read)
        ]
        self._tell(told._asdict())
        for thread in self._threads:
            thread.start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Tells numbers of a step."""
        self._tell({"values": values, "step": step})

    def picture(self, name: str, path: Path, step: int) -> None:
        """Shows a PNG file, which stays as it is."""
        self._tell({"name": name, "path": str(path), "step": step})

    def close(self) -> None:
        """Waits until all was sent, but no longer than the patience; then the process is killed."""
        end = time.monotonic() + self._patience
        self._over = True
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=self._patience)
        try:
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say(
                f"has not ended within {self._patience:g} seconds and was killed: it may lack the last numbers"
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._say("does not keep up: it will lack some numbers")

    def _write(self) -> None:
        """Sends the messages; after a failure they are dropped."""
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (message := self._waiting.get()) is not None:
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()
            return
        while self._waiting.get() is not None:
            pass

    def _read(self) -> None:
        """Waits for the end of the process, or for its sentence on what has failed."""
        with self._process.stdout as pipe:
            sentence = pipe.readline().strip()
        code = self._process.wait()
        if sentence or code:
            rest = "" if self._over else ", and the run continues without it"
            self._say(f"does not work{rest}: {sentence or f'exit code {code}'}")

    def _say(self, what: str) -> None:
        if not self._said:
            self._said = True
            print(f"{self._kind} {what} ({self._log})", file=sys.stderr, flush=True)
