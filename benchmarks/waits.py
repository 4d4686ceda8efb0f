"""Executors whose commands wait for a configured time instead of using devices."""

import dataclasses
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.sampling import ready, then
from digen_jax.runtime.steps import ScoredChunk
from digen_jax.scheduling.commands import (
    Chunk,
    Command,
    Decode,
    Deliver,
    DropChunks,
    DropVersion,
    Encode,
    Evaluate,
    Generate,
    Score,
    SyncWeights,
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
                work = command.serial
        draw = random.Random(f"{self.seed} {command.kind} {work}").random
        return seconds_of(command, worker, self.costs, self.settings, self.jitter, draw)


class WaitingScorer:
    """Scores chunks with a pool whose reward is `score` below, which takes as long as the command."""

    def __init__(self, waits: Waits, pool: RewardPool):
        self._waits, self._pool = waits, pool

    def submit(self, chunk: Chunk) -> Future[ScoredChunk]:
        """Returns the future scores of a chunk, which are all equal, without previews of images."""
        images, command = self._waits.settings.chunk_images, Score(0, chunk, "")
        seconds = self._waits.seconds(command)
        black = np.zeros((images, 1, 1, 3), np.uint8)
        asked = self._pool.submit(black, [""] * images, [{"seconds": seconds}] * images)
        return then(
            asked,
            lambda f: ScoredChunk(
                f.scores, f.scores.columns[:, 0], f.seconds, image_stats=ready(None)
            ),
        )


class WaitingWorker:
    """Worker that only waits, with the interface of `SamplingExecutor`."""

    def __init__(self, name: str, layout: WorkerLayout, waits: Waits):
        self.name, self.devices = name, layout.devices
        self.late: list[float] = []  # per wait, in seconds
        self._debt = 0.0  # of the last wait
        self._layout, self._waits = layout, waits

    def receive(self, weights_version: WeightsVersion) -> None:
        """Waits for a transfer of weights."""
        with self.lasting(SyncWeights(0, self.name, weights_version)):
            pass

    def encode(self, number: int) -> None:
        """Waits for encoding a step's prompts."""
        with self.lasting(Encode(0, self.name, number)):
            pass

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Waits for a chunk's trajectories."""
        with self.lasting(Generate(0, self.name, chunk, weights_version)):
            pass

    def decode(self, chunk: Chunk) -> None:
        """Waits for a chunk's images."""
        with self.lasting(Decode(0, self.name, chunk)):
            pass

    def score(self, chunk: Chunk, scorer: WaitingScorer) -> Future[ScoredChunk]:
        """Scores with `WaitingScorer`."""
        return scorer.submit(chunk)

    def drop_chunk(self, *_: object) -> None:
        """Does nothing, because there are no arrays."""

    scored = drop_weights = end_step = remove = drop_chunk

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
    """Executors for a `Driver` that only wait.

    The driver, its threads, the scheduler and the reward pool are the real ones.

    Attributes:
      home: The home worker.
      workers: All workers by name, the home worker last; the others may be in other processes.
    """

    extremes = None

    def __init__(
        self,
        waits: Waits,
        workers: tuple[WorkerLayout, ...],
        rollouts: Iterable[Any] | None = None,
    ):
        """Creates executors; the first worker is the home worker.

        Args:
          waits: Durations of commands.
          workers: All workers.
          rollouts: Executors in other processes of all but the home worker. None means that they wait in this process.
        """
        self._waits, self._step = waits, 0
        named = dict(zip(names_of(workers), workers, strict=True))
        self._roles = {name: layout.roles for name, layout in named.items()}
        self.home, *here = (WaitingWorker(name, one, waits) for name, one in named.items())
        others = here if rollouts is None else rollouts
        self.workers: dict[str, Any] = {one.name: one for one in (*others, self.home)}

    @property
    def devices(self) -> dict[str, int]:
        """Number of devices of each worker."""
        return {name: one.devices for name, one in self.workers.items()}

    @property
    def late(self) -> list[float]:
        """Delay of each wait of this process, in seconds."""
        here = [one for one in self.workers.values() if isinstance(one, WaitingWorker)]
        return [delay for one in here for delay in one.late]

    def roles(self, worker: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns a worker's roles; no worker has a spare role. See `Executors`."""
        return self._roles[worker], ()

    def do(self, command: Command) -> None:
        """Waits for the duration of a command, or passes it to its worker."""
        worker = self.workers.get(getattr(command, "worker", ""), self.home)
        match command:
            case Encode():
                worker.encode(command.step)
            case Generate():
                worker.generate(command.chunk, command.weights_version)
            case Decode():
                worker.decode(command.chunk)
            case SyncWeights():
                worker.receive(command.weights_version)
            case DropVersion():
                for one in list(self.workers.values()):
                    one.drop_weights(command.weights_version)
            case DropChunks():
                holders = itertools.product(list(self.workers.values()), command.chunks)
                for one, chunk in holders:
                    one.drop_chunk(chunk)
            case Deliver():
                with self.home.lasting(command):
                    pass
            case _ if command.answered:
                with worker.lasting(command):
                    pass

    def score(self, command: Score, pool: RewardPool) -> Future[ScoredChunk]:
        """Scores with the reward below, which takes as long as the command."""
        scorer = WaitingScorer(self._waits, pool)
        return self.workers[command.maker].score(command.chunk, scorer)

    def scored(self, command: Score, scored_chunk: ScoredChunk) -> None:
        """Notifies the chunk's worker; only the scheduler reads the scores."""
        if command.maker in self.workers:
            self.workers[command.maker].scored(command.chunk)

    def end_step(self) -> dict[str, float]:
        """Ends the step for all workers; the only metrics are the driver's."""
        for one in list(self.workers.values()):
            one.end_step(self._step)
        self._step += 1
        return {}

    def version_weights(self, weights_version: WeightsVersion) -> None:
        """Does nothing, because a version has no weights."""

    def evaluated(self, command: Evaluate) -> None:
        """Does nothing, because nothing is evaluated."""

    def remove(self, worker: str) -> None:
        """Removes a disconnected worker."""
        self.workers.pop(worker).remove()


def score(
    images: UInt8[np.ndarray, "b h w 3"], prompts: Sequence[str], metadata: Sequence[dict]
) -> Float[np.ndarray, "b"]:
    """Reward that takes as long as its metadata state."""
    time.sleep(metadata[0]["seconds"])
    return np.zeros(len(images))
