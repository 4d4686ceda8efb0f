"""Live state of a run: status.json, written every 2 seconds, and the table of `launch/status.py`."""

import contextlib
import json
import os
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from digen_jax.errors import ConfigError
from digen_jax.files import read_json, replace
from digen_jax.process.terminal import log_tail, printable, wrapped

FILE = "status.json"
EVERY = 2.0  # write interval in seconds
SILENT = 4.0  # seconds without a heartbeat before the table shows it
TIMEOUT = 2.0  # maximum seconds to wait for the last write
LOG_LINES = 5  # last lines of standard error
HOST_COLUMNS = 20  # longer host names are truncated
LAST_COLUMNS = 30  # minimum width of the table's last column


@contextlib.contextmanager
def status_updates(
    workdir: Path,
    snapshot: Callable[[], Mapping[str, Any]],
    places: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
) -> Iterator[None]:
    """Writes status.json in a background thread during the block, and its error at the end.

    Args:
      workdir: Folder of the run.
      snapshot: Returns the state as JSON: see `timeline.Summary.snapshot`. The file is not updated while it blocks.
      places: Returns, for each worker in another process, "host", "process" (id of its first process), "processes" and
        "heard" (system time of the oldest last heartbeat among them).
    """
    end, ended = threading.Event(), ""
    known: dict[str, Mapping[str, Any]] = {}  # places, including disconnected workers

    def write(error: str | None) -> None:
        known.update(places())
        write_status(workdir, snapshot(), known, error)

    def work() -> None:
        write(None)
        while not end.wait(EVERY):
            write(None)
        write(ended)

    thread = threading.Thread(target=work, name="status", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
        raise
    finally:
        end.set()
        thread.join(TIMEOUT)  # the disk may hang


def write_status(
    workdir: Path,
    snapshot: Mapping[str, Any],
    places: Mapping[str, Mapping[str, Any]],
    ended: str | None = None,
) -> None:
    """Writes status.json. Disk errors are ignored.

    Args:
      workdir: Folder of the run.
      snapshot: See `status_updates`.
      places: See `status_updates`.
      ended: Error that ended the run, or "" if it ended without one. None means that it continues.
    """
    here = {"host": socket.gethostname(), "process": os.getpid()}
    workers = {
        name: {**here, "processes": 1, "heard": None, **places.get(name, {}), **worker}
        for name, worker in snapshot["workers"].items()
    }
    run = {"written": time.time(), **here, "ended": ended, "lines": log_tail()[-LOG_LINES:]}
    content = {**snapshot, **run, "workers": workers}
    try:
        replace(workdir / FILE, (json.dumps(content, indent=1) + "\n").encode())
    except OSError:
        return  # the run reports workdir errors


def read_status(workdir: Path) -> dict[str, Any] | None:
    """Reads status.json. Returns None if it does not exist yet.

    Raises:
      ConfigError: The file is invalid.
    """
    path = workdir / FILE
    if not path.exists():
        return None
    try:
        found = read_json(path)
        describe(workdir, found, None, 0.0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{path} is not a status of this version of digen_jax ({error!r}): delete it; the run writes a new one"
        ) from error
    return found


def describe(
    workdir: Path, found: Mapping[str, Any], holder: int | None, now: float, columns: int = 80
) -> str:
    """Formats a state: progress, process liveness, a table of workers, and the last lines of stderr.

    Args:
      workdir: Folder of the run.
      found: See `read_status`.
      holder: Process on this host that holds the workdir lock, 0 if its id is unknown. None means that none does.
      now: System time.
      columns: Maximum line length, except for longer words.
    """
    head: tuple[str, ...] = ("worker", "process", "devices", "weights", "for", "at that time")
    rows = [head, *(_row(name, worker, found) for name, worker in found["workers"].items())]
    if count := found["scoring"]:
        rows.append(("reward", "", "", "", "", f"scoring {count} batch{'es' * (count != 1)}"))
    lines = [
        f"{workdir}: {found['step']} of {found['steps']} steps are done",
        _process(found, holder, now),
        *_table(rows, columns),
    ]
    if found["lines"]:
        lines.append("last lines of standard error:")
        lines += [f"  {_duration(now - when)} ago: {line}" for when, line in found["lines"]]
    return "\n".join(wrapped(printable(line), columns) for line in lines)


def _process(found: Mapping[str, Any], holder: int | None, now: float) -> str:
    """Describes the liveness of the process that wrote a state."""
    writer = f"process {found['process']} on {found['host']}"
    text = f"written {_duration(now - found['written'])} ago by {writer}"
    if found["ended"]:
        text += f", which failed with {found['ended']}"
    elif found["ended"] is not None:
        text += ", which has finished its steps"
    elif found["host"] != socket.gethostname():
        return f"{text}: check there whether it is still running"
    if holder in (found["process"], 0):
        return f"{text}; it holds the workdir's lock"
    if holder is not None:
        return f"{text}; process {holder} holds the workdir's lock now"
    return text if found["ended"] is not None else f"{text}, which has died"


def _row(name: str, worker: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a worker. Durations end at the time of writing."""
    now, process = found["written"], str(worker["process"])
    if worker["processes"] > 1:
        process = f"{process} and {worker['processes'] - 1} more"
    if (host := worker["host"]) != found["host"]:
        short = host if len(host) <= HOST_COLUMNS else f"{host[: HOST_COLUMNS - 3]}..."
        process = f"{process} on {short}"
    cells = name, process, str(worker["devices"])
    if worker["lost"] is not None:
        return *cells, "", _duration(now - worker["lost"]), "disconnected"
    since = "" if worker["since"] is None else _duration(now - worker["since"])
    work, heard = worker["does"] or f"waits for {worker['waits']}", worker["heard"]
    if heard is not None and now - heard > SILENT:
        work = f"no heartbeat for {_duration(now - heard)}; {work}"
    weights = [*map(str, worker["holds"][-2:]), *(f"+{one}" for one in worker["arrives"][-1:])]
    more = ["..."] if len(worker["holds"]) > 2 else []
    return *cells, " ".join([*more, *weights]), since, work


def _table(rows: list[tuple[str, ...]], columns: int) -> Iterator[str]:
    """Formats rows. The last cell wraps in its column, or below the row if little space is left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    start = sum(widths) + 2 * len(widths)
    for row in rows:
        cells = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        if columns - start >= LAST_COLUMNS:
            first, *more = textwrap.wrap(row[-1], columns - start)
            yield cells + first
            yield from (" " * start + line for line in more)
        else:
            yield cells.rstrip()
            yield from textwrap.wrap(row[-1], columns, initial_indent="  ", subsequent_indent="  ")


def _duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / unit:.{1 if seconds < 10 else 0}f} {name}"
    return f"{seconds / 86400:.0f} days"
