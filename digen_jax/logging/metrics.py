"""The record of a run: metrics.jsonl, the same numbers and the pictures for TensorBoard, optionally trackers.

metrics.jsonl is the record and the event file is made from it, so the two cannot disagree. A
checkpoint stores `MetricsLog.position()`; a resumed run calls `cut_back` with it and appends. Its
record then equals an uninterrupted run's, apart from the fields that `TIMING` names.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from digen_jax.errors import ConfigError
from digen_jax.files import append, parse_json, without_torn_line
from digen_jax.logging import event_file
from digen_jax.logging.tracking import Told, Tracker

if TYPE_CHECKING:  # launch/report.py reads metrics without JAX
    from digen_jax.config.sections import StoppingSection

TIMING = ("seconds/", "images_per_second", "utilisation", "queue_depth", "candidates")
CLOCK = "seconds/clock"
PICTURE = re.compile(
    r"([a-z_]+)_(\d{6})\.png"
)  # in `workdir`/pictures: name, and the step after which it was drawn


def without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without the fields that differ between equal runs: the prefixes in `TIMING`."""
    return {name: value for name, value in record.items() if not name.startswith(TIMING)}


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """What metrics.jsonl holds of each step, except for a last line that a killed process left unfinished.

    The evaluation of a step's version comes later than the step and has a line of its own: here they are one
    record, with the step's clock.

    Raises:
      ConfigError: names the file and the number of a line that holds no metrics.
    """
    records: list[dict[str, Any]] = []
    for line in _lines(path):
        if records and records[-1]["step"] == line["step"]:
            records[-1] = line | records[-1]
        else:
            records.append(line)
    return records


def has_fallen(values: Sequence[float], margin: float, evaluations: int) -> bool:
    """Whether each of the last `evaluations` values is more than `margin` below the best before them."""
    before, last = values[:-evaluations], values[-evaluations:]
    return bool(before) and all(value < max(before) - margin for value in last)


def reason_to_stop(asked: "StoppingSection", workdir: Path) -> str | None:
    """Why the run in a workdir ends early, by the evaluations in its metrics; None if it continues."""
    path = workdir / "metrics.jsonl"
    if not asked.reward or not path.exists():
        return None
    metric = f"evaluation/reward_of/{asked.reward}"
    found = [(line[metric], line["step"]) for line in read_metrics(path) if metric in line]
    if not has_fallen([value for value, _ in found], asked.margin, asked.evaluations):
        return None
    best, at = max(found[: -asked.evaluations], key=lambda one: one[0])
    value, step = found[-1]
    times = "evaluation" if asked.evaluations == 1 else f"{asked.evaluations} evaluations"
    return (
        f"stopped early: {metric} was {best:.4g} after step {at}, is {value:.4g} after step {step}, "
        f"and was more than config.stopping.margin = {asked.margin:g} below its best in the last {times}; "
        "to continue, set config.stopping.reward to ''"
    )


def _lines(path: Path | str) -> list[dict[str, Any]]:
    records = []
    lines = without_torn_line(Path(path).read_bytes()).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            # A line that replaces a lost one needs only these.
            float(record["step"]), float(record[CLOCK])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}, line {number} holds no metrics: bring back a copy of the file, or put "
                f'{{"step": {number - 1}, "{CLOCK}": 0}} there'
            ) from error
        records.append(record)
    return records


class MetricsLog:
    """Appends to `workdir`/metrics.jsonl and `workdir`/tensorboard, and tells trackers where asked for.

    Args:
      workdir: the run's folder; complete lines already in its metrics.jsonl are kept.
      trackers: by "wandb" or "trackio" the arguments of its `init` (project, name, ...). A resumed run continues
        the same run there, which ignores the steps that it already has.
      config: of the run; TensorBoard and the trackers show it.
    """

    def __init__(
        self,
        workdir: Path | str,
        trackers: Mapping[str, dict[str, Any]] | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        self.folder, self._config = Path(workdir), config
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "metrics.jsonl"
        self.path.touch()
        lines = _lines(self.path)
        seen = lines[-1]["step"] if lines else -1
        self._trackers = [
            Tracker(Told(kind, str(self.folder), options, config, seen))
            for kind, options in (trackers or {}).items()
        ]
        self.cut_back(len(lines))

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Writes a line `{"step", "seconds/clock", **values}`, which survives a kill.

        Raises:
          ValueError: a value is NaN or infinite, or a name is one that every line has anyway.
          OSError: the disk is full; nothing was written.
        """
        if taken := {"step", CLOCK} & values.keys():
            raise ValueError(f"metric {taken.pop()!r} needs another name: every line has that one")
        scalars = {name: float(value) for name, value in values.items()}
        for name, value in scalars.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} is {value} at step {step}: the run has gone wrong")
        events = self._event_file()
        line = {"step": step, CLOCK: time.time(), **scalars}
        size = self.path.stat().st_size
        append(self.path, json.dumps(line, allow_nan=False).encode() + b"\n")
        try:
            append(events, event_file.record(_event(line)))
        except OSError:
            os.truncate(self.path, size)
            raise
        self._position += 1
        for tracker in self._trackers:
            tracker.log(scalars, step)

    def picture(self, path: Path, step: int | None = None) -> None:
        """Shows `workdir`/pictures/NAME_000020.png as NAME at step 20; before that step's `write`.

        A file without a step in its name is shown at a given one, and not again after `cut_back`.
        """
        name, step = _picture(path) if step is None else (path.stem, step)
        append(self._event_file(), event_file.record(_picture_event(path, name, step)))
        for tracker in self._trackers:
            tracker.picture(f"pictures/{name}", path, step)

    def position(self) -> int:
        """The number of lines, flushed to the disk: a checkpoint stores it for `cut_back`."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return self._position

    def cut_back(self, position: int) -> None:
        """Removes every line after the first `position`, and its events.

        Args:
          position: `position()` when the checkpoint was saved; 0 to start over.

        Raises:
          ConfigError: there are fewer complete lines, so the file does not belong to the checkpoint.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)[:position]
        if sum(line.endswith(b"\n") for line in lines) < position:
            raise ConfigError(
                f"{self.path} has fewer than the {position} lines that the checkpoint counts on: "
                "bring the file back, or start again in another workdir"
            )
        os.truncate(self.path, sum(map(len, lines)))
        self._position = position
        # The next write makes a new event file from the lines.
        self._events: Path | None = None

    def _event_file(self) -> Path:
        """The event file; after `cut_back` a new one made from metrics.jsonl."""
        if self._events is None:
            lines = _lines(self.path)
            last = lines[-1]["step"] if lines else -1
            found = (self.folder / "pictures").glob("*.png")
            pictures = [p for p in sorted(found) if PICTURE.fullmatch(p.name)]
            events = [_config_event(self._config)] if self._config else []
            events += [_event(line) for line in lines]
            events += [_picture_event(p, *_picture(p)) for p in pictures if _picture(p)[1] <= last]
            self._events = event_file.replace_events(self.folder / "tensorboard", events)
        return self._events

    def close(self) -> None:
        """Ends the trackers' runs; the files are whole after every write."""
        for tracker in self._trackers:
            tracker.close()


def _event(line: Mapping[str, Any]) -> bytes:
    """A line of metrics.jsonl as an event: its clock and step, and every other field as a scalar."""
    scalars = {name: value for name, value in line.items() if name not in ("step", CLOCK)}
    return event_file.scalars_event(line[CLOCK], line["step"], scalars)


def _picture(path: Path) -> tuple[str, int]:
    """The name of a picture of a run, and the step after which it was drawn."""
    name, step = PICTURE.fullmatch(path.name).groups()
    return name, int(step)


def _picture_event(path: Path, name: str, step: int) -> bytes:
    return event_file.picture_event(
        path.stat().st_mtime, step, f"pictures/{name}", path.read_bytes()
    )


def _config_event(config: Mapping[str, Any]) -> bytes:
    # Four spaces mark a code block in TensorBoard's Markdown.
    lines = json.dumps(config, indent=2, default=str).splitlines()
    text = "\n".join(f"    {line}" for line in lines)
    return event_file.text_event(time.time(), 0, "config", text)
