"""Records of a run's driver: the timeline, and the runtime metrics of each step."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from digen_jax import rewards
from digen_jax.algorithms.advantages import trained_images
from digen_jax.rewards.exchanges import Exchange
from digen_jax.runtime.evaluation import by_tag
from digen_jax.runtime.image_statistics import group_diversity
from digen_jax.runtime.scores import StepScores
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Deliver,
    Generate,
    Publish,
    Score,
    Train,
)
from digen_jax.scheduling.events import Completed, Event, Joined, Lost
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
    "publish": "publish",
    "deliver": "deliver",
    "evaluate": "evaluation",
}

# Statistics of each reward, by what stands for them in the name of a metric.
STATISTICS = {"": np.mean, "std_": np.std, "min_": np.min, "max_": np.max}


class Summary:
    """Records events and sums them up, step by step; not thread-safe.

    `devices` are those of every worker; those of a lost one count until its step ends.
    """

    def __init__(self, devices: Mapping[str, int], images: int):
        self.devices, self._images = dict(devices), images
        # Workers that were lost: when, and their devices, which count to the end of that step.
        self.lost: dict[str, tuple[float, int]] = {}
        self._recorder = Recorder()
        self._began = 0.0  # of the step
        self._under_way: dict[str, float] = {}  # worker: start of its present work
        self._ages: list[int] = []  # of each trained pass, in versions
        self._queued: list[int] = []  # number of ready chunks at each start of training
        self._sampled: Counter[bool] = (
            Counter()
        )  # chunks: whether a worker made them that prefers to train
        self.numbers: dict[str, float] = {}  # runtime metrics of the last step

    def seen(self, event: Event, commands: list[Command], scheduler: Scheduler, now: float) -> None:
        """Records an event and the resulting commands."""
        worker = getattr(event, "worker", None) or getattr(
            getattr(event, "command", None), "worker", None
        )
        if isinstance(event, Lost):
            self._recorder.end_wait(event.worker, now)
            self._under_way.pop(event.worker, None)
            self.lost[event.worker] = now, self.devices.get(event.worker, 0)
        if isinstance(event, Joined):
            self.lost.pop(event.worker, None)
        if isinstance(event, Joined | Completed) and worker and scheduler.is_there(worker):
            self._recorder.look_at(scheduler, worker, now)
        if scheduler.is_there(TRAINER):
            self._recorder.look_at(scheduler, TRAINER, now)
        for command in commands:
            self._commanded(command, scheduler, now)

    def _commanded(self, command: Command, scheduler: Scheduler, now: float) -> None:
        worker = getattr(command, "worker", None)
        if _is_transfer(command):
            if isinstance(command, Publish) and self._recorder.waits(worker):
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
        """Records a completed command.

        Args:
          command: the command.
          start: of its work.
          end: likewise.
          parts: (kind, begin, end) of what is shown apart within its work; not of an evaluation.
        """
        worker, kind = getattr(command, "worker", "reward"), command.kind
        chunk = getattr(command, "chunk", None)
        if chunk is not None and chunk.evaluation:
            kind = "evaluate"
        if _is_transfer(command):
            worker = f"{kind} {worker}"  # parallel to the worker's commands
        else:
            self._under_way.pop(worker, None)
        shown = parts if kind != "evaluate" else ()
        for what, begin, finish in shown:
            self._recorder.work(worker, kind, start, begin, chunk)
            self._recorder.work(worker, what, begin, finish, chunk)
            start = finish
        self._recorder.work(worker, kind, start, end, chunk)

    def since(self, worker: str) -> float | None:
        """When the present work or wait of a worker began; None: unknown."""
        return self._recorder.waits_since.get(worker, self._under_way.get(worker))

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
        for interval in done:
            if interval.kind in PHASES:
                phases[_phase(interval)] += interval.seconds
        self.numbers = {
            "images_per_second": self._images / (seconds - away),
            "utilisation": busy / (total * seconds),
            "policy_lag": float(np.mean(self._ages)),
            "tag_share": self._sampled[True] / max(1, self._sampled.total()),
            "queue_depth": float(np.mean(self._queued)),
            **{f"seconds/{phase}": spent for phase, spent in phases.items()},
            **{
                f"seconds/wait_{cause.replace(' ', '_')}": spent
                for cause, spent in bubbles(done, self.devices).items()
            },
        }
        self._began, self._ages, self._queued = now, [], []
        self._sampled.clear()
        for worker in self.lost:
            self.devices.pop(worker, None)
        return done

    def take(self, now: float) -> list[Interval]:
        """Returns the intervals since the last call and forgets them."""
        self._recorder.cut(now)
        done = list(self._recorder.intervals)
        self._recorder.intervals.clear()
        return done


def _is_transfer(command: Command) -> bool:
    """Whether a command is executed next to its worker's others."""
    publishes = isinstance(command, Publish) and command.worker != TRAINER
    return publishes or isinstance(command, Deliver)


def _phase(interval: Interval) -> str:
    """The phase of an interval; a reward on a mesh is a part of the rollout, which it prolongs."""
    on_mesh = interval.kind == "score" and interval.worker != "reward"
    return "rollout" if on_mesh else PHASES[interval.kind]


def reward_metrics(found: StepScores, names: tuple[str, ...]) -> dict[str, Any]:
    """Mean and spread of the rewards of the groups that form a step, over all prompts and for each task.

    For several rewards these are of the weighted sum; mean, spread and range of each reward over the images to
    which it applies are added by its name.
    """
    members, records = found.members, found.images.records
    scores, rows = found.values[members], found.images.rows[members]
    shown, groups = [records[row] for row in rows], len(np.unique(rows))
    each = {name: rewards.there(own) for name, own in found.each(names).items()}
    each = {name: own for name, own in each.items() if len(own)}
    teaching = dataclasses.replace(found.settings, best_and_worst=0, drop_zero_std=True)
    taught = trained_images(teaching, found.scores[members], rows, len(records))
    metrics = {
        "reward": float(scores.mean()),
        "reward_std": float(scores.std()),
        "zero_std_groups": len(np.unique(rows[~taught])) / groups,
        **{
            f"reward_{what}of/{name}": float(statistic(own))
            for what, statistic in STATISTICS.items()
            for name, own in each.items()
        },
        **{f"reward/{tag}": mean for tag, mean in by_tag(shown, scores).items()},
        **{f"reward_std/{tag}": std for tag, std in by_tag(shown, scores, np.std).items()},
    }
    if len(records) > groups:
        metrics["candidates"] = float(found.generated)
    return metrics


def image_metrics(found: StepScores) -> dict[str, float]:
    """What the images of the groups that form a step look like, and how much those of a group differ."""
    if (seen := found.looks()) is None:
        return {}
    looks, groups = seen
    within = group_diversity(looks.thumbnails, groups)
    means = looks.means() | ({} if within is None else {"diversity": within})
    return {f"images/{name}": value for name, value in means.items()}
