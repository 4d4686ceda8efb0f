"""All executors of a run on the leader: executes each command, on the calling thread."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from digen_jax import rewards
from digen_jax.engine.system import Rollout, System
from digen_jax.engine.trainer import TrainState
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.clock import paused
from digen_jax.runtime.evaluation import Evaluation, Gathering, HeldOut
from digen_jax.runtime.judging import Judge, Judged
from digen_jax.runtime.link import Link, LocalLink
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.scores import Extremes, StepScores
from digen_jax.runtime.steps import Steps
from digen_jax.runtime.summary import image_metrics, reward_metrics
from digen_jax.runtime.training import OtherTrainingExecutor, TrainingExecutor
from digen_jax.runtime.versions import Versions
from digen_jax.scheduling.commands import (
    TRAINER,
    Chunk,
    Command,
    Decode,
    Deliver,
    DropChunks,
    DropVersion,
    Encode,
    Evaluate,
    Generate,
    Publication,
    Publish,
    Score,
    Train,
    Update,
)
from digen_jax.scheduling.settings import Settings
from digen_jax.scheduling.state import SAMPLE, TRAIN


class LostSums(RuntimeError):
    """An update cannot be made, because a worker is lost that has trained a part of it."""


@runtime_checkable
class Executor(Protocol):
    """Executes a run's commands, wherever the meshes are.

    Attributes:
      devices: the number of devices of each worker, the trainer last.
      extremes: the best and the worst images of the step that ended last, where pictures of it are due.
    """

    devices: Mapping[str, int]
    extremes: Extremes | None

    def roles(self, worker: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The roles of a worker, in order of preference, and those that it takes only if no other worker has them."""

    def do(self, command: Command) -> None:
        """Executes a command other than a Score or an Evaluate; returns when its work is done."""

    def score(self, command: Score, pool: RewardPool) -> Future[Judged | None]:
        """Has a chunk scored where it was decoded, by `pool` if that is in this process; returns at once.

        The future has None for a chunk that was dropped. It raises what `Judge.submit`'s does, and Gone.
        """

    def scored(self, command: Score, judged: Judged | None) -> None:
        """Notes what `score` has found, which is needed no longer where it was decoded."""

    def evaluated(self, command: Evaluate) -> Any:
        """The result of a version's evaluation, all of whose chunks are scored."""

    def end_step(self) -> dict[str, float]:
        """Ends the present step; returns the metrics of its rewards and updates."""

    def published(self, publication: Publication) -> Any:
        """Published weights that are kept, in a checkpoint's form."""

    def give_up(self, worker: str) -> None:
        """Marks a sampling mesh as failed or hung: its later results are ignored."""


@runtime_checkable
class Samples(Protocol):
    """A sampling mesh's executor, here (`SamplingExecutor`) or in another process; every call ends with its work.

    Attributes:
      name: the worker's.
      devices: of its mesh.
    """

    name: str
    devices: int

    def receive(self, publication: Publication) -> None:
        """Takes published weights."""

    def encode(self, number: int) -> None:
        """Encodes a step's prompts."""

    def generate(self, chunk: Chunk, publication: Publication) -> None:
        """Generates a chunk's trajectories."""

    def decode(self, chunk: Chunk) -> None:
        """Decodes a chunk's images, which stay where they are."""

    def score(self, chunk: Chunk, judge: Judge) -> Future[Judged | None]:
        """Has them scored, by `judge` if they are in this process; returns at once. See `Executor.score`."""

    def scored(self, chunk: Chunk) -> None:
        """Frees them: nobody asks for them again."""

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""

    def drop_weights(self, publication: Publication) -> None:
        """Frees published weights."""

    def end_step(self, step: int) -> None:
        """A step has ended."""

    def give_up(self) -> None:
        """Another mesh repeats its work."""


@dataclasses.dataclass(frozen=True)
class Duties:
    """Settings of the executors in addition to the scheduler's."""

    rewards: tuple[str, ...]  # the names of the scores that have a weight
    held_out: Sequence[dict[str, Any]] = ()  # the prompts of evaluations
    trainer_samples: bool = False  # next to sampling meshes, too
    tag_weights: str = "in place"  # the trainer samples with these: see `engine.system.tag_group`
    # the rewards that the sampling meshes compute, by their numbers: those of `Rollout.scorers`
    on_mesh: Mapping[int, rewards.RewardSettings] = dataclasses.field(default_factory=dict)


class Executors:
    """The executors of the trainer and, by worker, of the sampling meshes, which may be in other processes.

    They share the data of the steps that follow from the config (`steps`); the link moves arrays between them.
    The scheduler decides the order of commands. `do` may be called from one thread for each worker, and from
    others for transfers to and from it.
    """

    def __init__(
        self,
        system: System,
        settings: Settings,
        duties: Duties,
        state: TrainState,
        batches: Iterator[list[dict[str, Any]]],
        first: int = 0,
        kept: Mapping[int, Any] | None = None,
        link: Link | None = None,
    ):
        """`first` is the step at whose start `state` is; `kept` are the older versions to hold.

        `link` reaches the sampling meshes of other processes, which `join`; None: there are none.
        """
        self.system, self._duties, self._settings = system, duties, settings
        self.extremes: Extremes | None = None
        algorithm = system.trainer.algorithm
        shape = settings.images, settings.chunk_images
        self.steps = Steps(batches, *shape, system.draws, first, algorithm.set_steps)
        self._scores: dict[int, StepScores] = {}
        self._held_out = HeldOut(duties.held_out, settings)
        of_rewards = system.advantages.reward_weights
        self._gathering = Gathering(self._held_out, duties.rewards, of_rewards)
        self._link: Link = link or LocalLink()
        apart = not system.placement.colocated
        several = apart or bool(system.trainers)
        self.last_update = settings.updates - 1
        # Only then may a chunk or an evaluation need, after an update, the arrays that the update consumes.
        later = several or algorithm.reads_behaviour or algorithm.reads_start
        # A resumed run may also have begun chunks of the next step with the newest version, on separate meshes.
        stale = settings.max_policy_lag > 0 and (later or first > 0)
        keep = stale or (later and self.last_update > 0)
        self.versions = Versions(self._link, keep, system.sent, exact=bool(system.trainers))
        for version, tuned in (kept or {}).items():
            self.versions.add(Publication(version), tuned)
        others = {f"worker {i}": one for i, one in enumerate(system.trainers, start=1)}
        trainers = TRAINER, *others
        self.trainer = TrainingExecutor(
            system, settings, self.steps, self.versions, self._link, state, trainers
        )
        self.others = {
            name: OtherTrainingExecutor(name, system.on(one), self.steps, self._link, trainers)
            for name, one in others.items()
        }
        self.trainer.publish(first)
        rollouts = system.rollouts if apart else ()
        named = ((f"rollout {i}", one) for i, one in enumerate(rollouts))
        self.rollouts: dict[str, Samples] = {name: self._sampling(name, one) for name, one in named}
        self._assistants: dict[str, SamplingExecutor] = {}  # training workers that sample, too

    @property
    def devices(self) -> dict[str, int]:
        """The number of devices of every worker."""
        others = {**self.rollouts, **self.others}
        found = {name: executor.devices for name, executor in others.items()}
        return found | {TRAINER: self.trainer.devices}

    @property
    def state(self) -> TrainState:
        """The trainer's state."""
        return self.trainer.state

    def roles(self, worker: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `Executor`."""
        if worker != TRAINER and worker not in self.others:
            return (SAMPLE,), ()
        if self.system.placement.colocated:
            return (SAMPLE, TRAIN), ()
        return ((TRAIN, SAMPLE), ()) if self._duties.trainer_samples else ((TRAIN,), (SAMPLE,))

    def join(self, sampler: Samples) -> None:
        """Adds a sampling mesh."""
        self.rollouts[sampler.name] = sampler

    def sampling(self, worker: str) -> Samples:
        """A worker's sampling executor; that of a training worker is created at its first use."""
        found = self.rollouts.get(worker) or self._assistants.get(worker)
        if found is None:
            with paused():  # it may have to read components, and compiles
                rollout = self._training(worker).system.assistant(self._duties.tag_weights)
            found = self._assistants.setdefault(worker, self._sampling(worker, rollout))
        return found

    def _training(self, worker: str) -> TrainingExecutor | OtherTrainingExecutor:
        if worker == TRAINER:
            return self.trainer
        if worker not in self.others:
            raise LostSums(f"the sums of {worker} are lost")
        return self.others[worker]

    def give_up(self, worker: str) -> None:
        """See `Executor`."""
        self.others.pop(worker, None)
        for held in (self.rollouts, self._assistants):
            if worker in held:
                held.pop(worker).give_up()
        self._link.give_up(worker)

    def do(self, command: Command) -> None:
        """Executes a command. The cases are in the order of a chunk's path, from its prompts to the next version."""
        match command:
            case Encode():
                _ = self.steps[command.step]  # drawn here, too, where another process encodes it
                self.sampling(command.worker).encode(command.step)
            case Generate():
                self._hold(command)
                self.sampling(command.worker).generate(command.chunk, command.publication)
            case Decode():
                self.sampling(command.worker).decode(command.chunk)
            # Between these, the rewards score the images: `score`, `scored`.
            case Deliver():
                self._training(command.to).deliver(command)
            case Train():
                scores = self.scores(command.chunk.step)
                self._training(command.worker).train(command, scores)
            case Update():
                self._update(command)
            case Publish():
                self._publish(command)
            case DropVersion():
                self.versions.drop(command.publication)
                for executor in (*self.others.values(), *self._samplers()):
                    executor.drop_weights(command.publication)
            case DropChunks():
                # First of all: a chunk in generation is then not kept.
                self.steps.drop(command.chunks)
                holders = (self.trainer, *self.others.values(), *self._samplers())
                for holder, chunk in itertools.product(holders, command.chunks):
                    holder.drop_chunk(chunk)
            case _:
                raise TypeError(f"{command} is not for the executors")

    def _hold(self, command: Generate) -> None:
        """Has a training worker sample with the weights that it trains, unless it was sent others."""
        worker, publication = command.worker, command.publication
        if worker in self.rollouts or publication in self.sampling(worker).weights:
            return
        if worker == TRAINER:
            self.sampling(worker).receive(publication)
        else:
            self.sampling(worker).hold(publication, self.others[worker].published(publication))

    def _update(self, command: Update) -> None:
        others = [self._training(name) for name in command.trained if name != TRAINER]
        version = command.step + 1 if command.update == self.last_update else None
        self.trainer.update(self.scores(command.step), version, [one.sums() for one in others])
        for one in list(self.others.values()):
            one.updated(self.steps.first if version is None else version)

    def _publish(self, command: Publish) -> None:
        other = self.others.get(command.worker)
        if other is not None and other.receive(command.publication):
            return
        if other is not None and command.publication not in self.versions:
            return  # newer weights exist
        executor = self.sampling(command.worker)
        executor.receive(command.publication)
        # The trainer drops weights before the sampling meshes do.
        if command.publication not in self.versions:
            executor.drop_weights(command.publication)

    def scores(self, step: int) -> StepScores:
        """The scores of a step."""
        found = self._scores.get(step)
        if found is None:
            begun = StepScores.begin(self.steps[step], self.system.advantages)
            found = self._scores.setdefault(step, begun)
        return found

    def score(self, command: Score, pool: RewardPool) -> Future[Judged | None]:
        """See `Executor`; the rewards on the mesh that made the images have scored them already."""
        weights = self.system.advantages.reward_weights
        judge = Judge(pool, weights, self.steps, self._held_out, self._settings)
        return self.sampling(command.maker).score(command.chunk, judge)

    def scored(self, command: Score, judged: Judged | None) -> None:
        """See `Executor`. A process that follows knows the scores only."""
        chunk = command.chunk
        maker = self._assistants.get(command.maker) or self.rollouts.get(command.maker)
        if maker is not None:
            maker.scored(chunk)
        if not chunk.evaluation and self.steps.find(chunk) is None:
            return  # it was dropped
        if judged is None:
            raise RuntimeError(f"{command.maker} has no scores of {chunk}")
        scores, looks = judged.scores, judged.looks
        if chunk.evaluation:
            if looks is not None:
                self._gathering.note(chunk, scores, judged.clips, looks)
            return
        known = self.scores(chunk.step)
        known.note(chunk.index, scores)
        if looks is not None:
            known.see(chunk.index, looks, judged.kept)

    def evaluated(self, command: Evaluate) -> Evaluation:
        """See `Executor`."""
        return self._gathering.take(command.version)

    def forget_evaluation(self, version: int) -> None:
        """Forgets an evaluation that nobody asks for."""
        self._gathering.forget(version)

    def end_step(self) -> dict[str, float]:
        """See `Executor`."""
        scores = self.scores(self.steps.first)
        ended = self.steps.first
        del self._scores[ended]
        self.steps.end()
        for executor in list(self.rollouts.values()):
            executor.end_step(ended)
        self.extremes = scores.extremes(self._settings.shown_images)
        seen = image_metrics(scores)
        return self.trainer.metrics() | reward_metrics(scores, self._duties.rewards) | seen

    def published(self, publication: Publication) -> Any:
        """See `Executor`."""
        return self.versions[publication]

    def _samplers(self) -> Iterator[Samples]:
        """The sampling executors that exist at present."""
        return iter((*self._assistants.values(), *self.rollouts.values()))

    def _sampling(self, name: str, rollout: Rollout) -> SamplingExecutor:
        scorers = named(self._duties.on_mesh, rollout.scorers)
        return SamplingExecutor(name, rollout, self.steps, self._held_out, self._link, scorers)


def replay(executors: Executors, pool: RewardPool, log: list[Command]) -> TrainState:
    """Executes the commands of a recorded log one after the other; returns the state after the last.

    In the order in which the scheduler sent commands, everything is there in time, and the trainer gets them
    in the same order as in the run: equal inputs lead to bitwise equal results.
    """
    scored = set()
    for command in log:
        if isinstance(command, Score):
            if command.chunk in scored:
                continue  # the reward had failed
            scored.add(command.chunk)
            judged = pool.insist(functools.partial(executors.score, command, pool))
            executors.scored(command, judged)
            continue
        follow(executors, command)
    return executors.state


def follow(executors: Executors, command: Command) -> None:
    """Executes a command of a log; after its last command a step or an evaluation is forgotten."""
    if isinstance(command, Evaluate):
        executors.forget_evaluation(command.version)
        return
    executors.do(command)
    if isinstance(command, Update) and command.update == executors.last_update:
        executors.end_step()
