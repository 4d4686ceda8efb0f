"""The numbers of a run: metrics.jsonl, the same for TensorBoard, optionally wandb, a progress bar.

metrics.jsonl is the record and the event file is made from it, so the two cannot disagree. A
checkpoint stores `MetricsLog.position()`; a resumed run calls `cut_back` with it and writes on, and
its record is then an unbroken run's, apart from the fields that `TIMING` names.
"""

import importlib.util
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from tqdm import tqdm

from digen_jax import event_file
from digen_jax.settings import ConfigError

TIMING = ("seconds/", "images_per_second", "utilisation", "queue_depth", "candidates")
CLOCK = "seconds/clock"


def without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without what differs between equal runs: the prefixes in `TIMING`."""
    return {name: value for name, value in record.items() if not name.startswith(TIMING)}


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Reads metrics.jsonl, except for a last line that a killed process left unfinished.

    Raises:
      ValueError: names the file and the number of a line that is not JSON.
    """
    records = []
    for number, line in enumerate(Path(path).read_text().splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): remove it") from error
    return records


class MetricsLog:
    """Appends to `workdir`/metrics.jsonl, `workdir`/tensorboard and, where asked for, a wandb run.

    Args:
      workdir: the run's folder; whole lines already in its metrics.jsonl are kept.
      wandb: arguments of `wandb.init` (project, name, ...), or None for no wandb. A resumed run
        goes on in the same wandb run, which ignores the steps that it already has.

    Raises:
      ConfigError: wandb is asked for and not installed.
    """

    def __init__(self, workdir: Path | str, wandb: dict[str, Any] | None = None):
        self.folder = Path(workdir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "metrics.jsonl"
        self.path.touch()
        self._wandb = None if wandb is None else _start_wandb(self.folder, wandb)
        self.cut_back(len(read_metrics(self.path)))

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Writes a line `{"step", "seconds/clock", **values}`; what is written survives a kill.

        Raises:
          ValueError: a value is NaN or infinite, or a name is one that every line already has.
        """
        if taken := {"step", CLOCK} & values.keys():
            raise ValueError(f"metric {taken.pop()!r} needs another name: every line has that one")
        scalars = {name: float(value) for name, value in values.items()}
        for name, value in scalars.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} is {value} at step {step}: the run has gone wrong")
        if self._events is None:
            self._events = event_file.replace_events(
                self.folder / "tensorboard", [_event(line) for line in read_metrics(self.path)]
            )
        line = {"step": step, CLOCK: time.time(), **scalars}
        _append(self.path, json.dumps(line, allow_nan=False).encode() + b"\n")
        _append(self._events, event_file.record(_event(line)))
        self._position += 1
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def position(self) -> int:
        """The number of lines, now safe on the disk: a checkpoint stores it for `cut_back`."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return self._position

    def cut_back(self, position: int) -> None:
        """Removes every line after the first `position`, and its events.

        Args:
          position: what `position()` was when the checkpoint was taken; 0 to begin afresh.

        Raises:
          ValueError: there are fewer whole lines than that, so the file is not the checkpoint's.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)[:position]
        if sum(line.endswith(b"\n") for line in lines) < position:
            raise ValueError(
                f"{self.path} has fewer than the {position} lines that the checkpoint counts on: "
                "bring the file back, or start again in another workdir"
            )
        os.truncate(self.path, sum(map(len, lines)))
        self._position = position
        # The event file is made anew from the lines at the next write.
        self._events: Path | None = None

    def close(self) -> None:
        """Ends the wandb run; the files are whole after every write."""
        if self._wandb is not None:
            self._wandb.finish()


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _event(line: Mapping[str, Any]) -> bytes:
    """A line of metrics.jsonl as an event: its clock and step, everything else a scalar."""
    scalars = {name: value for name, value in line.items() if name not in ("step", CLOCK)}
    return event_file.scalars_event(line[CLOCK], line["step"], scalars)


def _start_wandb(workdir: Path, options: dict[str, Any]) -> Any:
    """A wandb run whose id is kept in the workdir, so that a resumed run continues it."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "wandb is asked for but not installed: pip install wandb, or switch it off"
        )
    import wandb

    identity = workdir / "wandb_id.txt"
    if not identity.exists():
        identity.write_text(uuid.uuid4().hex)
    return wandb.init(dir=str(workdir), id=identity.read_text(), resume="allow", **options)


class Progress:
    """A progress bar with reward, images/s and time left; plain lines where nobody watches.

    Args:
      total: steps of the whole run.
      done: steps done before this process began.
      every: steps from one plain line to the next, where stderr is not a terminal.
    """

    def __init__(self, total: int, done: int = 0, every: int = 10):
        self._total, self._every = total, every
        self._first: tuple[int, float] | None = None
        self._bar = tqdm(
            total=total,
            initial=done,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% |{bar}| step {n_fmt} of {total_fmt}{postfix}",
        )

    def update(
        self,
        step: int,
        reward: SupportsFloat,
        images_per_second: SupportsFloat,
        utilisation: SupportsFloat,
    ) -> None:
        """Shows that `step` steps are done, with reward, speed and utilisation (to 1) of the last one."""
        now = time.monotonic()
        # The first step is compilation for the most part and says nothing about the others.
        self._first = self._first or (step, now)
        speed = f"{float(images_per_second):.1f} images/s, {float(utilisation):.0%} busy"
        numbers = f"reward {float(reward):.3f}, {speed}"
        if step > self._first[0]:
            seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
            numbers += f", {tqdm.format_interval(seconds)} left"
        if not self._bar.disable:
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._every == 0 or step in (self._first[0], self._total):
            print(f"step {step} of {self._total}: {numbers}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Writes a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        self._bar.close()
