"""Summary of a driver's events: the timeline, the runtime metrics of each step, and the present state."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from digen_jax.rewards.request_log import Exchange
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Completed,
    Decode,
    Deliver,
    Encode,
    Event,
    Generate,
    Joined,
    Removed,
    Score,
    SyncWeights,
    Train,
)
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.state import TRAIN
from digen_jax.scheduling.timeline import Interval, Recorder, bubbles, busy_seconds

# The phase of a step to which a command's seconds are added.
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


class Summary:
    """Records events and sums them up, step by step; not thread-safe.

    `devices` are those of every worker; those of a lost one count until its step ends. `images` is the number of
    trained images of a step.
    """

    def __init__(self, devices: Mapping[str, int], images: int):
        self.devices, self._images = dict(devices), images
        self.numbers: dict[str, float] = {}  # runtime metrics of the last step
        self._lost: dict[str, tuple[float, int]] = {}  # worker: (time of its loss, its devices)
        self._recorder = Recorder()
        self._began = 0.0  # of the step
        self._under_way: dict[str, float] = {}  # worker: start of its present work
        self._ages: list[int] = []  # of each trained pass, in versions
        self._queued: list[int] = []  # number of ready chunks at each start of training
        # Generated chunks, by whether their worker prefers to train.
        self._sampled: Counter[bool] = Counter()

    def seen(self, event: Event, commands: list[Command], scheduler: Scheduler, now: float) -> None:
        """Records an event and the resulting commands."""
        worker = getattr(event, "worker", None) or getattr(
            getattr(event, "command", None), "worker", None
        )
        if isinstance(event, Removed):
            self._recorder.end_wait(event.worker, now)
            self._under_way.pop(event.worker, None)
            self._lost[event.worker] = now, self.devices.get(event.worker, 0)
        if isinstance(event, Joined):
            self._lost.pop(event.worker, None)
        if isinstance(event, Joined | Completed) and worker and scheduler.has_worker(worker):
            self._recorder.look_at(scheduler, worker, now)
        if scheduler.has_worker(TRAINER):
            self._recorder.look_at(scheduler, TRAINER, now)
        for command in commands:
            self._commanded(command, scheduler, now)

    def _commanded(self, command: Command, scheduler: Scheduler, now: float) -> None:
        worker = getattr(command, "worker", None)
        if _is_transfer(command):
            if isinstance(command, SyncWeights) and self._recorder.waits(worker):
                self._recorder.wait(worker, "weights", now)
            return
        if worker is not None:
            self._recorder.end_wait(worker, now)
            self._under_way[worker] = now
        if isinstance(command, Generate) and not command.chunk.evaluation:
            self._sampled[scheduler.state.workers[worker].roles[0] == TRAIN] += 1
        if isinstance(command, Train):
            step = scheduler.state.steps[command.chunk.step]
            age = step.number - step.group_of(command.chunk.index).version
            self._ages.extend([age] * command.count)
            self._queued.append(1 + len(step.ready))

    def work(
        self,
        command: Command,
        start: float,
        end: float,
        parts: Sequence[tuple[str, float, float]] = (),
    ) -> None:
        """Records a command that was executed from `start` to `end`.

        `parts` are (kind, begin, end) of what the timeline shows separately, except in an evaluation.
        """
        worker, kind = getattr(command, "worker", "reward"), command.kind
        chunk = getattr(command, "chunk", None)
        if chunk is not None and chunk.evaluation:
            kind, parts = "evaluate", ()
        if _is_transfer(command):
            worker = f"{kind} {worker}"  # parallel to the worker's commands
        else:
            self._under_way.pop(worker, None)
        for what, begin, finish in parts:
            self._recorder.work(worker, kind, start, begin, chunk)
            self._recorder.work(worker, what, begin, finish, chunk)
            start = finish
        self._recorder.work(worker, kind, start, end, chunk)

    def asked(self, command: Score, exchanges: Sequence[Exchange]) -> None:
        """Records the requests to servers by which a batch was scored; each server is a worker of its own."""
        # An evaluation is not a part of the step in which it happens.
        chunk = None if command.chunk.evaluation else command.chunk
        for one in exchanges:
            kind = "ask" if one.failure is None else "ask in vain"
            self._recorder.work(one.server, kind, one.begin, one.end, chunk)

    def end_step(self, now: float, away: float) -> list[Interval]:
        """Sums up a step that ends now; returns its intervals and forgets them.

        `away`: seconds in which the trainer's thread was called for other work, such as a checkpoint. Images a
        second do not count them, nor the seconds in which an evaluation kept the trainer from training.
        """
        done = self.take(now)
        away += sum(
            interval.seconds
            for interval in done
            if interval.worker == TRAINER
            and (interval.kind == "evaluate" or interval.cause == "evaluation")
        )
        running = [Interval(w, "work", since, now) for w, since in self._under_way.items()]
        seconds = now - self._began
        total = sum(self.devices.values())
        busy = busy_seconds([*done, *running], self.devices, self._began, now)
        phases: Counter[str] = Counter()
        for one in done:
            if one.kind in PHASES:
                # A reward on a mesh is a part of the rollout, which it prolongs.
                on_mesh = one.kind == "score" and one.worker != "reward"
                phases["rollout" if on_mesh else PHASES[one.kind]] += one.seconds
        waits = bubbles(done, self.devices).items()
        self.numbers = {
            "images_per_second": self._images / (seconds - away),
            "utilisation": busy / (total * seconds),
            "policy_lag": float(np.mean(self._ages)),
            "tag_share": self._sampled[True] / max(1, self._sampled.total()),
            "queue_depth": float(np.mean(self._queued)),
            **{f"seconds/{phase}": spent for phase, spent in phases.items()},
            **{f"seconds/wait_{cause.replace(' ', '_')}": spent for cause, spent in waits},
        }
        self._began, self._ages, self._queued = now, [], []
        self._sampled.clear()
        for worker in self._lost:
            self.devices.pop(worker, None)
        return done

    def take(self, now: float) -> list[Interval]:
        """Returns the intervals since the last call and forgets them."""
        self._recorder.cut(now)
        done = list(self._recorder.intervals)
        self._recorder.intervals.clear()
        return done

    def present(
        self, scheduler: Scheduler, devices: Mapping[str, int], now: float
    ) -> dict[str, Any]:
        """Describes the present work of all workers, as JSON.

        Args:
          scheduler: Between two events, which this summary has seen.
          devices: Number of devices of each worker that is there.
          now: The time, in seconds of the run's clock.

        Returns:
          "step": completed steps, "steps": steps of the run, "scoring": number of batches that the rewards score, and
          "workers", by name: "devices"; "lost", the time of its loss, or None; "does", its present command in words,
          or None; "waits", one of `timeline.CAUSES`, or None; "since", when that began, or None; "holds" and
          "arrives", the versions of the weights. Times are those of the system's clock.
        """
        state, begun = scheduler.state, time.time() - now

        def of(name: str) -> dict[str, Any]:
            worker = state.workers.get(name)
            if worker is None:
                return {"lost": begun + (self._lost[name][0] if name in self._lost else now)}
            kept = scheduler.kept if name == TRAINER else worker.held
            command = state.in_flight.get(worker.busy)
            part = f" ({command.kind})" if isinstance(command, Encode | Decode) else ""
            since = self._recorder.waits_since.get(name, self._under_way.get(name))
            return {
                "lost": None,
                "does": None if command is None else scheduler.work(command) + part,
                "waits": None if scheduler.is_busy(name) else scheduler.waits_for(name),
                "since": None if since is None else begun + since,
                "holds": sorted({weights_version.version for weights_version in kept}),
                "arrives": sorted({weights_version.version for weights_version in worker.arriving}),
            }

        lost = {name: count for name, (_, count) in self._lost.items()}
        known = {**self.devices, **lost, **devices}
        return {
            "step": state.step,
            "steps": state.settings.steps,
            "scoring": sum(isinstance(command, Score) for command in state.in_flight.values()),
            "workers": {name: {"devices": count, **of(name)} for name, count in known.items()},
        }


def _is_transfer(command: Command) -> bool:
    """Whether a command is executed in parallel to its worker's others."""
    sends = isinstance(command, SyncWeights) and command.worker != TRAINER
    return sends or isinstance(command, Deliver)
