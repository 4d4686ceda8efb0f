"""The timeline of a run's newest steps, as JSON from which the page draws any one of them."""

from typing import Any

from digen_jax.logging.report_reading import Run
from digen_jax.logging.timeline_files import COLOURS, WAIT, in_order, read_events

MOST = 5000  # intervals on a page; the steps before the newest so many are left out


def timeline(run: Run, most: int = MOST) -> dict[str, Any] | None:
    """Rows, kinds of work with colours, intervals, and the window of each step; None where nothing is recorded.

    An interval is [row, kind, begin, length, chunk or -1], in milliseconds, of which the newest `most` are there;
    "steps" has for each step that is done [its number, begin, end] of the work on it, in which other work may lie.
    """
    events = read_events(run.workdir / "timeline.json")
    names = {event["tid"]: event["args"].get("name", "") for event in events if event["ph"] == "M"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"] + e["dur"])
    windows: dict[int, list[float]] = {}
    kept = spans[-most:]
    for event in kept:
        step = event["args"].get("step")
        if step is not None and event["name"] != "evaluate":
            begin, end = event["ts"], event["ts"] + event["dur"]
            window = windows.setdefault(step + 1, [begin, end])
            window[:] = min(window[0], begin), max(window[1], end)
    if len(spans) > most and len(windows) > 1:
        del windows[min(windows)]  # its first intervals are left out
    windows = {step: own for step, own in windows.items() if step <= run.step}
    if not windows:
        return None
    first = min(begin for begin, _ in windows.values())
    rows = in_order((names.get(event["tid"], ""), event["name"]) for event in kept)
    kinds = list(dict.fromkeys(event["name"] for event in kept))

    def short(event: dict[str, Any]) -> list[float]:
        row, kind = rows.index(names.get(event["tid"], "")), kinds.index(event["name"])
        begin, length = _ms(event["ts"] - first), _ms(event["dur"])
        return [row, kind, begin, length, event["args"].get("chunk", -1)]

    return {
        "rows": rows,
        "kinds": [[name, COLOURS.get(name, WAIT)[1]] for name in kinds],
        "spans": [short(event) for event in kept if event["ts"] + event["dur"] > first],
        "steps": [
            [step, *(_ms(moment - first) for moment in own)]
            for step, own in sorted(windows.items())
        ],
    }


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 1)
