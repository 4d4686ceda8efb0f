"""What a run does at present, as a file in its workdir that is written every 2 seconds, and as a table."""

import json
import os
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from digen_jax.checkpoints.folder import read_json
from digen_jax.errors import ConfigError
from digen_jax.files import replace
from digen_jax.process.terminal import log_tail, printable, wrapped

FILE = "status.json"
EVERY = 2.0  # seconds between two writes
SILENT = 4.0  # seconds after which it is said when a process was heard
PATIENCE = 2.0  # seconds for the last write
SHOWN = 5  # last lines of standard error
HOST = 20  # characters of a host's name
LEAST = 30  # characters of a table's last column


class Status:
    """Writes a run's state into its workdir, from a thread of its own, from the begin to the end of a block.

    Args:
      workdir: the run's folder.
      snapshot: the state as JSON: see `Summary.present`. It may wait, which makes the file old.
      places: for workers in other processes, by name: "host", "process" (the first one's number there), "processes"
        and "heard", when the one that has been silent longest was heard, by the system's clock. The others are in
        this process; of the trainer's there may be more.
    """

    def __init__(
        self,
        workdir: Path,
        snapshot: Callable[[], Mapping[str, Any]],
        places: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        every: float = EVERY,
    ):
        self._workdir, self._snapshot, self._places, self._every = workdir, snapshot, places, every
        self._end = threading.Event()
        self._ended: str | None = None
        self._known: dict[str, Mapping[str, Any]] = {}  # places, of lost workers, too

    def __enter__(self) -> "Status":
        self._thread = threading.Thread(target=self._work, name="status", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ended = "" if error is None else f"{type(error).__name__}: {error}"
        self._end.set()
        self._thread.join(PATIENCE)  # it may hang, as the disk may

    def _work(self) -> None:
        while True:
            last = self._end.is_set()
            self._known |= self._places()
            ended = self._ended if last else None
            write_status(self._workdir, self._snapshot(), self._known, ended)
            if last:
                return
            self._end.wait(self._every)


def write_status(
    workdir: Path,
    snapshot: Mapping[str, Any],
    places: Mapping[str, Mapping[str, Any]],
    ended: str | None = None,
) -> None:
    """Writes a state with the process, the time and the last lines of standard error; a full disk is ignored.

    Args:
      workdir: the folder of the file.
      snapshot: see `Status`.
      places: likewise.
      ended: None: the run continues; "": it has ended; else its error.
    """
    here = {"host": socket.gethostname(), "process": os.getpid()}
    workers = {
        name: {**here, "processes": 1, "heard": None, **places.get(name, {}), **found}
        for name, found in snapshot["workers"].items()
    }
    told = {"written": time.time(), **here, "ended": ended, "lines": log_tail()[-SHOWN:]}
    content = {**snapshot, **told, "workers": workers}
    try:
        replace(workdir / FILE, (json.dumps(content, indent=1) + "\n").encode())
    except OSError:
        return  # the run itself says what is wrong with its workdir


def read_status(workdir: Path) -> dict[str, Any] | None:
    """What was written last; None: nothing yet.

    Raises:
      ConfigError: the file cannot be read.
    """
    path = workdir / FILE
    if not path.exists():
        return None
    try:
        found = read_json(path)
        describe(workdir, found, None, 0.0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{path} is no status of this version of digen_jax ({error!r}): delete it; a run writes it again"
        ) from error
    return found


def describe(
    workdir: Path, found: Mapping[str, Any], holder: int | None, now: float, columns: int = 80
) -> str:
    """A state as text: how far the run is, whether its process is alive, a table of workers, the last errors.

    Args:
      workdir: the run's folder.
      found: see `read_status`.
      holder: the process on this host that has the workdir, 0 if its number is unknown; None: there is none.
      now: the system's time.
      columns: no line is longer, unless a word is.
    """
    texts = [
        f"{workdir}: {found['step']} of {found['steps']} steps are done",
        _alive(found, holder, now),
    ]
    rows = [("worker", "process", "devices", "weights", "for", "at that time")]
    rows += [_row(name, one, found) for name, one in found["workers"].items()]
    if found["scoring"]:
        rows.append(
            ("reward", "", "", "", "", f"scoring {_counted(found['scoring'], 'batch', 'es')}")
        )
    texts += _table(rows, columns)
    if found["lines"]:
        texts.append("the last lines of its standard error:")
        texts += [f"  {_span(now - when)} ago: {line}" for when, line in found["lines"]]
    return "\n".join(wrapped(printable(text), columns) for text in texts)


def _alive(found: Mapping[str, Any], holder: int | None, now: float) -> str:
    """Whether the process that wrote a state continues, in a sentence."""
    who = f"process {found['process']} on {found['host']}"
    text = f"written {_span(now - found['written'])} ago by {who}"
    if found["ended"]:
        text += f", which was ended by {found['ended']}"
    elif found["ended"] is not None:
        text += ", which has ended its steps"
    elif found["host"] != socket.gethostname():
        return f"{text}: ask there whether that still runs"
    if holder in (found["process"], 0):
        return f"{text}; it still has the workdir"
    if holder is not None:
        return f"{text}; process {holder} has the workdir now"
    return text if found["ended"] is not None else f"{text}, which has died"


def _row(name: str, one: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """A worker's cells; spans are up to the time of the writing."""
    now, process = found["written"], str(one["process"])
    if one["processes"] > 1:
        process = f"{process} and {one['processes'] - 1} more"
    if one["host"] != found["host"]:
        process = f"{process} on {_cut(one['host'], HOST)}"
    cells = name, process, str(one["devices"])
    if one["lost"] is not None:
        return *cells, "", _span(now - one["lost"]), "lost"
    since = "" if one["since"] is None else _span(now - one["since"])
    what, heard = one["does"] or f"waits for {one['waits']}", one["heard"]
    if heard is not None and now - heard > SILENT:
        what = f"not heard for {_span(now - heard)}; {what}"
    return *cells, _versions(one), since, what


def _versions(one: Mapping[str, Any]) -> str:
    """The newest two versions of weights that a worker has, and one that is on its way."""
    held = [str(version) for version in one["holds"][-2:]]
    more = ["..."] if len(one["holds"]) > 2 else []
    arriving = [f"+{version}" for version in one["arrives"][-1:]]
    return " ".join([*more, *held, *arriving])


def _table(rows: list[tuple[str, ...]], columns: int) -> Iterator[str]:
    """Lines of rows, whose last cell is broken into the room that is left, or comes below where there is little."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    begin = sum(widths) + 2 * len(widths)
    for row in rows:
        cells = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        if columns - begin >= LEAST:
            first, *more = textwrap.wrap(row[-1], columns - begin)
            yield cells + first
            yield from (" " * begin + line for line in more)
        else:
            yield cells.rstrip()
            yield from textwrap.wrap(row[-1], columns, initial_indent="  ", subsequent_indent="  ")


def _cut(text: str, most: int) -> str:
    """A text without its end, where it is too long for that."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _span(seconds: float) -> str:
    """A time in the unit that fits."""
    for most, unit, name in ((10, 1, "s"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < most:
            return f"{max(0.0, seconds) / unit:.{1 if most == 10 else 0}f} {name}"
    return f"{seconds / 86400:.0f} days"


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"
