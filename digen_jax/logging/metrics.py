"""Writes the metrics of a run to metrics.jsonl, TensorBoard and trackers.

metrics.jsonl is the source of truth; the event file is built from it. A checkpoint stores `MetricsLog.position()`. A
resumed run calls `truncate` with it and appends; its metrics then equal those of an uninterrupted run, except for the
fields in `TIMING`.
"""

import json
import math
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from digen_jax.errors import ConfigError
from digen_jax.files import append, read_lines, replace

if TYPE_CHECKING:  # launch/report.py reads metrics without JAX
    from digen_jax.config.sections import StoppingSection
    from digen_jax.logging.tracking import Tracker

# tensorboardX imports torch if it is installed, which is not needed and takes seconds.
_hides_torch = cast(dict, sys.modules).setdefault("torch", None) is None
try:
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c
    from tensorboardX.summary import text
finally:
    if _hides_torch:
        del sys.modules["torch"]

# "images_per_second" also matches images_per_second_per_device.
TIMING = (
    "seconds/", "images_per_second", "flops_per_second", "mfu", "utilisation", "queue_depth", "candidates"
)  # fmt: skip
CLOCK = "seconds/clock"
IMAGE_FILE = re.compile(r"([a-z_]+)_(\d{6,})\.png")  # in `image_folder`: name and step
PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by color type


def without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics without nondeterministic fields: the prefixes in `TIMING`."""
    return {name: value for name, value in record.items() if not name.startswith(TIMING)}


def image_folder(workdir: Path) -> Path:
    """Returns the folder of a run's images; earlier versions named it `pictures`."""
    old = workdir / "pictures"
    return old if old.is_dir() else workdir / "images"


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Reads metrics.jsonl, one record per step, without an incomplete last line.

    An evaluation has a separate line, which is merged into the record of its step; the step's clock is kept.

    Raises:
      ConfigError: A line is not a metrics record; names the file and the line.
    """
    records: list[dict[str, Any]] = []
    for line in _lines(path):
        if records and records[-1]["step"] == line["step"]:
            records[-1] = line | records[-1]
        else:
            records.append(line)
    return records


def has_fallen(values: Sequence[float], margin: float, evaluations: int) -> bool:
    """Returns whether the last `evaluations` values are all more than `margin` below the best earlier value."""
    before, last = values[:-evaluations], values[-evaluations:]
    return bool(before) and all(value < max(before) - margin for value in last)


def reason_to_stop(stopping: "StoppingSection", workdir: Path) -> str | None:
    """Returns the early-stopping reason from the evaluations in a workdir, or None to continue."""
    path = workdir / "metrics.jsonl"
    if not stopping.reward or not path.exists():
        return None
    metric = f"evaluation/reward_of/{stopping.reward}"
    found = [(line[metric], line["step"]) for line in read_metrics(path) if metric in line]
    if not has_fallen([value for value, _ in found], stopping.margin, stopping.evaluations):
        return None
    best, best_step = max(found[: -stopping.evaluations], key=lambda one: one[0])
    value, step = found[-1]
    times = "evaluation" if stopping.evaluations == 1 else f"{stopping.evaluations} evaluations"
    return (
        f"stopped early: {metric} was {best:.4g} after step {best_step}, is {value:.4g} after step {step}, "
        f"and was more than config.stopping.margin = {stopping.margin:g} below its best in the last {times}; "
        "to continue, set config.stopping.reward to ''"
    )


def _lines(path: Path | str) -> list[dict[str, Any]]:
    def check(line: Any) -> dict[str, Any]:
        float(line["step"]), float(line[CLOCK])
        return line

    fields = f'{{"step": STEP, "{CLOCK}": 0}}'
    problem = f"has no metrics: restore the file, or replace the line by {fields}"
    return read_lines(path, check, problem)


class MetricsLog:
    """Appends to `workdir`/metrics.jsonl and `workdir`/tensorboard, and sends the same values to trackers.

    Args:
      workdir: Folder of the run. Complete lines of an existing metrics.jsonl are kept.
      trackers: Arguments of `init` (project, name, ...) by tracker, "wandb" or "trackio". A resumed run continues the
        same tracker run; steps that the tracker already has are ignored.
      config: Config of the run, for TensorBoard and the trackers.
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
        last = lines[-1]["step"] if lines else -1
        self._trackers: list[Tracker] = []
        if trackers:
            from digen_jax.logging import tracking  # few runs have one

            self._trackers = [
                tracking.Tracker(
                    tracking.TrackerStart(kind, str(self.folder), options, config, last)
                )
                for kind, options in trackers.items()
            ]
        self.truncate(len(lines))

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Durably writes a line `{"step", "seconds/clock", **values}`.

        Raises:
          ValueError: A value is NaN or infinite, or a name is reserved.
          OSError: The disk is full; nothing was written.
        """
        if reserved := {"step", CLOCK} & values.keys():
            raise ValueError(
                f"metric {reserved.pop()!r} needs another name: every line has that one"
            )
        scalars = {name: float(value) for name, value in values.items()}
        for name, value in scalars.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} is {value} at step {step}: the run has diverged")
        events = self._event_file()
        line = {"step": step, CLOCK: time.time(), **scalars}
        size = self.path.stat().st_size
        append(self.path, json.dumps(line, allow_nan=False).encode() + b"\n")
        try:
            append(events, _scalars(line))
        except OSError:
            os.truncate(self.path, size)
            raise
        self._position += 1
        for tracker in self._trackers:
            tracker.log(scalars, step)

    def image(self, path: Path, step: int | None = None) -> None:
        """Logs `workdir`/images/NAME_000020.png as NAME at step 20. Must be called before `write` of that step.

        A file without a step in its name needs `step`, and is not logged again after `truncate`.
        """
        name, step = _image_name(path) if step is None else (path.stem, step)
        append(self._event_file(), _image(path, name, step))
        for tracker in self._trackers:
            tracker.image(f"images/{name}", path, step)

    def position(self) -> int:
        """Flushes to disk and returns the number of lines, which a checkpoint stores for `truncate`."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return self._position

    def truncate(self, position: int) -> None:
        """Removes all lines after the first `position`, and their events.

        Args:
          position: `position()` at the time of the checkpoint; 0 to start over.

        Raises:
          ConfigError: The file has fewer complete lines, so it does not belong to the checkpoint.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)[:position]
        if sum(line.endswith(b"\n") for line in lines) < position:
            raise ConfigError(
                f"{self.path} has fewer than the {position} lines that the checkpoint counts on: "
                "restore the file, or start again in another workdir"
            )
        os.truncate(self.path, sum(map(len, lines)))
        self._position = position
        self._events: Path | None = None  # rebuilt from the lines by the next write

    def close(self) -> None:
        """Closes the trackers. The files are complete after every write."""
        for tracker in self._trackers:
            tracker.close()

    def _event_file(self) -> Path:
        """Returns TensorBoard's event file; rebuilds it from metrics.jsonl after `truncate`, replacing older ones."""
        if self._events is not None:
            return self._events
        folder, now = self.folder / "tensorboard", time.time()
        folder.mkdir(parents=True, exist_ok=True)
        lines = _lines(self.path)
        last = lines[-1]["step"] if lines else -1
        files = sorted(image_folder(self.folder).glob("*.png"))
        images = [(path, *_image_name(path)) for path in files if IMAGE_FILE.fullmatch(path.name)]
        # A running TensorBoard discards its data when a session starts at step 0.
        records = [
            _record(wall_time=now, file_version="brain.Event:2"),
            _record(wall_time=now, session_log=SessionLog(status=SessionLog.START)),
            *([_config_text(self._config)] if self._config else []),
            *map(_scalars, lines),
            *(_image(path, name, step) for path, name, step in images if step <= last),
        ]
        events = folder / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}"
        replace(events, b"".join(records))
        for old in set(folder.glob("events.out.tfevents.*")) - {events}:
            # A running TensorBoard moves on from an empty file, but not from a deleted one.
            if old.stat().st_size:
                os.truncate(old, 0)
            else:
                old.unlink()
        self._events = events
        return events


def _image_name(path: Path) -> tuple[str, int]:
    """Returns the name and the step of an image file."""
    name, step = cast(re.Match, IMAGE_FILE.fullmatch(path.name)).groups()
    return name, int(step)


def _record(**fields: Any) -> bytes:
    """Serializes an `Event` as a TFRecord, the format of event files."""
    event = Event(**fields).SerializeToString()
    length = struct.pack("<Q", len(event))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, event)]
    return length + checksums[0] + event + checksums[1]


def _scalars(line: Mapping[str, Any]) -> bytes:
    """Returns the event of a line of metrics.jsonl."""
    values = [
        Summary.Value(tag=name, simple_value=value)
        for name, value in line.items()
        if name not in ("step", CLOCK)
    ]
    return _record(wall_time=line[CLOCK], step=line["step"], summary=Summary(value=values))


def _image(path: Path, name: str, step: int) -> bytes:
    png = path.read_bytes()
    width, height, _, color_type = struct.unpack(">IIBB", png[16:26])  # the header chunk
    sizes = dict(height=height, width=width, colorspace=PNG_CHANNELS[color_type])
    image = Summary.Image(encoded_image_string=png, **sizes)
    value = Summary.Value(tag=f"images/{name}", image=image)
    return _record(wall_time=path.stat().st_mtime, step=step, summary=Summary(value=[value]))


def _config_text(config: Mapping[str, Any]) -> bytes:
    # Four spaces mark a code block in TensorBoard's Markdown.
    lines = json.dumps(config, indent=2, default=str).splitlines()
    summary = text("config", "\n".join(f"    {line}" for line in lines))
    summary.value[0].tag = "config"
    return _record(wall_time=time.time(), summary=summary)
