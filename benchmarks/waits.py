"""Executors whose commands wait for a configured time instead of using devices."""

import dataclasses
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax.rewards.pool import RewardPool, Scored
from digen_jax.runtime.sampling import ready, then
from digen_jax.runtime.steps import ScoredChunk
from digen_jax.scheduling.commands import (
    Chunk,
    Command,
    Decode,
    Deliver,
    Generate,
    Score,
    Train,
    WeightsVersion,
)
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout, names_of, seconds_of


@dataclasses.dataclass(frozen=True)
class Waits:
    """Durations of commands: those of the simulator, with random numbers that depend on the work.

    Equal work gets the same number on all workers; with several devices it takes the time of the slowest one.
    """

    costs: Costs
    settings: Settings
    jitter: float = 0.0  # see `Disturbance`
    seed: int = 0

    def seconds(self, command: Command, worker: WorkerLayout | None = None) -> float:
        """Returns the duration of a command. `worker` executes it; None means that it occupies no device."""
        match command:
            case Generate() | Decode() | Train():
                work = command.chunk.step, command.chunk.index, getattr(command, "first", 0)
            case _:
                work = command.serial  # type: ignore[assignment]
        draw = random.Random(f"{self.seed} {command.kind} {work}").random
        return seconds_of(command, worker, self.costs, self.settings, self.jitter, draw)


def submit_scores(waits: Waits, pool: RewardPool, chunk: Chunk) -> Future[ScoredChunk]:
    """Scores a chunk by `score` below, which takes as long as the command; all scores are equal, without previews."""
    images, seconds = waits.settings.chunk_images, waits.seconds(Score(0, chunk, ""))
    black = np.zeros((images, 1, 1, 3), np.uint8)
    requested = pool.submit(black, [""] * images, [{"seconds": seconds}] * images)

    def scored(one: Scored) -> ScoredChunk:
        rewards = one.scores.columns[:, 0]
        return ScoredChunk(one.scores, rewards, one.seconds, image_stats=ready(None))

    return then(requested, scored)


class WaitingWorker:
    """Worker on which commands wait."""

    def __init__(self, name: str, layout: WorkerLayout, waits: Waits):
        self.name, self.devices = name, layout.devices
        self.late: list[float] = []  # per wait, in seconds
        self._debt = 0.0  # of the last wait
        self._layout, self._waits = layout, waits

    @contextmanager
    def lasting(self, command: Command) -> Iterator[None]:
        """Extends a block to the duration of a command on this worker.

        Timers wake threads up late, unlike a device, so the worker's next command is shortened by the delay.
        """
        start = time.perf_counter()
        end = start + max(0.0, self._waits.seconds(command, self._layout) - self._debt)
        yield
        rest = end - time.perf_counter()
        time.sleep(max(0.0, rest))
        self.late.append(time.perf_counter() - end)
        self._debt = self.late[-1] if rest > 0 else 0.0


class WaitingExecutors:
    """Executors for a `Driver` that only wait; the first worker is the home worker.

    The driver, its threads, the scheduler and the reward pool are the real ones.

    Attributes:
      home: The home worker.
      workers: All workers by name, the home worker last.
    """

    extremes = None
    versions: Mapping[WeightsVersion, None] = defaultdict(lambda: None)  # without weights

    def __init__(self, waits: Waits, workers: tuple[WorkerLayout, ...]):
        self._waits = waits
        named = dict(zip(names_of(workers), workers, strict=True))
        self._roles = {name: layout.roles for name, layout in named.items()}
        self.home, *others = (WaitingWorker(name, one, waits) for name, one in named.items())
        self.workers: dict[str, Any] = {one.name: one for one in (*others, self.home)}

    @property
    def devices(self) -> dict[str, int]:
        """Number of devices of each worker."""
        return {name: one.devices for name, one in self.workers.items()}

    def roles(self, worker: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns a worker's roles; no worker has a spare role. See `Executors`."""
        return self._roles[worker], ()

    def flops(self, command: Command) -> tuple[float, float]:
        """Returns no FLOPs; see `Executors`."""
        return 0.0, 0.0

    def do(self, command: Command) -> None:
        """Waits for the duration of a command. The home worker receives samples."""
        name = "" if isinstance(command, Deliver) else getattr(command, "worker", "")
        if command.answered:
            with self.workers.get(name, self.home).lasting(command):
                pass

    def score(self, command: Score, pool: RewardPool) -> Future[ScoredChunk]:
        """Scores with the reward below, which takes as long as the command."""
        return submit_scores(self._waits, pool, command.chunk)

    def scored(self, command: Score, scored_chunk: ScoredChunk) -> None:
        """Does nothing, because only the scheduler reads the scores."""

    def end_step(self) -> dict[str, float]:
        """Returns no metrics; the only ones are the driver's."""
        return {}


def score(
    images: UInt8[np.ndarray, "b h w 3"], prompts: Sequence[str], metadata: Sequence[dict]
) -> Float[np.ndarray, "b"]:
    """Reward that takes as long as its metadata state."""
    time.sleep(metadata[0]["seconds"])
    return np.zeros(len(images))
