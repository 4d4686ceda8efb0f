"""All executors of a run in one process: what each command does, whoever's thread it is done on."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from digen_jax import rewards
from digen_jax.engine.divergence import check_images
from digen_jax.engine.system import System, tag_group
from digen_jax.engine.trainer import State
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.evaluation import Evaluation, Progress, evaluate
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from digen_jax.runtime.summary import reward_metrics
from digen_jax.runtime.training import TrainingExecutor, Versions
from digen_jax.scheduling.commands import (
    TRAINER,
    Command,
    Decode,
    DropFragments,
    DropVersion,
    Encode,
    Fragment,
    Generate,
    Publish,
    Score,
    Switch,
    Train,
    Update,
)
from digen_jax.scheduling.settings import Settings

Scores = Float32[np.ndarray, "b"] | Float32[np.ndarray, "b k"]  # see `rewards.call`


@dataclasses.dataclass(frozen=True)
class Duties:
    """What executors are told beside the scheduler's settings."""

    rewards: tuple[str, ...]  # the names of the rewards
    evaluation_batch: int  # images that an evaluation samples at once
    tag_weights: str = "in place"  # what the trainer samples from: see `engine.system.tag_group`


class Executors:
    """The sampling meshes' executors, by worker, and the trainer's; they share steps and versions.

    The order of commands is the scheduler's. `do` may be called from one thread for each worker,
    and from another one for its publications.
    """

    def __init__(
        self,
        system: System,
        settings: Settings,
        duties: Duties,
        state: State,
        batches: Iterator[list[dict[str, Any]]],
        first: int = 0,
        kept: Mapping[int, Any] | None = None,
    ):
        """`first` is the step that `state` is the start of, `kept` the older versions to be held."""
        self.system, self._duties = system, duties
        algorithm = system.trainer.algorithm
        self.steps = Steps(
            batches,
            settings.images,
            settings.fragment_images,
            system.draws,
            first,
            system.advantages,
            algorithm.set_steps,
        )
        apart = not system.placement.colocated
        self.last_update = settings.updates - 1
        # What an update consumes is sampled from, or compared with, behind it only where these say so.
        later = apart or algorithm.reads_behaviour or algorithm.reads_start
        # And where meshes sampled apart before, which may have begun something ahead by the newest version.
        stale = settings.staleness > 0 and (later or first > 0)
        self.versions = Versions(stale or (later and self.last_update > 0))
        for version, tuned in (kept or {}).items():
            self.versions.add(version, tuned, own=False)
        self.trainer = TrainingExecutor(system, self.steps, self.versions, state, settings.updates)
        self.trainer.publish(first)
        rollouts = system.rollouts if apart else ()
        self.rollouts = {f"rollout {i}": self._sampling(one) for i, one in enumerate(rollouts)}

    @property
    def devices(self) -> dict[str, int]:
        """How many every worker has."""
        meshes = {name: e.rollout.group.mesh for name, e in self.rollouts.items()}
        meshes[TRAINER] = self.system.placement.trainer.mesh
        return {name: mesh.size for name, mesh in meshes.items()}

    @property
    def state(self) -> State:
        """The trainer's."""
        return self.trainer.state

    @functools.cached_property
    def assistant(self) -> SamplingExecutor:
        """The trainer's devices as a sampling mesh; made when they are first wanted as one."""
        system = self.system
        if system.placement.colocated:
            return self._sampling(system.rollouts[0])
        group = tag_group(system.placement.trainer, self._duties.tag_weights)
        base = system.policy.sampler_base(system.base)
        return self._sampling(system.rollouts[0].moved(group, base))

    def sampling(self, worker: str) -> SamplingExecutor:
        """A worker's executor; the trainer's is its assistant."""
        return self.assistant if worker == TRAINER else self.rollouts[worker]

    def give_up(self, worker: str) -> None:
        """A sampling mesh failed or hangs: what it may still come back with is not taken."""
        executor = self.rollouts.pop(worker)
        executor.given_up = True
        self.versions.give_up(executor.rollout)

    def do(self, command: Command) -> None:
        """Carries a command out; a Score is the rewards' to do."""
        match command:
            case Encode():
                self.sampling(command.worker).encode(command.step)
            case Generate():
                self.sampling(command.worker).generate(command.fragment, command.version)
            case Decode():
                self.sampling(command.worker).decode(command.fragment)
            case Train():
                self.trainer.train(command.fragment, command.early)
            case Update():
                last = command.update == self.last_update
                self.trainer.update(command.step + 1 if last else None)
            case Publish():
                self._publish(command.version, self.sampling(command.worker))
            case DropVersion():
                self.versions.drop(command.version)
                for executor in self._samplers():
                    executor.drop_version(command.version)
            case DropFragments():
                # First of all: what is generated at the moment is then not kept.
                self.steps.drop(command.fragments)
                for executor, fragment in itertools.product(self._samplers(), command.fragments):
                    executor.drop_fragment(fragment)
            case Switch():
                pass  # The programs of both roles and their arrays are there at any time.
            case _:
                raise TypeError(f"{command} is not for the executors")

    def _publish(self, version: int, executor: SamplingExecutor) -> None:
        """Brings a version to a sampling mesh; one that is gone, before or meanwhile, is asked for no more."""
        weights = self.versions.send(version, executor.rollout)
        if weights is not None:
            executor.weights[version] = weights
        # A version is dropped from the trainer before it is dropped from the sampling meshes.
        if version not in self.versions:
            executor.drop_version(version)

    def to_score(self, fragment: Fragment) -> tuple:
        """The arguments of the reward for a decoded fragment.

        Raises:
          DivergedError: its images hold NaN, which no reward should be blamed for.
        """
        images, *others = self.steps.of(fragment).to_score(fragment.index)
        check_images(images)
        return images, *others

    def scored(self, fragment: Fragment, scores: Scores) -> Float32[np.ndarray, "b"]:
        """A fragment's scores have come, wherever they were given: its pictures are needed no more.

        Returns:
          What the scheduler compares images by, of several rewards their weighted sum.
        """
        step, weights = self.steps.find(fragment), self.system.advantages.reward_weights
        if step is not None:
            step.decoded.pop(fragment.index, None)
            step.scores[step.cut(fragment.index)] = scores.reshape(-1, len(weights))
        return rewards.total(scores, weights)

    def _samplers(self) -> Iterator[SamplingExecutor]:
        """Those that there are at present."""
        return filter(None, (self.__dict__.get("assistant"), *self.rollouts.values()))

    def end_step(self) -> dict[str, float]:
        """The step that is on has ended: the metrics of its rewards and updates."""
        step = self.steps.end()
        return self.trainer.metrics() | reward_metrics(step, self._duties.rewards)

    def tuned(self, version: int) -> Any:
        """A version that is held, on the trainer mesh."""
        return self.versions[version]

    def evaluate(
        self,
        worker: str,
        tree: Any,
        records: Sequence[dict[str, Any]],
        score: Callable[..., Scores],
        progress: Progress = iter,
    ) -> Evaluation:
        """Images and scores of tuned parameters, sampled by a worker between its commands."""
        rollout, duties = self.sampling(worker).rollout, self._duties
        weights = jax.block_until_ready(rollout.weights(tree))
        of_rewards = self.system.advantages.reward_weights
        return evaluate(
            rollout.evaluator,
            weights,
            records,
            score,
            duties.rewards,
            duties.evaluation_batch,
            progress=progress,
            reward_weights=of_rewards,
        )

    def _sampling(self, rollout: Any) -> SamplingExecutor:
        return SamplingExecutor(rollout, self.steps, self.system.placement.trainer)


def replay(executors: Executors, pool: RewardPool, log: list[Command]) -> State:
    """Carries out the commands of a recorded log one after the other; the state behind the last.

    An order in which the scheduler sent commands is one in which everything is there in time, and
    the trainer gets them in the order in which it got them then: equal inputs lead to equal bits.
    """
    scored = set()
    for command in log:
        if isinstance(command, Score):
            if command.fragment in scored:
                continue  # the reward had failed
            scored.add(command.fragment)
            scores = pool.score(*executors.to_score(command.fragment))
            executors.scored(command.fragment, scores)
            continue
        follow(executors, command)
    return executors.state


def follow(executors: Executors, command: Command) -> None:
    """Carries a command of a log out; behind its last one a step is forgotten."""
    executors.do(command)
    if isinstance(command, Update) and command.update == executors.last_update:
        executors.end_step()
