"""Executors whose commands wait for a stated time in place of device work."""

import dataclasses
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from statistics import fmean

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.judging import Judged, then
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    Deliver,
    Encode,
    Evaluate,
    Generate,
    Publication,
    Publish,
    Score,
    Train,
    Update,
)
from digen_jax.scheduling.planner.simulate import Layout
from digen_jax.scheduling.settings import Costs


@dataclasses.dataclass(frozen=True)
class Waits:
    """The durations of commands.

    Each takes its cost times a factor drawn uniformly from 1 - `jitter` to 1 + `jitter`. The factor depends
    on the seed and on the work, but not on the worker or the time, so that all placements have the same
    work to do. A fragment has a draw for every `unit` of its images and takes their mean.
    """

    costs: Costs
    images: int  # of a fragment
    unit: int  # divides the images of a fragment
    jitter: float
    seed: int

    def seconds(self, command: Command, speed: float = 1.0) -> float:
        """Duration of a command on a worker of a given speed."""
        return self.costs.seconds(command.kind, self.images, speed) * self.factor(command)

    def factor(self, command: Command) -> float:
        """The factor by which jitter changes a command's cost."""
        drawn = (
            random.Random(f"{self.seed} {command.kind} {part}") for part in self._work(command)
        )
        return 1 + self.jitter * fmean(one.uniform(-1, 1) for one in drawn)

    def _work(self, command: Command) -> list[tuple[int, int]]:
        """The parts of a step that a command is about, independent of the worker."""
        match command:
            case Generate() | Decode() | Deliver() | Score() | Train():
                fragment, units = command.fragment, self.images // self.unit
                first = fragment.index * units
                return [(fragment.step, part) for part in range(first, first + units)]
            case Encode():
                return [(command.step, 0)]
            case Update():
                return [(command.step, command.update)]
            case Publish():
                return [(command.version, 0)]
            case _:
                return [(command.serial, 0)]  # role switches differ between placements


class WaitingExecutors:
    """Executors for a `Driver` that only wait.

    The driver, its threads, the scheduler and the reward pool are the real ones.
    """

    extremes = None

    def __init__(self, waits: Waits, layout: Layout):
        meshes = {f"rollout {i}": mesh for i, mesh in enumerate(layout.rollout)}
        meshes[TRAINER] = layout.trainer
        self.devices: Mapping[str, int] = {name: mesh.devices for name, mesh in meshes.items()}
        self._speeds = {name: mesh.speed for name, mesh in meshes.items()}
        self._waits = waits
        self.late: list[float] = []  # timer wake-up delay of each wait, in seconds

    def do(self, command: Command) -> None:
        """Waits for the duration of a command."""
        if command.answered:
            end = time.perf_counter() + self._waits.seconds(command, self._speeds[command.worker])
            time.sleep(max(0.0, end - time.perf_counter()))
            self.late.append(time.perf_counter() - end)

    def score(self, command: Score, pool: RewardPool) -> Future[Judged]:
        """Asks the reward below, which takes the command's seconds."""
        images, seconds = self._waits.images, self._waits.seconds(command)
        black = np.zeros((images, 1, 1, 3), np.uint8)
        asked = pool.submit(black, [""] * images, [{"seconds": seconds}] * images)
        return then(
            asked, lambda found: Judged(found.scores, found.scores.columns[:, 0], found.seconds)
        )

    def scored(self, command: Score, judged: Judged) -> None:
        """Only the scheduler reads the scores."""

    def end_step(self) -> dict[str, float]:
        """No metrics besides those that the driver measures."""
        return {}

    def published(self, publication: Publication) -> None:
        """A version without weights."""

    def evaluated(self, command: Evaluate) -> None:
        """Nothing is evaluated."""

    def give_up(self, worker: str) -> None:
        """A worker that only waits holds nothing."""


def score(
    images: UInt8[np.ndarray, "b h w 3"], prompts: Sequence[str], metadata: Sequence[dict]
) -> Float[np.ndarray, "b"]:
    """A reward that takes the seconds that its metadata states."""
    time.sleep(metadata[0]["seconds"])
    return np.zeros(len(images))
