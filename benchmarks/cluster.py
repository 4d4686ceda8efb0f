"""Emulated cluster: Ray rollout workers that wait instead of using devices, compared with the simulator.

Driver, scheduler, worker proxies, Ray, the array transfer and the rewards are those of a run. Weights, encoded prompts,
samples and scores are transferred as small trees; each transfer takes as long as for a model's tree.
"""

import dataclasses
import gc
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from statistics import fmean, median
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.runtime import Measured, TimedRun, simulations, time_steps
from benchmarks.waits import WaitingExecutors, WaitingWorker, Waits, score, submit_scores
from digen_jax.config.sections import EvaluationSection, PlacementSection, PromptsSection
from digen_jax.distributed.engine import LOCAL, RayEngine
from digen_jax.distributed.transfer import TrainerTransfer, WorkerTransfer
from digen_jax.distributed.worker_process import Member, RolloutProcess
from digen_jax.distributed.workers import RemoteWorkers, WorkerProxy
from digen_jax.errors import check_choice, check_positive
from digen_jax.parallel.placement import RolloutAxes
from digen_jax.parallel.sampler import SampleDraws
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.array_transfer import ConditioningKey, SamplesKey
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.steps import ScoredChunk, Steps
from digen_jax.scheduling.commands import (
    SAMPLE,
    TRAIN,
    TRAINER,
    Chunk,
    Command,
    Decode,
    Deliver,
    DropChunks,
    DropVersion,
    Encode,
    Generate,
    Score,
    SyncWeights,
    Update,
    WeightsVersion,
)
from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout

CHUNK, GROUP = 4, 8  # images
# Bytes of the transferred trees.
WEIGHTS, SAMPLES, PROMPTS = 2**20, 2**18, 2**16
FOUR, UNEQUAL = (1.0,) * 4, (2.0, 1.0, 1.0, 0.5)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of workers, and the policy lag."""

    name: str
    speeds: tuple[float, ...]  # of the rollout workers
    chunks: int  # per step
    training: float = 0.9  # of a step's chunks, relative to their generation by all rollout workers
    samples: bool = False  # whether the home worker also samples
    max_policy_lag: int = 0  # see `Settings`

    def costs(self, seconds: float) -> Costs:
        """Returns costs for which the rollout workers generate for about `seconds` per step."""
        chunk = seconds * sum(self.speeds) / self.chunks  # at speed 1
        return Costs(
            generate=0.9 * chunk / CHUNK,
            decode=0.1 * chunk / CHUNK,
            train=self.training * seconds / self.chunks / CHUNK,
            deliver=0.02 * seconds / CHUNK,
            score=0.03 * seconds / CHUNK,
            encode=0.03 * seconds,
            update=0.03 * seconds,
            sync=0.06 * seconds,
        )

    def settings(self, steps: int) -> Settings:
        """Returns the scheduler's settings for a number of steps."""
        groups = self.chunks * CHUNK // GROUP
        return Settings(steps, groups, GROUP, CHUNK, max_policy_lag=self.max_policy_lag)

    @property
    def workers(self) -> tuple[WorkerLayout, ...]:
        """Workers with one device each: the home worker, which has speed 1, and workers that only sample."""
        home = WorkerLayout(roles=(TRAIN, SAMPLE) if self.samples else (TRAIN,))
        return home, *(WorkerLayout(roles=(SAMPLE,), speed=speed) for speed in self.speeds)


LAYOUTS = (
    Layout("1 worker", (1.0,), 8),
    Layout("4 workers", FOUR, 16),
    Layout("4 workers, home samples", FOUR, 18, training=0.5, samples=True),
    Layout("4 workers, lag 1", FOUR, 16, training=1.0, max_policy_lag=1),
    Layout("4 workers of unequal speeds", UNEQUAL, 18),
    Layout("the same, home samples, lag 1", UNEQUAL, 20, 0.5, samples=True, max_policy_lag=1),
    Layout("16 workers", (1.0,) * 16, 32),
)


def chosen(numbers: Sequence[str], seconds: float) -> list[Layout]:
    """Returns the layouts with these numbers, counted from 1, or all; raises ConfigError for invalid options."""
    check_positive("--step_seconds", seconds)
    known = {str(number): layout for number, layout in enumerate(LAYOUTS, start=1)}
    for number in numbers:
        check_choice("--layouts", number, tuple(known))
    return [known[number] for number in numbers or known]


def measure(
    layout: Layout, seconds: float, run: TimedRun, on_step: Callable[[], object] = lambda: None
) -> Measured:
    """Runs a layout in processes and in the simulator; calls `on_step` after every step.

    Raises:
      ConfigError: Ray is not installed.
      RuntimeError: a rollout worker was not ready in time, or disconnected.
    """
    settings, costs = layout.settings(run.length), layout.costs(seconds)
    emulation = Emulation(layout.workers, Waits(costs, settings, run.jitter, run.seed))
    with driving(emulation) as (driver, workers):
        started = _processes(workers)
        step_times, policy_lag = time_steps(driver, run, on_step)
        if _processes(workers) != started or len(started) < len(layout.speeds):
            raise RuntimeError("a rollout worker was not ready in time or disconnected: see above")
    reports = simulations(layout.workers, costs, settings, run)
    predicted = fmean(median(run.step_times(report.step_ends)) for report in reports)
    names = f"1 + {len(layout.speeds)}"
    return Measured(names, step_times, reports[0].bound, predicted, policy_lag)


def _processes(workers: RemoteWorkers) -> dict[str, int]:
    """Returns the process id of each ready rollout worker."""
    places = workers.places()
    return {name: place["process"] for name, place in places.items() if name != TRAINER}


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Stand-in for the config of `RemoteWorkers` and `WaitingProcess`.

    The first worker is the home worker; the others only sample.
    """

    workers: tuple[WorkerLayout, ...]
    waits: Waits
    prompts: PromptsSection = dataclasses.field(default=PromptsSection(file=""))
    evaluation: EvaluationSection = dataclasses.field(default=EvaluationSection(prompts=""))

    @property
    def placement(self) -> PlacementSection:
        """Section with the number of workers, of one device each."""
        return PlacementSection(rollout=RolloutAxes(data=1, workers=len(self.workers) - 1))


@contextmanager
def driving(emulation: Emulation) -> Iterator[tuple[Driver, RemoteWorkers]]:
    """Yields the driver of a run on a new Ray instance, and its workers; raises ConfigError without Ray."""
    waits, processes = emulation.waits, len(emulation.workers) - 1
    with ExitStack() as stack:
        engine = stack.enter_context(closing(RayEngine(LOCAL, show=False, cpus=processes)))
        workers = RemoteWorkers(cast(Any, emulation), engine, kind=WaitingProcess)
        stack.callback(workers.close)
        rewards = stack.enter_context(closing(RewardPool(alone("waits", score), 0)))

        def make(proxies: list[WorkerProxy]) -> Driver:
            # In the simulator's order, regardless of which started first.
            proxies.sort(key=lambda one: _number(one.name))
            executors: Any = DrivingExecutors(waits, emulation.workers, proxies, workers.transfer)
            return Driver(executors, Scheduler(waits.settings, waits.costs), rewards)

        yield stack.enter_context(workers.driving(make, stops=lambda: False)), workers


class DrivingExecutors(WaitingExecutors):
    """Executors that pass commands to rollout workers in other processes, and transfer trees to and from them."""

    def __init__(
        self,
        waits: Waits,
        workers: tuple[WorkerLayout, ...],
        rollouts: Sequence[WorkerProxy],
        transfer: TrainerTransfer,
    ):
        super().__init__(waits, workers)
        self._step, self._transfer = 0, transfer
        self._rollouts = {one.name: one for one in rollouts}
        self.workers = self._rollouts | {TRAINER: self.home}
        transfer.put(WeightsVersion(0), _tree(WEIGHTS))

    def do(self, command: Command) -> None:
        """Passes a command to its worker, or waits for it here and transfers its tree."""
        rollout = self._rollouts.get(getattr(command, "worker", ""))
        match command:
            case Encode() if rollout:
                rollout.encode(command.step)
            case Generate() if rollout:
                rollout.generate(command.chunk, command.weights_version)
            case Decode() if rollout:
                rollout.decode(command.chunk)
            case SyncWeights() if rollout:
                rollout.receive(command.weights_version)
            case DropVersion():
                self._transfer.delete(command.weights_version)
                for one in list(self._rollouts.values()):
                    one.drop_weights(command.weights_version)
            case DropChunks():
                for one, chunk in itertools.product(list(self._rollouts.values()), command.chunks):
                    one.drop_chunk(chunk)
            case Deliver():
                with self.home.lasting(command):
                    self._take_samples(command)
            case _:
                super().do(command)
        if isinstance(command, Update):
            self._transfer.put(WeightsVersion(command.step + 1), _tree(WEIGHTS))

    def _take_samples(self, command: Deliver) -> None:
        worker, chunk = command.worker, command.chunk
        # The encoded prompts of the step are stored only once.
        for key in (ConditioningKey(worker, chunk.step), SamplesKey(worker, chunk)):
            found = self._transfer.get(key, _one_device, TRAINER)
            self._transfer.delete(key)
        if found is None:
            raise RuntimeError(f"{worker} has no samples of {chunk}")

    def score(self, command: Score, pool: RewardPool) -> Future[ScoredChunk]:
        """Scores a chunk in the process that generated it."""
        if rollout := self._rollouts.get(command.maker):
            return cast(Any, rollout.score(command.chunk))
        return submit_scores(self._waits, pool, command.chunk)

    def scored(self, command: Score, scored_chunk: ScoredChunk) -> None:
        """Notifies the process that generated the chunk."""
        if rollout := self._rollouts.get(command.maker):
            rollout.scored(command.chunk)

    def end_step(self) -> dict[str, float]:
        """Ends the step in all processes."""
        for one in list(self._rollouts.values()):
            one.end_step(self._step)
        self._step += 1
        return {}

    def remove(self, worker: str) -> None:
        """Removes a disconnected worker."""
        self.workers.pop(worker)
        self._rollouts.pop(worker).remove()


class WaitingProcess(RolloutProcess):
    """Process of a rollout worker that waits."""

    def open(self, config: Emulation, first: int, place: Any = None) -> Member:
        """Creates the waiting worker; see `RolloutProcess`."""
        layout = config.workers[1 + _number(self._name)]
        waits, settings = config.waits, config.waits.settings
        self._pool = RewardPool(alone("waits", score), 0)
        self._transfer = WorkerTransfer()
        batches = _records(settings.groups, first)
        self._steps = Steps(settings, batches, cast(Any, _NoDraws()), first)
        self._executor: Any = TransferringWorker(
            self._name, layout, waits, self._steps, self._transfer
        )
        gc.freeze()  # as in a run, so that later collections take milliseconds
        return Member(layout.devices, socket.gethostname(), os.getpid(), "none")


class TransferringWorker(WaitingWorker):
    """Rollout worker that waits, receives weights and offers small trees, with `SamplingExecutor`'s interface."""

    def __init__(
        self, name: str, layout: WorkerLayout, waits: Waits, steps: Steps, transfer: WorkerTransfer
    ):
        super().__init__(name, layout, waits)
        self._steps, self._transfer = steps, transfer

    def receive(self, weights_version: WeightsVersion) -> None:
        """Receives weights."""
        with self.lasting(SyncWeights(0, self.name, weights_version)):
            self._transfer.get(weights_version, _one_device, self.name)

    def encode(self, number: int) -> None:
        """Encodes and offers the prompts of a step."""
        with self.lasting(Encode(0, self.name, number)):
            _ = self._steps[number]
        self._transfer.put(ConditioningKey(self.name, number), _tree(PROMPTS))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Waits for a chunk's trajectories."""
        with self.lasting(Generate(0, self.name, chunk, weights_version)):
            pass

    def decode(self, chunk: Chunk) -> None:
        """Decodes and offers the samples of a chunk."""
        with self.lasting(Decode(0, self.name, chunk)):
            pass
        self._transfer.put(SamplesKey(self.name, chunk), _tree(SAMPLES))

    def score(self, chunk: Chunk, pool: RewardPool) -> Future[ScoredChunk]:
        """See `submit_scores`."""
        return submit_scores(self._waits, pool, chunk)

    def drop_chunk(self, *_: object) -> None:
        """Does nothing, because there are no arrays."""

    scored = drop_weights = end_step = drop_chunk


class _NoDraws:
    """Stand-in for `SampleRng` that compiles nothing."""

    def draw(self, step: int, serials: np.ndarray, images: np.ndarray) -> SampleDraws:
        """Returns zeros."""
        return SampleDraws(cast(Any, np.zeros(len(serials), np.uint32)), None, 0, None)


def _number(name: str) -> int:
    return int(name.split()[-1])


def _tree(size: int) -> dict[str, np.ndarray]:
    return {"numbers": np.zeros(size, np.uint8)}


def _one_device(tree: Any) -> Any:
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)


def _records(groups: int, first: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the prompts of every step."""
    for step in itertools.count(first):
        yield [{"prompt": "", "serial": step * groups + number} for number in range(groups)]
