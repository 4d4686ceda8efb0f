"""Executors of all workers, in the coordinator: execute each command on the calling thread.

The path of a chunk, command by command (the order in `Executors.do`):

    prompts --Encode--> conditioning --Generate--> trajectory --Decode--> images --Score--> rewards, advantages
                                                                    '--Deliver--> samples --Train--> gradient
    gradient --Update--> a new version of the weights --SyncWeights--> workers
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from digen_jax.config.train_config import TrainConfig
from digen_jax.logging.evaluation import Evaluation, Extremes
from digen_jax.parallel.system import Rollout, System
from digen_jax.parallel.trainer import TrainState
from digen_jax.rewards.built_in import mesh_rewards, on_mesh
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.array_transfer import ArrayTransfer, MissingSums, SamplesKey, SyncedWeights
from digen_jax.runtime.checkpointing import TrainCheckpoint
from digen_jax.runtime.clock import paused
from digen_jax.runtime.sampling import ChunkScorer, SamplingExecutor
from digen_jax.runtime.steps import EvaluationScores, HeldOut, ScoredChunk, Steps, StepScores
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

    Args:
      system: Parts of the run.
      config: The validated config.
      held_out: Prompts of evaluations.
      checkpoint: State of the run at the start of its next step.
      batches: Prompt records of each step from this one on.
      transfer: Transfer to workers in other processes, which `join`. None means that all workers are local.

    Attributes:
      extremes: The best and worst images of the last completed step, if images are due.
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
        settings = self.settings = config.scheduled(len(held_out))
        self.system, self._config = system, config
        self.extremes: Extremes | None = None
        first, algorithm = checkpoint.done, system.trainer.algorithm
        shape = settings.images, settings.chunk_images
        self.steps = Steps(batches, *shape, system.rng, first, algorithm.set_steps)
        self._scores: dict[int, StepScores] = {}
        self._held_out = HeldOut(held_out, settings)
        self._names = tuple(name for one in config.rewards for name in one.entries.values())
        self._weights = system.advantages.reward_weights
        self.evaluation_scores = EvaluationScores(self._held_out, self._names, self._weights)
        self._transfer: ArrayTransfer = transfer or ArrayTransfer()
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
        for version, tuned in (checkpoint.in_flight.kept if checkpoint.in_flight else {}).items():
            self.versions.add(WeightsVersion(version), tuned)
        self.trainer = TrainingExecutor(
            system, settings, self.steps, self.versions, self._transfer, checkpoint.state, names
        )
        self.others = {
            name: OtherTrainingExecutor(name, system.on(one), self.steps, self._transfer, names)
            for name, one in zip(names[1:], system.trainers, strict=False)
        }
        self.trainer.add_version(first)
        rollouts = enumerate(system.rollouts if separate else ())
        self.rollouts = {f"rollout {i}": self._sampling(f"rollout {i}", one) for i, one in rollouts}
        self._assistants: dict[str, SamplingExecutor] = {}  # training workers that also sample

    @property
    def devices(self) -> dict[str, int]:
        """Number of devices of each worker, the home worker last."""
        workers: dict[str, Any] = {**self.rollouts, **self.others, TRAINER: self.trainer}
        return {name: executor.devices for name, executor in workers.items()}

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

    def join(self, worker: Any) -> None:
        """Adds a worker in another process (`distributed.workers.WorkerProxy`)."""
        if worker.name in self._trainers:
            self.others[worker.name] = self._assistants[worker.name] = worker
        else:
            self.rollouts[worker.name] = worker

    def _sampling(self, name: str, rollout: Rollout) -> SamplingExecutor:
        scorers = mesh_rewards(on_mesh(self._config.rewards), rollout.scorers)
        return SamplingExecutor(name, rollout, self.steps, self._held_out, self._transfer, scorers)

    def sampling(self, worker: str) -> SamplingExecutor:
        """Returns a worker's sampling executor. That of a training worker is created on first use."""
        found = self.rollouts.get(worker) or self._assistants.get(worker)
        if found is None:
            with paused():  # may read components and compile
                weights = self._config.runtime.tag_weights
                rollout = self._training(worker).system.assistant(weights)
            found = self._assistants.setdefault(worker, self._sampling(worker, rollout))
        return found

    def _samplers(self) -> tuple[SamplingExecutor, ...]:
        return *self._assistants.values(), *self.rollouts.values()

    def _holders(self) -> tuple[Any, ...]:
        """Returns all executors except the home worker's training executor, each once."""
        return tuple(dict.fromkeys((*self.others.values(), *self._samplers())))

    def _training(self, worker: str) -> Any:
        if worker == TRAINER:
            return self.trainer
        if worker not in self.others:
            raise MissingSums(worker)
        return self.others[worker]

    def remove(self, worker: str) -> None:
        """Removes a worker that failed, hung or disconnected; ignores its later results."""
        self.others.pop(worker, None)
        for samplers in (self.rollouts, self._assistants):
            if worker in samplers:
                samplers.pop(worker).remove()
        self._transfer.drop_peer(worker)

    def do(self, command: Command) -> None:
        """Executes any command except Score and Evaluate; blocks until its work is done."""
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
                if command.to != TRAINER and command.worker in self.rollouts:
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
            empty = StepScores.create(self.steps[step], self.system.advantages)
            found = self._scores.setdefault(step, empty)
        return found

    def score(self, command: Score, pool: RewardPool) -> Future[ScoredChunk | None]:
        """Scores a chunk in the process that decoded it (by `pool` if local); returns immediately.

        The future is None for a dropped chunk. It raises WorkerDisconnected and the errors of `ChunkScorer.submit`.
        """
        scorer = ChunkScorer(pool, self._weights, self.steps, self._held_out, self.settings)
        return cast(Any, self.sampling(command.maker)).score(command.chunk, scorer)

    def scored(self, command: Score, scored_chunk: ScoredChunk | None) -> None:
        """Stores the result of `score`. Processes other than the coordinator get only the scores."""
        chunk = command.chunk
        maker = self._assistants.get(command.maker) or self.rollouts.get(command.maker)
        if maker is not None:
            maker.scored(chunk)
        if not chunk.evaluation and self.steps.find(chunk) is None:
            return  # dropped
        if scored_chunk is None:
            raise RuntimeError(f"{command.maker} has no scores of {chunk}")
        if not chunk.evaluation:
            self.scores(chunk.step).add(chunk.index, scored_chunk.scores)
        if scored_chunk.image_stats is None:
            return
        if chunk.evaluation:
            self.evaluation_scores.add(chunk, scored_chunk)
        else:
            self.scores(chunk.step).add_previews(
                chunk.index, scored_chunk.image_stats, scored_chunk.previews
            )

    def evaluated(self, command: Evaluate) -> Evaluation:
        """Returns the result of a version's evaluation after all its chunks are scored."""
        return self.evaluation_scores.take(command.version)

    def end_step(self) -> dict[str, float]:
        """Ends the current step; returns its reward and update metrics."""
        ended = self.steps.first
        scores = self.scores(ended)
        del self._scores[ended]
        self.steps.end()
        for executor in self._samplers():
            executor.end_step(ended)
        self._transfer.end_step(ended)
        self.extremes = scores.extremes(self.settings.shown_images)
        return self.trainer.metrics() | scores.metrics(self._names) | scores.image_metrics()

    def version_weights(self, weights_version: WeightsVersion) -> Any:
        """Returns stored weights in the layout of a checkpoint."""
        return self.versions[weights_version]


def follow(executors: Executors, command: Command) -> None:
    """Executes a command from the log; frees a step or an evaluation after its last command."""
    if isinstance(command, Evaluate):
        executors.evaluation_scores.forget(command.version)
        return
    executors.do(command)
    if isinstance(command, Update) and command.update == executors.last_update:
        executors.end_step()
