"""A worker that samples: it encodes, generates and decodes chunks, and scores the images that it decoded.

Only scores and previews leave a worker's process. An image of a step leaves it only if it may be one of the best or
worst that are shown, one of an evaluation only if it is shown.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int, Num

from digen_jax import rewards
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_file, read_prompt_files
from digen_jax.diffusion.sampling import Trajectory
from digen_jax.errors import DivergedError
from digen_jax.images import bytes_or_nan, check_images, middle_frames, reward_input
from digen_jax.inference.sampling import sample_fixed
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.logging.evaluation import submit_image_stats
from digen_jax.parallel.accumulate import trained_part
from digen_jax.parallel.mesh import fetch, put
from digen_jax.parallel.reward_model import RewardModel
from digen_jax.parallel.sampler import EncodedPrompts, Weights
from digen_jax.parallel.system import Rollout
from digen_jax.rewards.built_in import on_mesh, resolve
from digen_jax.rewards.dry_run import dry_run
from digen_jax.rewards.pool import RewardPool, Scored
from digen_jax.rewards.sanity_check import run_sanity_checks
from digen_jax.runtime.array_transfer import ArrayTransfer, ConditioningKey, SamplesKey
from digen_jax.runtime.clock import part
from digen_jax.runtime.steps import HeldOut, Previews, ScoredChunk, Steps, ranked
from digen_jax.scheduling.commands import Chunk, WeightsVersion
from digen_jax.scheduling.settings import Deadline, Settings


@dataclasses.dataclass(frozen=True)
class ChunkScorer:
    """Scores the images that are decoded in its process, and computes their statistics.

    Attributes:
      pool: The rewards.
      weights: Weight of each column of scores.
      steps: Steps of the process.
      held_out: Prompts of evaluations.
      settings: Settings of the scheduler.
    """

    pool: RewardPool
    weights: Sequence[float]
    steps: Steps
    held_out: HeldOut
    settings: Settings

    def submit(
        self,
        chunk: Chunk,
        clips: Num[np.ndarray, "b t h w 3"],
        known: rewards.Answers = (),
    ) -> Future[ScoredChunk]:
        """Returns the future `ScoredChunk` of images as bytes; `known` has the scores of rewards on a mesh.

        It raises as `RewardPool.submit`'s, and DivergedError for NaN, which is no error of a reward.
        """
        try:
            check_images(clips)
        except DivergedError as error:
            return failed(error)
        if chunk.evaluation:
            records = self.held_out.of(chunk)
        else:
            step = self.steps[chunk.step]
            records, rows = step.records_of(chunk.index), step.rows[step.slice_of(chunk.index)]
        image_stats = submit_image_stats(middle_frames(clips))  # in parallel to the rewards
        prompts = [record["prompt"] for record in records]

        def scored_chunk(scored: Scored) -> ScoredChunk:
            values = rewards.total(scored.scores.columns, self.weights)
            found = ScoredChunk(
                scored.scores, values, scored.seconds, scored.exchanges, image_stats
            )
            most = self.settings.shown_images
            if chunk.evaluation:  # the first clips, or only their middle frames if no image is due
                first = clips[: max(0, most - self.held_out.first(chunk))]
                if not self.settings.is_shown(chunk.step):
                    first = middle_frames(first)[:, None]
                return found._replace(clips=first.copy())  # so that the others can be freed
            shown = self.settings.is_shown(chunk.step + 1)
            places = best_and_worst(values, rows, most if shown else 0)
            return found._replace(previews=Previews(places, middle_frames(clips)[places]))

        return then(self.pool.submit(reward_input(clips), prompts, records, known), scored_chunk)


def best_and_worst(
    values: Float32[np.ndarray, "b"], rows: Int[np.ndarray, "b"], keep: int
) -> Int[np.ndarray, "k"]:
    """Returns the places of a chunk's `keep` best and `keep` worst images, in ascending order."""
    return np.unique(np.concatenate([ranked(values, rows, sign)[:keep] for sign in (1, -1)]))


def then(found: Future, call: Callable[[Any], Any]) -> Future:
    """Returns the future of `call` with a future's result, in the thread that sets the result; passes errors on."""
    result: Future = Future()

    def settle(done: Future) -> None:
        try:
            result.set_result(call(done.result()))
        except BaseException as error:
            result.set_exception(error)

    found.add_done_callback(settle)
    return result


def ready(result: Any) -> Future:
    """Returns a future with a result."""
    found: Future = Future()
    found.set_result(result)
    return found


def failed(error: BaseException) -> Future:
    """Returns a future with an error."""
    found: Future = Future()
    found.set_exception(error)
    return found


class SamplingExecutor:
    """Encodes, generates and decodes on one mesh; every method returns when its work is done.

    Results are stored until they are fetched: images for the rewards in `images`, scores of the rewards on this mesh
    in `answers`, samples for training in the transfer. The proxy of a worker in another process has the same methods.

    Args:
      name: Name of the worker.
      rollout: Programs and parameters of the mesh.
      steps: Steps of the run.
      held_out: Prompts of evaluations.
      transfer: The transfer to other workers.
      scorers: Rewards on this mesh, by their numbers among those of the run.
    """

    def __init__(
        self,
        name: str,
        rollout: Rollout,
        steps: Steps,
        held_out: HeldOut,
        transfer: ArrayTransfer,
        scorers: Mapping[int, rewards.NamedReward] = MappingProxyType({}),
    ):
        self.name, self.rollout = name, rollout
        self.devices = rollout.group.mesh.size
        self.weights: dict[WeightsVersion, Weights] = {}
        self.images: dict[Chunk, np.ndarray] = {}  # as bytes, not yet scored
        self.answers: dict[Chunk, rewards.Answers] = {}
        self.removed = False
        self._steps, self._held_out = steps, held_out
        self._transfer, self._scorers = transfer, scorers
        self._fixed = Weights(None, rollout.base, rollout.frozen)
        self._prompts: dict[int, EncodedPrompts] = {}
        self._trajectories: dict[Chunk, Trajectory] = {}

    def hold(self, weights_version: WeightsVersion, tuned: Any) -> None:
        """Stores weights of this process, in the sampler's type and shardings."""
        self.weights[weights_version] = jax.block_until_ready(self.rollout.weights(tuned))

    def receive(self, weights_version: WeightsVersion) -> None:
        """Gets weights of the trainer; deleted weights are no longer needed."""
        tuned = self._transfer.get(weights_version, self.rollout.group.params, self.name)
        if tuned is not None:
            self.weights[weights_version] = Weights(tuned, self.rollout.base, self.rollout.frozen)

    def encode(self, number: int) -> None:
        """Encodes a step's prompts, for this mesh and for the trainer."""
        prompts = self.rollout.sampler.encode(self._fixed, self._steps[number].records)
        self._prompts[number] = jax.block_until_ready(prompts)
        if not self.removed:
            self._transfer.put(ConditioningKey(self.name, number), prompts)
        for old in [old for old in self._prompts if old < self._steps.first]:
            del self._prompts[old]
            self._transfer.delete(ConditioningKey(self.name, old))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Generates a chunk's trajectories with weights that it has received."""
        if chunk.evaluation:
            held_out, weights = self._held_out, self.weights[weights_version]
            records, first = held_out.of(chunk), held_out.first(chunk)
            trajectory = sample_fixed(
                self.rollout.evaluator, weights, records, first, held_out.batch
            )
        else:
            # In this order, since a chunk is dropped before its version.
            weights, step = self.weights.get(weights_version), self._steps.find(chunk)
            if step is None:
                return
            cut = step.slice_of(chunk.index)
            trajectory = self.rollout.sampler.generate(
                weights, self._prompts[chunk.step], step.rows[cut], *step.drawn.subset(cut)
            )
        self._trajectories[chunk] = jax.block_until_ready(trajectory)
        if not chunk.evaluation and self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def decode(self, chunk: Chunk) -> None:
        """Decodes a chunk's images to the host, and makes its samples available for training.

        The rewards on this mesh score the images.

        Raises:
          RewardError: their scores are not finite.
        """
        trajectory = self._trajectories.pop(chunk, None)
        if trajectory is None:
            return
        if chunk.evaluation:
            images = fetch(self.rollout.evaluator.decode(self._fixed, trajectory))
            records = self._held_out.of(chunk)
            self._keep(chunk, images[: len(records)], records)
            return
        images = fetch(self.rollout.sampler.decode(self._fixed, trajectory))
        step = self._steps.find(chunk)
        if step is None or self.removed:  # another worker generates the chunk
            return
        # First, so that samples are not available if scoring fails.
        self._keep(chunk, images, step.records_of(chunk.index))
        if self.removed:
            return
        keys = put(step.training_keys[step.slice_of(chunk.index)], self.rollout.group.batch)
        samples = trained_part(trajectory, keys), trajectory.sigmas
        self._transfer.put(SamplesKey(self.name, chunk), jax.block_until_ready(samples))
        if self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def _keep(self, chunk: Chunk, images: np.ndarray, records: list[dict[str, Any]]) -> None:
        """Stores images for the rewards; those on this mesh score them now."""
        images = bytes_or_nan(images)
        # With a NaN nothing is scored: the run ends when these images are fetched.
        if self._scorers and images.dtype == np.uint8:
            with part("score"):
                batch = reward_input(images), [record["prompt"] for record in records], records
                self.answers[chunk] = rewards.answers(self._scorers, batch)
        self.images[chunk] = images

    def score(self, chunk: Chunk, scorer: ChunkScorer) -> Future[ScoredChunk]:
        """Scores a decoded chunk, whose images are stored until `scored`; see `ChunkScorer.submit`."""
        return scorer.submit(chunk, self.images[chunk], self.answers.get(chunk, ()))

    def scored(self, chunk: Chunk) -> None:
        """Frees a chunk's images, which are not needed again."""
        self.images.pop(chunk, None)
        self.answers.pop(chunk, None)

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""
        self._trajectories.pop(chunk, None)
        self.scored(chunk)
        self._transfer.delete(SamplesKey(self.name, chunk))

    def drop_weights(self, weights_version: WeightsVersion) -> None:
        """Frees weights."""
        self.weights.pop(weights_version, None)

    def end_step(self, step: int) -> None:
        """Does nothing: see `WorkerProxy.end_step`."""

    def remove(self) -> None:
        """Marks the worker as removed: another one repeats its work, and results of calls in progress are not used."""
        self.removed = True


def open_rewards(config: TrainConfig) -> RewardPool:
    """Starts the rewards and tries them, by known scores and by `try_files`; the caller closes the pool.

    Raises:
      ConfigError: A reward does not work, or a score is not as it must be.
    """
    found, settings = resolve(config.rewards, meshes=True), config.reward_pool
    seconds = Deadline(config.runtime.deadline).seconds
    pool = RewardPool(found, settings.processes, settings.retries, seconds)
    try:
        run_sanity_checks(found, pool.score)
        try_files(config, pool.score)
    except BaseException:  # Ctrl-C, too: otherwise its processes would continue
        pool.close()
        raise
    return pool


def try_files(config: TrainConfig, score: Callable[..., Any]) -> None:
    """Tries rewards on the prompts of training and of evaluation, with made-up images of the size that each has.

    Args:
      config: The validated config.
      score: As `RewardPool.score`.

    Raises:
      ConfigError: See `dry_run`.
    """
    size = config.evaluation_size
    training = read_prompt_files(config.prompts.paths)
    dry_run(score, training, config.model.height, config.model.width)
    dry_run(score, [read_prompt_file(config.evaluation.prompts)], size.height, size.width)


def try_scorers(config: TrainConfig, scorers: tuple[RewardModel, ...]) -> None:
    """Tries the rewards on a mesh by known scores and as `try_files`; with several processes in all of them.

    Raises:
      ConfigError: A score is not as it must be.
    """
    if not scorers:
        return
    found = rewards.Rewards(tuple(named(on_mesh(config.rewards), scorers).values()))
    run_sanity_checks(found, found.score)
    try_files(config, found.score)
