"""Rollout workers on Ray that wait instead of using devices, and the driver of a run that has them.

Driver, scheduler, worker proxies, Ray, the array transfer and the rewards are those of a run. Weights, encoded prompts,
samples and scores are transferred as small trees; each transfer lasts as long as that of a model's tree would.
"""

import dataclasses
import gc
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.waits import WaitingExecutors, WaitingJudge, WaitingWorker, Waits, score
from digen_jax.config.sections import EvaluationSection, PlacementSection, PromptsSection
from digen_jax.distributed.engine import LOCAL, RayEngine
from digen_jax.distributed.transfer import TrainerTransfer, WorkerTransfer
from digen_jax.distributed.worker_process import Opened, RolloutProcess
from digen_jax.distributed.workers import RemoteWorkers, WorkerProxy
from digen_jax.parallel.placement import RolloutAxes
from digen_jax.parallel.sampler import SampleDraws
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.array_transfer import ConditioningKey, SamplesKey
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Command,
    Deliver,
    DropVersion,
    Encode,
    SyncWeights,
    Update,
    WeightsVersion,
)
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.simulator import WorkerLayout

# Bytes of the trees that are transferred.
WEIGHTS, SAMPLES, PROMPTS = 2**20, 2**18, 2**16


@dataclasses.dataclass(frozen=True)
class Emulation:
    """What `RemoteWorkers` and `WaitingProcess` get instead of a recipe.

    The first worker is the home worker, and the others only sample.
    """

    workers: tuple[WorkerLayout, ...]
    waits: Waits
    prompts: PromptsSection = dataclasses.field(default=PromptsSection(file=""))
    evaluation: EvaluationSection = dataclasses.field(default=EvaluationSection(prompts=""))

    @property
    def placement(self) -> PlacementSection:
        """The number of workers, of one device each."""
        return PlacementSection(rollout=RolloutAxes(data=1, workers=len(self.workers) - 1))


@contextmanager
def driving(emulation: Emulation) -> Iterator[tuple[Driver, RemoteWorkers]]:
    """The driver of a run on a Ray instance of its own, and its workers; raises ConfigError without Ray."""
    waits, processes = emulation.waits, len(emulation.workers) - 1
    with ExitStack() as stack:
        engine = stack.enter_context(closing(RayEngine(LOCAL, show=False, cpus=processes)))
        workers = RemoteWorkers(emulation, engine, kind=WaitingProcess)
        stack.callback(workers.close)
        rewards = stack.enter_context(closing(RewardPool(alone("waits", score), 0)))

        def make(proxies: list[WorkerProxy]) -> Driver:
            # In the order of the simulator, whichever started first.
            proxies.sort(key=lambda one: _number(one.name))
            executors = DrivingExecutors(waits, emulation.workers, proxies, workers.transfer)
            return Driver(executors, Scheduler(waits.settings, waits.costs), rewards)

        yield stack.enter_context(workers.driving(make, stops=lambda: False)), workers


def processes(workers: RemoteWorkers) -> dict[str, int]:
    """The process of each ready worker."""
    places = workers.places()
    return {name: place["process"] for name, place in places.items() if name != TRAINER}


class DrivingExecutors(WaitingExecutors):
    """Waits of the trainer, which transfers trees to and from rollout workers in other processes."""

    def __init__(
        self,
        waits: Waits,
        workers: tuple[WorkerLayout, ...],
        rollouts: Sequence[WorkerProxy],
        transfer: TrainerTransfer,
    ):
        super().__init__(waits, workers, rollouts)
        self._transfer = transfer
        transfer.put(WeightsVersion(0), _tree(WEIGHTS))

    def do(self, command: Command) -> None:
        """See `WaitingExecutors`."""
        if isinstance(command, Deliver):
            with self.home.lasting(command):
                self._deliver(command.worker, command.chunk)
            return
        super().do(command)
        if isinstance(command, Update):
            self._transfer.put(WeightsVersion(command.step + 1), _tree(WEIGHTS))
        elif isinstance(command, DropVersion):
            self._transfer.delete(command.weights_version)

    def _deliver(self, worker: str, chunk: Chunk) -> None:
        """Takes a chunk's samples, and the step's encoded prompts if the worker has them."""
        for key in (ConditioningKey(worker, chunk.step), SamplesKey(worker, chunk)):
            found = self._transfer.get(key, _one_device, TRAINER)
            self._transfer.delete(key)
        if found is None:
            raise RuntimeError(f"{worker} has no samples of {chunk}")


class WaitingProcess(RolloutProcess):
    """The process of a rollout worker that waits."""

    def open(self, recipe: Emulation, first: int, place: Any = None) -> Opened:
        """See `RolloutProcess`."""
        layout = recipe.workers[1 + _number(self._name)]
        waits, settings = recipe.waits, recipe.waits.settings
        self._pool = RewardPool(alone("waits", score), 0)
        self._scorer = WaitingJudge(waits, self._pool)
        self._transfer = WorkerTransfer()
        shape = settings.images, settings.chunk_images
        self._steps = Steps(_records(settings.groups, first), *shape, _NoDraws(), first)
        self._executor = TransferringWorker(self._name, layout, waits, self._steps, self._transfer)
        gc.freeze()  # as in a run, so that later collections take milliseconds
        return Opened(layout.devices, socket.gethostname(), os.getpid())


class TransferringWorker(WaitingWorker):
    """Waits of a rollout worker, which takes weights meanwhile and offers small trees afterwards."""

    def __init__(
        self, name: str, layout: WorkerLayout, waits: Waits, steps: Steps, transfer: WorkerTransfer
    ):
        super().__init__(name, layout, waits)
        self._steps, self._transfer = steps, transfer

    def receive(self, weights_version: WeightsVersion) -> None:
        """See `SamplingExecutor`."""
        with self.lasting(SyncWeights(0, self.name, weights_version)):
            self._transfer.get(weights_version, _one_device, self.name)

    def encode(self, number: int) -> None:
        """See `SamplingExecutor`."""
        with self.lasting(Encode(0, self.name, number)):
            _ = self._steps[number]
        self._transfer.put(ConditioningKey(self.name, number), _tree(PROMPTS))

    def decode(self, chunk: Chunk) -> None:
        """See `SamplingExecutor`."""
        super().decode(chunk)
        self._transfer.put(SamplesKey(self.name, chunk), _tree(SAMPLES))


class _NoDraws:
    """Instead of `SampleRng`: draws and compiles nothing."""

    def draw(self, step: int, serials: np.ndarray, images: np.ndarray) -> SampleDraws:
        """Zeros."""
        return SampleDraws(np.zeros(len(serials), np.uint32), None, 0, None)


def _number(name: str) -> int:
    return int(name.split()[-1])


def _tree(size: int) -> dict[str, np.ndarray]:
    return {"numbers": np.zeros(size, np.uint8)}


def _one_device(tree: Any) -> Any:
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)


def _records(groups: int, first: int) -> Iterator[list[dict[str, Any]]]:
    """The prompts of every step."""
    for step in itertools.count(first):
        yield [{"prompt": "", "serial": step * groups + number} for number in range(groups)]
