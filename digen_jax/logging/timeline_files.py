"""Timeline files: in Chrome's trace format, and as pictures."""

import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from digen_jax.files import append, parse_json, replace
from digen_jax.scheduling.commands import TRAINER
from digen_jax.scheduling.timeline import Interval

# Chrome's reserved colour names, and the same colours for PNG; every other name is a wait.
COLOURS = {
    "encode": ("thread_state_iowait", "#c9b458"),
    "generate": ("rail_animation", "#4c78a8"),
    "decode": ("rail_response", "#72b7b2"),
    "train": ("good", "#54a24b"),
    "update": ("thread_state_running", "#2f6b2a"),
    "score": ("bad", "#f58518"),
    "sync": ("yellow", "#e4c441"),
    "deliver": ("cq_build_running", "#b5a76a"),
    "evaluate": ("olive", "#9d755d"),
    "ask": ("cq_build_passed", "#eba66c"),
    "ask in vain": ("terrible", "#c03830"),
}
WAIT = ("grey", "#dddddd")


class TraceFile:
    """A timeline.json in Chrome's trace format, one row a worker: opens in Perfetto.

    The file is complete after every call. Where a kill left it without its end, Perfetto can still read
    it, and a resumed run appends to it.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._rows: list[str] = []
        self._replace(read_events(self._path))

    def cut_back(self, done: int, ended: float) -> None:
        """Removes the intervals of the first `done` steps, and those of no step that ended before `ended`.

        `ended` is when these were done, in seconds on the clock of `write`.

        Raises:
          OSError: the disk is full; the file is as it was.
        """

        def stays(event: dict[str, Any]) -> bool:
            if event["ph"] == "M":
                return True
            step = event["args"].get("step")
            return event["ts"] + event["dur"] >= ended * 1e6 if step is None else step >= done

        self._replace(list(filter(stays, read_events(self._path))))

    def _replace(self, events: list[dict[str, Any]]) -> None:
        rows = [event["args"]["name"] for event in events if event["ph"] == "M"]
        text = ",\n".join(map(json.dumps, events))
        replace(self._path, ("[\n" + text + ("\n" if events else "") + "]\n").encode())
        self._rows, self._empty = rows, not events

    def write(self, intervals: Iterable[Interval], clock: float = 0.0) -> None:
        """Appends intervals; `clock` is the time, in seconds, of their 0."""
        events, rows = [], list(self._rows)
        for interval in intervals:
            if interval.worker not in rows:
                rows.append(interval.worker)
                events.append(_row(len(rows), interval.worker))
            events.append(_event(rows.index(interval.worker) + 1, interval, clock))
        if not events:
            return
        text = ",\n".join(json.dumps(event) for event in events)
        end = len("\n]\n") - self._empty
        size = self._path.stat().st_size
        os.truncate(self._path, size - end)
        try:
            append(self._path, (("" if self._empty else ",\n") + text + "\n]\n").encode())
        except OSError:
            # There is space for what was just cut off.
            append(self._path, b"\n]\n"[self._empty :])
            raise
        self._rows, self._empty = rows, False


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events in a `TraceFile`'s file, without a last line that a kill cut off; none where there is no file."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return list(filter(None, map(_event_of, lines)))


def _event_of(line: str) -> dict[str, Any] | None:
    """The event in a line that `write` wrote, or None."""
    try:
        found = parse_json(line.rstrip(","))
    except ValueError:
        return None
    kind = found.get("ph") if isinstance(found, dict) else None
    needed = {"M": {"args", "tid"}, "X": {"ts", "dur", "args"}}.get(kind)
    return found if needed and needed <= found.keys() else None


def _row(number: int, worker: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": worker}}


def _event(row: int, interval: Interval, clock: float) -> dict[str, Any]:
    waits = interval.kind == "wait"
    args = {}
    if interval.chunk is not None:
        args = {"step": interval.chunk.step, "chunk": interval.chunk.index}
    return {
        "ph": "X",
        "name": f"wait for {interval.cause}" if waits else interval.kind,
        "cat": "wait" if waits else "work",
        "pid": 1,
        "tid": row,
        "ts": round((clock + interval.start) * 1e6),
        "dur": round(interval.seconds * 1e6),
        "cname": (WAIT if waits else COLOURS[interval.kind])[0],
        "args": args,
    }


def in_order(found: Iterable[tuple[str, str]]) -> list[str]:
    """The rows of some intervals (worker, kind): rollout workers, other workers, trainer, rewards, their servers."""
    servers = {row: kind.startswith("ask") for row, kind in found}

    def place(row: str) -> tuple[bool, bool, bool, bool, str]:
        return servers[row], row == "reward", row == TRAINER, " rollout" in row, row

    return sorted(servers, key=place)


def draw(intervals: Sequence[Interval], path: pathlib.Path, title: str = "") -> None:
    """A PNG with a row for each worker, in the order of `in_order`; a wait is labelled by what it waits for."""
    rows = in_order((interval.worker, interval.kind) for interval in intervals)
    begin = min(interval.start for interval in intervals)
    figure = Figure(figsize=(11, 1.2 + 0.5 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    spans = defaultdict(list)
    for interval in intervals:
        spans[interval.kind, rows.index(interval.worker)].append(
            (interval.start - begin, interval.seconds)
        )
    named = set()
    for (kind, row), bars in sorted(spans.items()):
        colour = COLOURS.get(kind, WAIT)[1]
        label = kind if kind not in named else None
        style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4}
        axes.broken_barh(bars, (row - 0.4, 0.8), label=label, **style)
        named.add(kind)
    length = max(interval.end for interval in intervals) - begin
    for interval in intervals:
        if interval.kind == "wait" and interval.seconds > 0.06 * length:
            middle = (interval.start + interval.end) / 2 - begin
            row = rows.index(interval.worker)
            axes.text(middle, row, interval.cause, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(named), fontsize=7, loc="upper center",
                bbox_to_anchor=(0.5, -0.35))  # fmt: skip
    figure.savefig(path)
