"""Executors of all workers, in the coordinator: execute each command on the calling thread.

The path of a chunk, command by command (the order in `Executors.do`):

    prompts --Encode--> conditioning --Generate--> trajectory --Decode--> images --Score--> rewards, advantages
                                                                    '--Deliver--> samples --Train--> gradient
    gradient --Update--> a new version of the weights --SyncWeights--> workers
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import jax

from digen_jax.config.train_config import TrainConfig
from digen_jax.logging.evaluation import Evaluation, Extremes, ImageStats
from digen_jax.parallel.system import Rollout, System
from digen_jax.parallel.trainer import TrainState
from digen_jax.planning.flops import RunFlops, peak_flops
from digen_jax.rewards.built_in import mesh_rewards
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.array_transfer import ArrayTransfer, MissingSums, SamplesKey, SyncedWeights
from digen_jax.runtime.checkpointing import TrainCheckpoint
from digen_jax.runtime.clock import paused
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import ScoredChunk, Steps, StepScores
from digen_jax.runtime.training import OtherTrainingExecutor, TrainingExecutor
from digen_jax.scheduling.commands import (
    SAMPLE,
    TRAIN,
    TRAINER,
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
    Update,
    WeightsVersion,
    trainer_names,
)


class Executors:
    """Executors of all workers, local or in other processes.

    They share the prompts and keys of the steps; the transfer moves arrays between them. The scheduler decides the
    order of commands. `do` may be called from one thread per worker, plus one per transfer to or from it.

    `held_out` are the prompts of evaluations, `batches` the prompt records of each step after `checkpoint`. `transfer`
    moves arrays to workers in other processes, which `join`; None means that all workers are local.
    """

    def __init__(
        self,
        system: System,
        config: TrainConfig,
        held_out: Sequence[dict[str, Any]],
        checkpoint: TrainCheckpoint,
        batches: Iterator[list[dict[str, Any]]],
        transfer: ArrayTransfer | None = None,
    ):
        self.system, self._config = system, config
        # Best and worst images of the last completed step, if images are due.
        self.extremes: Extremes | None = None
        first, algorithm = checkpoint.done, system.trainer.algorithm
        self.steps = Steps.of(config, batches, first, held_out)
        settings = self.settings = self.steps.settings
        self._scores: dict[int, StepScores] = {}
        self._names = tuple(name for one in config.rewards for name in one.entries.values())
        self._weights = tuple(weight for one in config.rewards for weight in one.weights)
        # Scored chunks of evaluations, by version and index.
        self._evaluations = defaultdict[int, dict[int, ScoredChunk]](dict)
        self._transfer = transfer or ArrayTransfer()
        separate = not system.placement.colocated
        many = len(system.trainers) + system.placement.remote_trainers
        self._trainers = names = trainer_names(1 + many)
        self.last_update = settings.updates - 1
        # Whether a chunk or an evaluation may need arrays after the update that consumes them.
        later = separate or many or algorithm.reads_behavior or algorithm.reads_start
        # On separate meshes, a resumed run may have started chunks of the next step with the newest version.
        stale = settings.max_policy_lag > 0 and (later or first > 0)
        keep = stale or (later and self.last_update > 0)
        self.versions = SyncedWeights(self._transfer, bool(keep), system.sent, exact=many > 0)
        for version, tuned in checkpoint.in_flight.kept.items():
            self.versions.add(WeightsVersion(version), tuned)
        self.trainer = TrainingExecutor(
            system, self.steps, self.versions, self._transfer, checkpoint.state, names
        )
        self.others = {
            name: OtherTrainingExecutor(name, system.on(one), self.steps, self._transfer, names)
            for name, one in zip(names[1:], system.trainers, strict=False)
        }
        self.trainer.add_version(first)
        rollouts = enumerate(system.rollouts if separate else ())
        # Those of training workers are created on first use.
        self.samplers = {f"rollout {i}": self._sampling(f"rollout {i}", one) for i, one in rollouts}

    @property
    def devices(self) -> dict[str, int]:
        """Number of devices of each worker, the home worker last."""
        workers: dict[str, Any] = {**self.samplers, **self.others}
        workers.pop(TRAINER, None)
        return {name: one.devices for name, one in (*workers.items(), (TRAINER, self.trainer))}

    @property
    def state(self) -> TrainState:
        """The trainer's state."""
        return self.trainer.state

    def roles(self, worker: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns (roles, spare roles) of a worker; see `Joined`."""
        if worker != TRAINER and worker not in self.others:
            return (SAMPLE,), ()
        if self.system.placement.colocated:
            return (SAMPLE, TRAIN), ()
        samples = self._config.placement.trainer.samples
        return ((TRAIN, SAMPLE), ()) if samples else ((TRAIN,), (SAMPLE,))

    @functools.cached_property
    def _flops(self) -> RunFlops:
        return RunFlops.of(self._config, self.system.policy)

    def flops(self, command: Generate | Train) -> tuple[float, float]:
        """Returns the needed FLOPs of a command, and the device-seconds that they take at the peak of its devices.

        Counts passes of the denoising network (see `planning.flops`) of real images, not of padding. The seconds are
        NaN if the peak of the devices is unknown.
        """
        worker, precision = command.worker, self._config.precision
        found = self.trainer if worker == TRAINER else self.others.get(worker)
        executor: Any = found or self.samplers.get(worker)
        if executor is None:  # removed
            return 0.0, 0.0
        if isinstance(command, Train):
            flops = self._flops.chunk[command.update > 0] * command.count / self.settings.passes
            dtype = precision.arithmetic
        elif command.chunk.evaluation:
            flops = self._flops.evaluated * len(self.steps.evaluated(command.chunk)[1])
            dtype = precision.rollout or precision.arithmetic
        else:
            flops = self._flops.image * self.settings.chunk_images
            dtype = precision.rollout or precision.arithmetic
        return flops, flops / peak_flops(executor.device_kind, dtype)

    def join(self, worker: Any) -> None:
        """Adds a worker in another process (`distributed.workers.WorkerProxy`)."""
        self.samplers[worker.name] = worker
        if worker.name in self._trainers:
            self.others[worker.name] = worker

    def _sampling(self, name: str, rollout: Rollout) -> SamplingExecutor:
        scorers = mesh_rewards(self._config.rewards, rollout.scorers)
        data = self.steps, self._transfer, scorers, self._weights, self.system.given
        return SamplingExecutor(name, rollout, *data)

    def sampling(self, worker: str) -> SamplingExecutor:
        """Returns a worker's sampling executor."""
        found = self.samplers.get(worker)
        if found is None:
            with paused():  # may read components and compile
                weights = self._config.runtime.tag_weights
                rollout = self._training(worker).system.assistant(weights)
            found = self.samplers.setdefault(worker, self._sampling(worker, rollout))
        return found

    def _holders(self) -> tuple[Any, ...]:
        """Returns all executors except the home worker's training executor, each once."""
        return tuple(dict.fromkeys((*self.others.values(), *self.samplers.values())))

    def _training(self, worker: str) -> Any:
        if worker == TRAINER:
            return self.trainer
        if worker not in self.others:
            raise MissingSums(worker)
        return self.others[worker]

    def remove(self, worker: str) -> None:
        """Removes a worker that failed, hung or disconnected; ignores its later results."""
        self.others.pop(worker, None)
        if sampler := self.samplers.pop(worker, None):
            sampler.remove()
        self._transfer.drop_peer(worker)

    def do(self, command: Command) -> None:
        """Executes any command except Score; blocks until its work is done. A profile shows it by its kind."""
        chunk = getattr(command, "chunk", None)
        arguments = {} if chunk is None else {"step": chunk.step, "chunk": chunk.index}
        with jax.profiler.TraceAnnotation(command.kind, **arguments):
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Encode():
                _ = self.steps[command.step]  # also if another process encodes it
                self.sampling(command.worker).encode(command.step)
            case Generate():
                self._provide_weights(command)
                self.sampling(command.worker).generate(command.chunk, command.weights_version)
            case Decode():
                self.sampling(command.worker).decode(command.chunk)
            # Scoring happens between these: `score`, `scored`.
            case Deliver():
                self._training(command.to).deliver(command)
                rollout = command.worker in self.samplers.keys() - self._trainers
                if rollout and command.to != TRAINER:
                    self._transfer.delete(SamplesKey(command.worker, command.chunk))
            case Train():
                ranks = self.system.trainer.algorithm.ranks
                scores = self.scores(command.chunk.step)
                batch = scores.batch(command.chunk.index, ranks, command.early)
                self._training(command.worker).train(command, batch)
            case Update():
                self._update(command)
            case SyncWeights():
                self._sync(command)
            case DropVersion():
                self.versions.drop(command.weights_version)
                for executor in self._holders():
                    executor.drop_weights(command.weights_version)
            case DropChunks():
                # First, so that a chunk in generation is discarded.
                self.steps.drop(command.chunks)
                holders = self.trainer, *self._holders()
                for holder, chunk in itertools.product(holders, command.chunks):
                    holder.drop_chunk(chunk)
            case Evaluate():
                pass  # the driver reports the scores
            case _:
                raise TypeError(f"{command} is not for the executors")

    def _provide_weights(self, command: Generate) -> None:
        """Passes the trained weights to a training worker's own sampler, unless it has received them."""
        worker, weights_version = command.worker, command.weights_version
        if isinstance(other := self.others.get(worker), OtherTrainingExecutor):
            other.share_weights(self.sampling(worker), weights_version)
        elif worker == TRAINER and weights_version not in self.sampling(worker).weights:
            self.sampling(worker).receive(weights_version)

    def _update(self, command: Update) -> None:
        others = [name for name in command.trained if name != TRAINER]
        if others:
            self._add_sums(others)
        version = command.step + 1 if command.update == self.last_update else None
        self.trainer.update(self.scores(command.step), version, others[:1])
        for one in list(self.others.values()):
            one.updated(self.steps.first if version is None else version)

    def _add_sums(self, workers: Sequence[str]) -> None:
        """Reduces the gradient sums of workers onto the first one, in a binary tree. Raises MissingSums."""
        first, *others = workers
        parts: list[list[str]] = []  # 1, 2, 4, ... workers
        while others:
            parts.append(others[: 2 ** len(parts)])
            others = others[len(parts[-1]) :]
        with ThreadPoolExecutor(len(parts) or 1) as threads:
            list(threads.map(self._add_sums, parts))
        self._training(first).offer_sums([part[0] for part in parts])

    def _sync(self, command: SyncWeights) -> None:
        other, weights_version = self.others.get(command.worker), command.weights_version
        if other is not None and (
            other.take_trained(weights_version) or weights_version not in self.versions
        ):
            return  # already received for training, or superseded
        executor = self.sampling(command.worker)
        executor.receive(weights_version)
        # The trainer may have dropped the weights during the transfer.
        if weights_version not in self.versions:
            executor.drop_weights(weights_version)

    def scores(self, step: int) -> StepScores:
        """Returns the scores of a step."""
        found = self._scores.get(step)
        if found is None:
            empty = StepScores(self.steps[step], self.system.advantages)
            found = self._scores.setdefault(step, empty)
        return found

    def score(self, command: Score, pool: RewardPool) -> Future[ScoredChunk | None]:
        """Scores a chunk in the process that decoded it (by `pool` if local); returns immediately.

        The future is None for a dropped chunk. It raises WorkerDisconnected and the errors of `SamplingExecutor.score`.
        """
        return cast(Any, self.sampling(command.maker)).score(command.chunk, pool)

    def scored(self, command: Score, scored_chunk: ScoredChunk | None) -> None:
        """Stores the result of `score`. Processes other than the coordinator get only the scores."""
        chunk = command.chunk
        if maker := self.samplers.get(command.maker):
            maker.scored(chunk)
        if not chunk.evaluation and self.steps.find(chunk) is None:
            return  # dropped
        if scored_chunk is None:
            raise RuntimeError(f"{command.maker} has no scores of {chunk}")
        if not chunk.evaluation:
            self.scores(chunk.step).add(chunk.index, scored_chunk)
        elif scored_chunk.image_stats is not None:  # else another process reports it
            self._evaluations[chunk.step][chunk.index] = scored_chunk

    def evaluated(self, version: int) -> Evaluation:
        """Returns and frees a version's evaluation, whose chunks are all scored."""
        parts = [part for _, part in sorted(self._evaluations.pop(version).items())]
        clips, scores = [part.clips for part in parts], [part.scores for part in parts]
        records = self.steps.held_out[: sum(len(part.columns) for part in scores)]
        found = Evaluation.of(records, clips, scores, self._names, self._weights)
        stats = ImageStats.concatenate([part.image_stats.result() for part in parts])
        return found._replace(image_stats=stats)

    def end_step(self) -> dict[str, float]:
        """Ends the current step; returns its reward and update metrics."""
        ended = self.steps.first
        scores = self.scores(ended)
        del self._scores[ended]
        self.steps.forget(ended + 1)
        for executor in list(self.samplers.values()):
            executor.end_step(ended)
        self._transfer.end_step(ended)
        self.extremes = scores.extremes(self.settings.shown_images)
        if self.system.given is not None:
            return self.trainer.metrics()
        return self.trainer.metrics() | scores.metrics(self._names) | scores.image_metrics()


def follow(executors: Executors, command: Command) -> None:
    """Executes a command from the log; frees a step after its last command."""
    executors.do(command)
    if isinstance(command, Update) and command.update == executors.last_update:
        executors.end_step()
