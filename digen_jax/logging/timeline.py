"""Timeline of a run: work and waits of each worker, runtime metrics, timeline.json, and timeline images."""

import json
import os
import pathlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from digen_jax.files import append, parse_json, replace
from digen_jax.rewards import Exchange
from digen_jax.scheduling.commands import (
    TRAIN,
    TRAINER,
    Command,
    Completed,
    Decode,
    Deliver,
    Encode,
    Event,
    Generate,
    Interval,
    Joined,
    Recorder,
    Removed,
    Score,
    SyncWeights,
    Train,
    bubbles,
)
from digen_jax.scheduling.scheduler import Scheduler

# Phase of a step by command; the command's seconds are added to it.
PHASES = {
    "encode": "rollout",
    "generate": "rollout",
    "decode": "rollout",
    "score": "reward",
    "train": "train",
    "update": "train",
    "sync": "sync",
    "deliver": "deliver",
    "evaluate": "evaluation",
}
# Chrome's reserved color names, and the same colors for PNG. All other names are waits.
COLORS = {
    "encode": ("thread_state_iowait", "#c9b458"),
    "generate": ("rail_animation", "#4c78a8"),
    "decode": ("rail_response", "#72b7b2"),
    "train": ("good", "#54a24b"),
    "update": ("thread_state_running", "#2f6b2a"),
    "score": ("bad", "#f58518"),
    "sync": ("yellow", "#e4c441"),
    "deliver": ("cq_build_running", "#b5a76a"),
    "evaluate": ("olive", "#9d755d"),
    "request": ("cq_build_passed", "#eba66c"),
    "failed request": ("terrible", "#c03830"),
}
WAIT = ("grey", "#dddddd")


class Summary:
    """Summarizes driver events: timeline, runtime metrics of each step, and a snapshot. Not thread-safe.

    Args:
      devices: Number of devices by worker. Disconnected workers count until the step ends.
      images: Trained images per step.
      flops: Returns the needed FLOPs of a command, and the device-seconds that they take at the peak of its devices;
        NaN seconds mean that the peak is unknown.
    """

    def __init__(
        self,
        devices: Mapping[str, int],
        images: int,
        flops: Callable[[Generate | Train], tuple[float, float]],
    ):
        self.devices, self._images, self._flops = dict(devices), images, flops
        self.metrics: dict[str, float] = {}  # runtime metrics of the last step
        self._ended: dict[str, tuple[float, int]] = {}  # worker: (disconnect time, devices)
        self._recorder = Recorder()
        self._step_start = 0.0
        self._working_since: dict[str, float] = {}  # by worker
        self._policy_lags: list[int] = []  # of each training pass, in versions
        self._queued: list[int] = []  # number of ready chunks at each start of training
        # (needed FLOPs, device-seconds at the peak, device-seconds) of the step's completed work, by kind
        self._work = defaultdict[str, np.ndarray](lambda: np.zeros(3))
        # chunks, by whether their worker prefers to train
        self._generated: Counter[bool] = Counter()

    def record_event(
        self, event: Event, commands: list[Command], scheduler: Scheduler, now: float
    ) -> None:
        """Records an event and the resulting commands."""
        command = getattr(event, "command", None)
        worker = getattr(event, "worker", None) or getattr(command, "worker", None)
        if isinstance(event, Removed):
            self._recorder.end_wait(event.worker, now)
            self._working_since.pop(event.worker, None)
            self._ended[event.worker] = now, self.devices.get(event.worker, 0)
        if isinstance(event, Joined):
            self._ended.pop(event.worker, None)
        concerned = [worker] if isinstance(event, Joined | Completed) else []
        for name in (*concerned, TRAINER):
            if name in scheduler.workers and (cause := scheduler.waits_for(name)):
                self._recorder.wait(name, cause, now)
        for command in commands:
            self._record_command(command, scheduler, now)

    def _record_command(self, command: Command, scheduler: Scheduler, now: float) -> None:
        worker: Any = getattr(command, "worker", None)
        if _is_transfer(command):
            if isinstance(command, SyncWeights) and worker in self._recorder.waits:
                self._recorder.wait(worker, "weights", now)
            return
        if worker is not None:
            self._recorder.end_wait(worker, now)
            self._working_since[worker] = now
        if isinstance(command, Generate) and not command.chunk.evaluation:
            self._generated[scheduler.workers[command.worker].roles[0] == TRAIN] += 1
        if isinstance(command, Train):
            step = scheduler.steps[command.chunk.step]
            lag = step.number - (step.group_of(command.chunk.index).version or 0)
            self._policy_lags.extend([lag] * command.count)
            self._queued.append(1 + len(step.ready))

    def record_work(
        self,
        command: Command,
        start: float,
        end: float,
        parts: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        """Records a command that was executed from `start` to `end`.

        Args:
          command: The command.
          start: Start time on the run's clock, in seconds.
          end: End time.
          parts: (kind, start, end) of parts that the timeline shows separately, except in evaluations.
        """
        worker, kind = getattr(command, "worker", "reward"), command.kind
        chunk = getattr(command, "chunk", None)
        if chunk is not None and chunk.evaluation:
            kind, parts = "evaluate", ()
        if _is_transfer(command):
            worker = f"{kind} {worker}"  # parallel to the worker's commands
        else:
            self._working_since.pop(worker, None)
        if isinstance(command, Generate | Train) and worker in self.devices:
            self._work[kind] += *self._flops(command), (end - start) * self.devices[worker]
        for part, part_start, part_end in parts:
            self._recorder.work(worker, kind, start, part_start, chunk)
            self._recorder.work(worker, part, part_start, part_end, chunk)
            start = part_end
        self._recorder.work(worker, kind, start, end, chunk)

    def record_requests(self, command: Score, exchanges: Sequence[Exchange]) -> None:
        """Records the reward server requests of a scored batch; each server is shown as a worker."""
        # An evaluation does not belong to the concurrent step.
        chunk = None if command.chunk.evaluation else command.chunk
        for one in exchanges:
            kind = "request" if one.failure is None else "failed request"
            self._recorder.work(one.server, kind, one.begin, one.end, chunk)

    def end_step(self, now: float, away: float) -> list[Interval]:
        """Summarizes the step that ends now in `metrics`. Returns and clears its intervals.

        Args:
          now: Time on the run's clock, in seconds.
          away: Seconds that the trainer thread spent on other work, such as a checkpoint. Images per second exclude
            them, and the seconds in which an evaluation blocked the trainer.
        """
        done = self.take(now)
        away += sum(
            interval.seconds
            for interval in done
            if interval.worker == TRAINER
            and (interval.kind == "evaluate" or interval.cause == "evaluation")
        )
        running = [Interval(w, "work", since, now) for w, since in self._working_since.items()]
        seconds = now - self._step_start
        busy = busy_seconds([*done, *running], self.devices, self._step_start, now)
        phases = defaultdict[str, float](float)
        for one in (one for one in done if one.kind in PHASES):
            # A reward on a mesh is part of the rollout.
            on_mesh = one.kind == "score" and one.worker != "reward"
            phases["rollout" if on_mesh else PHASES[one.kind]] += one.seconds
        waits, count = bubbles(done, self.devices).items(), sum(self.devices.values())
        speed = self._images / (seconds - away)
        self.metrics = {
            "images_per_second": speed,
            "images_per_second_per_device": speed / count,
            **self._flops_metrics(count * seconds),
            "utilisation": busy / (count * seconds),
            "policy_lag": float(np.mean(self._policy_lags)),
            "assisted": self._generated[True] / max(1, self._generated.total()),
            "queue_depth": float(np.mean(self._queued)),
            **{f"seconds/{phase}": spent for phase, spent in phases.items()},
            **{f"seconds/wait_{cause.replace(' ', '_')}": spent for cause, spent in waits},
        }
        self._step_start, self._policy_lags, self._queued = now, [], []
        self._generated.clear()
        self._work.clear()
        for worker in self._ended:
            self.devices.pop(worker, None)
        return done

    def _flops_metrics(self, device_seconds: float) -> dict[str, float]:
        """Returns needed FLOP/s per device and MFU: while workers generate, while they train, and of the whole step.

        The step has `device_seconds` and also the work of evaluations. Unknown numbers are omitted.
        """
        total = sum(self._work.values(), np.zeros(3))
        total[2], metrics = device_seconds, {}
        kinds = {"": total} | {f"/{kind}": self._work[kind] for kind in ("generate", "train")}
        for name, (flops, at_peak, spent) in kinds.items():
            if flops > 0:
                metrics[f"flops_per_second_per_device{name}"] = float(flops / spent)
            if at_peak > 0:  # not NaN
                metrics[f"mfu{name}"] = float(at_peak / spent)
        return metrics

    def take(self, now: float) -> list[Interval]:
        """Returns and clears the intervals since the last call."""
        self._recorder.split(now)
        done = list(self._recorder.intervals)
        self._recorder.intervals.clear()
        return done

    def snapshot(self, scheduler: Scheduler, now: float) -> dict[str, Any]:
        """Returns the current state of all workers as JSON, for status.json.

        Args:
          scheduler: The scheduler, after the last recorded event.
          now: Time on the run's clock, in seconds.

        Returns:
          "step": number of completed steps; "steps": steps of the run; "scoring": number of batches being scored;
          "workers", by name: "devices"; "lost", disconnect time or None; "does", current command as text or None;
          "waits", one of `scheduling.commands.CAUSES` or None; "since", start of the work or wait, or None; "holds"
          and "arrives", weights versions. Times are system times.
        """
        clock = time.time() - now

        def describe(name: str) -> dict[str, Any]:
            worker = scheduler.workers.get(name)
            if worker is None:
                return {"lost": clock + (self._ended[name][0] if name in self._ended else now)}
            held = scheduler.kept if name == TRAINER else worker.held
            command = None if worker.busy is None else scheduler.in_flight.get(worker.busy)
            part = f" ({command.kind})" if isinstance(command, Encode | Decode) else ""
            _, since, _ = self._recorder.waits.get(name, (0, self._working_since.get(name), ""))
            return {
                "lost": None,
                "does": None if command is None else scheduler.work(command) + part,
                "waits": scheduler.waits_for(name),
                "since": None if since is None else clock + since,
                "holds": sorted({weights.version for weights in held}),
                "arrives": sorted({weights.version for weights in worker.arriving}),
            }

        lost = {name: count for name, (_, count) in self._ended.items()}
        return {
            "step": scheduler.step,
            "steps": scheduler.settings.steps,
            "scoring": sum(isinstance(command, Score) for command in scheduler.in_flight.values()),
            "workers": {
                name: {"devices": count, **describe(name)}
                for name, count in (self.devices | lost).items()
            },
        }


def busy_seconds(
    intervals: Iterable[Interval], devices: Mapping[str, int], start: float, end: float
) -> float:
    """Returns device-seconds of work, without waiting, between two times; `devices` has each worker's count."""
    return sum(
        max(0.0, min(i.end, end) - max(i.start, start)) * devices[i.worker]
        for i in intervals
        if i.kind != "wait" and i.worker in devices
    )


def _is_transfer(command: Command) -> bool:
    """Returns whether a command runs in parallel with its worker's other commands."""
    sends = isinstance(command, SyncWeights) and command.worker != TRAINER
    return sends or isinstance(command, Deliver)


class TraceFile:
    """Writes timeline.json in Chrome's trace format with one row per worker, for Perfetto.

    The file is complete after every call. If a kill truncates it, Perfetto can still read it; a resumed run appends.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._rows, self._empty = path, list[str](), True
        self._replace(read_events(self._path))

    def write(self, intervals: Iterable[Interval], clock: float = 0.0) -> None:
        """Appends intervals; `clock` is the system time of their 0, in seconds.

        Raises:
          OSError: The disk is full; the file is unchanged.
        """
        events, rows = [], list(self._rows)
        for interval in intervals:
            if interval.worker not in rows:
                rows.append(interval.worker)
                row = {"ph": "M", "name": "thread_name", "pid": 1, "tid": len(rows)}
                events.append(row | {"args": {"name": interval.worker}})
            events.append(_event(rows.index(interval.worker) + 1, interval, clock))
        if not events:
            return
        end = b"\n]\n"[self._empty :]
        os.truncate(self._path, self._path.stat().st_size - len(end))
        try:
            text = ("" if self._empty else ",\n") + ",\n".join(map(json.dumps, events)) + "\n]\n"
            append(self._path, text.encode())
        except OSError:
            append(self._path, end)  # fits into the space that was just freed
            raise
        self._rows, self._empty = rows, False

    def truncate(self, done: int, ended: float) -> None:
        """Removes the intervals of the first `done` steps, and those without a step that ended before `ended`.

        Args:
          done: Number of steps.
          ended: System time of their completion, in seconds.

        Raises:
          OSError: The disk is full; the file is unchanged.
        """

        def is_kept(event: dict[str, Any]) -> bool:
            if event["ph"] == "M":
                return True
            step = event["args"].get("step")
            return event["ts"] + event["dur"] >= ended * 1e6 if step is None else step >= done

        self._replace(list(filter(is_kept, read_events(self._path))))

    def _replace(self, events: list[dict[str, Any]]) -> None:
        lines = ["[", ",\n".join(map(json.dumps, events)), "]"] if events else ["[", "]"]
        replace(self._path, ("\n".join(lines) + "\n").encode())
        self._rows = [event["args"]["name"] for event in events if event["ph"] == "M"]
        self._empty = not events


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the events of a `TraceFile`, without an incomplete last line; empty if there is no file."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            event = parse_json(line.rstrip(","))
        except ValueError:
            continue
        kind = event.get("ph") if isinstance(event, dict) else ""
        needed = {"M": {"args", "tid"}, "X": {"ts", "dur", "args"}}.get(kind or "")
        if needed and needed <= event.keys():
            found.append(event)
    return found


def _event(row: int, interval: Interval, clock: float) -> dict[str, Any]:
    waits, chunk = interval.kind == "wait", interval.chunk
    return {
        "ph": "X",
        "name": f"wait for {interval.cause}" if waits else interval.kind,
        "cat": "wait" if waits else "work",
        "pid": 1,
        "tid": row,
        "ts": round((clock + interval.start) * 1e6),
        "dur": round(interval.seconds * 1e6),
        "cname": (WAIT if waits else COLORS[interval.kind])[0],
        "args": {} if chunk is None else {"step": chunk.step, "chunk": chunk.index},
    }


def order_rows(intervals: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the rows of intervals (worker, kind): rollout workers, other workers, trainer, rewards, servers."""
    is_server = {row: kind.endswith("request") for row, kind in intervals}

    def place(row: str) -> tuple[bool, bool, bool, bool, str]:
        return is_server[row], row == "reward", row == TRAINER, " rollout" in row, row

    return sorted(is_server, key=place)


def draw_timeline(intervals: Sequence[Interval], path: pathlib.Path, title: str = "") -> None:
    """Draws a PNG with a row per worker, in the order of `order_rows`; waits are labeled by cause."""
    rows = order_rows((interval.worker, interval.kind) for interval in intervals)
    start = min(interval.start for interval in intervals)
    length = max(interval.end for interval in intervals) - start
    figure = Figure(figsize=(11, 1.2 + 0.5 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    spans = defaultdict(list)
    for interval in intervals:
        row, kind = rows.index(interval.worker), interval.kind
        spans[kind, row].append((interval.start - start, interval.seconds))
        if kind == "wait" and interval.seconds > 0.06 * length:
            middle = (interval.start + interval.end) / 2 - start
            axes.text(middle, row, interval.cause, ha="center", va="center", fontsize=7)
    labelled = set()
    for (kind, row), bars in sorted(spans.items()):
        style: dict = dict(facecolor=COLORS.get(kind, WAIT)[1], edgecolor="white", linewidth=0.4)
        label = None if kind in labelled else kind
        axes.broken_barh(bars, (row - 0.4, 0.8), label=label, **style)
        labelled.add(kind)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    place: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.35))
    axes.legend(frameon=False, ncols=len(labelled), fontsize=7, **place)
    figure.savefig(path)
