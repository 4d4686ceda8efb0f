"""Sends the metrics and images of a run to trackers (wandb, trackio), each in a separate process.

Slow imports, network hangs and exceptions of a tracker cannot slow or stop the run, or print into its output. The
workdir has all metrics and images, including those that a tracker missed.
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
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

QUEUE_SIZE = 1000  # maximum queued messages; further ones are dropped
TIMEOUT = 60.0  # maximum seconds to wait for a tracker at the end of a run
PROCESS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from digen_jax.logging.tracking import main; main()"
)


class TrackerStart(NamedTuple):
    """First message to a tracker process.

    Attributes:
      kind: Name in `TRACKERS`.
      workdir: Folder of the run, which stores the tracker run id.
      options: Arguments of the tracker's `init`.
      config: Config of the run.
      last_step: Last step sent by earlier starts of the run. -1 means none.
    """

    kind: str
    workdir: str
    options: dict[str, Any]
    config: Mapping[str, Any] | None
    last_step: int


class Tracker:
    """Tracker in a subprocess. Failures are logged once and do not stop the run.

    Args:
      start: First message. The process output is appended to KIND.log in the workdir.
      timeout: Seconds that `close` waits for the process.
    """

    def __init__(self, start: TrackerStart, timeout: float = TIMEOUT):
        self._kind, self._timeout = start.kind, timeout
        self._log_file = Path(start.workdir, f"{start.kind}.log")
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_SIZE)
        self.warned, self._closing = False, False
        path = json.dumps([str(folder) for folder in sys.path])
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C only stops the run, which then closes the pipe
            )
        self._threads = [
            threading.Thread(target=work, name=start.kind, daemon=True)
            for work in (self._send_queued, self._watch)
        ]
        self._send(start._asdict())
        for thread in self._threads:
            thread.start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Sends metrics of a step."""
        self._send({"values": values, "step": step})

    def image(self, name: str, path: Path, step: int) -> None:
        """Sends a PNG file, which must not change afterwards."""
        self._send({"images": {name: str(path)}, "step": step})

    def close(self) -> None:
        """Waits until everything is sent, or kills the process after the timeout."""
        end = time.monotonic() + self._timeout
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._timeout)
        try:
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warn(f"was killed after {self._timeout:g} s; it may lack the last metrics")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._warn("does not keep up; it will lack some metrics")

    def _send_queued(self) -> None:
        """Writes queued messages to the process; drops them after a failure."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (message := self._queue.get()) is not None:
                pipe.write(json.dumps(message) + "\n")
                pipe.flush()
            return
        while self._queue.get() is not None:
            pass

    def _watch(self) -> None:
        """Waits for the process to exit or to report an error."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            error = pipe.readline().strip()
        code = self._process.wait()
        if error or code:
            rest = "" if self._closing else "; continuing without it"
            self._warn(f"failed{rest}: {error or f'exit code {code}'}")

    def _warn(self, text: str) -> None:
        if not self.warned:
            self.warned = True
            print(f"{self._kind} {text} (log: {self._log_file})", file=sys.stderr, flush=True)


class OpenRun(NamedTuple):
    """An open tracker run in the tracker process. Steps up to `last_step` are not sent again."""

    log: Callable[..., Any]
    image: Callable[[str], Any]
    finish: Callable[[], Any]
    last_step: int = -1


def _open_wandb(start: TrackerStart) -> OpenRun:
    """Starts or resumes a wandb run. wandb ignores steps that it already has."""
    import wandb

    run_id, _ = _run_id(start, uuid.uuid4().hex)
    config: Any = start.config and dict(start.config)
    run = wandb.init(config=config, dir=start.workdir, id=run_id, resume="allow", **start.options)
    return OpenRun(run.log, wandb.Image, run.finish)


def _open_trackio(start: TrackerStart) -> OpenRun:
    """Starts or resumes a trackio run."""
    import trackio

    options = dict(start.options)
    unique = f"{Path(start.workdir).resolve().name}-{uuid.uuid4().hex[:6]}"
    name, resumed = _run_id(start, options.pop("name", "") or unique)
    config, resume = start.config and dict(start.config), "allow" if resumed else "never"
    trackio.init(name=name, config=config, resume=resume, embed=False, **options)
    return OpenRun(trackio.log, trackio.Image, trackio.finish, start.last_step if resumed else -1)


TRACKERS: dict[str, Callable[[TrackerStart], OpenRun]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
}


def _run_id(start: TrackerStart, new: str) -> tuple[str, bool]:
    """Returns (tracker run id, stored in the workdir; whether the run is resumed)."""
    path = Path(start.workdir, f"{start.kind}_id.txt")
    if resumed := path.exists():
        return path.read_text().strip(), resumed
    path.write_text(new)
    return new, resumed


def main() -> None:
    """Forwards messages from standard input, one JSON object per line, to the tracker until EOF.

    Writes one line to standard output if the tracker fails. The tracker's own output goes to standard error.
    """
    errors = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cast(Any, sys.stdout).reconfigure(line_buffering=True)
    try:
        start = TrackerStart(**json.loads(sys.stdin.readline()))
        run = TRACKERS[start.kind](start)
        for line in sys.stdin:
            message = json.loads(line)
            if message["step"] > run.last_step:
                images = {n: run.image(path) for n, path in message.get("images", {}).items()}
                run.log(message.get("values", images), step=message["step"])
        run.finish()
    except BaseException as error:
        text = str(error).strip() or type(error).__name__
        print(text.splitlines()[0], file=errors, flush=True)
        raise
