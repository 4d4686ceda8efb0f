"""Sampling executor: encodes, generates and decodes chunks, and scores the decoded images on the same worker.

Only scores and previews leave a worker's process. Previews are the candidates for a step's best and worst images, and
the logged images of an evaluation.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, UInt8

from digen_jax import rewards
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_file, read_prompt_files
from digen_jax.diffusion.sampling import Trajectory, Transitions
from digen_jax.errors import DivergedError
from digen_jax.images import middle_frames, reward_input
from digen_jax.logging.evaluation import submit_image_stats
from digen_jax.parallel.accumulate import trained_part
from digen_jax.parallel.mesh import fetch, put
from digen_jax.parallel.policy import EncodedPrompts
from digen_jax.parallel.sampler import Weights, fetch_clips, sample_fixed
from digen_jax.parallel.system import GivenImages, Rollout
from digen_jax.rewards.built_in import mesh_rewards, resolve
from digen_jax.rewards.dry_run import dry_run
from digen_jax.rewards.pool import RewardPool, Scored
from digen_jax.rewards.sanity_check import run_sanity_checks
from digen_jax.runtime.array_transfer import ArrayTransfer, ConditioningKey, SamplesKey
from digen_jax.runtime.clock import part
from digen_jax.runtime.steps import ScoredChunk, Steps, ranked
from digen_jax.scheduling.commands import Chunk, WeightsVersion
from digen_jax.scheduling.settings import time_limit

if TYPE_CHECKING:  # imported with the learned rewards
    from digen_jax.parallel.reward_model import RewardModel


def best_and_worst(
    values: Float32[np.ndarray, "b"], rows: Int[np.ndarray, "b"], keep: int
) -> Int[np.ndarray, "k"]:
    """Returns the sorted indices of a chunk's `keep` best and `keep` worst images."""
    return np.unique(np.concatenate([ranked(values, rows, sign)[:keep] for sign in (1, -1)]))


def then(found: Future, call: Callable[[Any], Any]) -> Future:
    """Maps `call` over a future; `call` runs in the thread that sets the result, and errors are propagated."""
    result: Future = Future()

    def settle(done: Future) -> None:
        try:
            result.set_result(call(done.result()))
        except BaseException as error:
            result.set_exception(error)

    found.add_done_callback(settle)
    return result


def ready(result: Any) -> Future:
    """Returns a completed future."""
    found: Future = Future()
    found.set_result(result)
    return found


def failed(error: BaseException) -> Future:
    """Returns a failed future."""
    found: Future = Future()
    found.set_exception(error)
    return found


class SamplingExecutor:
    """Encodes, generates and decodes on one mesh; every method blocks until its work is done.

    Results are stored until they are fetched: images to score in `images`, scores of the rewards on this mesh
    (`scorers`, by index into the run's rewards) in `answers`, samples for training in the transfer. `WorkerProxy` has
    the same methods for a worker in another process. `reward_weights` has the weight of each column of scores. `given`
    are images that are trained instead of sampled ones; they are neither decoded nor scored by the rewards.
    """

    def __init__(
        self,
        name: str,
        rollout: Rollout,
        steps: Steps,
        transfer: ArrayTransfer,
        scorers: Mapping[int, rewards.NamedReward] = MappingProxyType({}),
        reward_weights: Sequence[float] = (),
        given: GivenImages | None = None,
    ):
        self.name, self.rollout = name, rollout
        self.devices = rollout.group.mesh.size
        self.device_kind = rollout.group.mesh.devices.flat[0].device_kind
        self.weights: dict[WeightsVersion, Weights] = {}
        self.images: dict[Chunk, np.ndarray | None] = {}  # not yet scored; None: a NaN
        self.answers: dict[Chunk, rewards.Answers] = {}
        # Of chunks in `images`, with `kl_reward`.
        self.kl: dict[Chunk, Float32[np.ndarray, "b s"]] = {}
        self.removed = False
        self._steps, self._transfer = steps, transfer
        self._scorers, self._reward_weights, self._given = scorers, reward_weights, given
        self._fixed = Weights(None, rollout.base, rollout.frozen)
        self._prompts: dict[int, EncodedPrompts] = {}
        self._trajectories: dict[Chunk, Trajectory] = {}

    def hold(self, weights_version: WeightsVersion, tuned: Any) -> None:
        """Stores local weights in the sampler's dtype and shardings."""
        self.weights[weights_version] = jax.block_until_ready(self.rollout.weights(tuned))

    def receive(self, weights_version: WeightsVersion) -> None:
        """Gets weights from the trainer; no-op if they were deleted."""
        tuned = self._transfer.get(weights_version, self.rollout.group.params, self.name)
        if tuned is not None:
            self.weights[weights_version] = Weights(tuned, self.rollout.base, self.rollout.frozen)

    def encode(self, number: int) -> None:
        """Encodes a step's prompts for this mesh and for the trainer."""
        prompts = self.rollout.sampler.encode(self._fixed, self._steps[number].records)
        self._prompts[number] = jax.block_until_ready(prompts)
        if not self.removed:
            self._transfer.put(ConditioningKey(self.name, number), prompts)
        for old in [old for old in self._prompts if old < self._steps.first]:
            del self._prompts[old]
            self._transfer.delete(ConditioningKey(self.name, old))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Generates a chunk's trajectories with received weights."""
        if chunk.evaluation:
            weights, batch = self.weights[weights_version], self._steps.settings.evaluation_batch
            first, records = self._steps.evaluated(chunk)
            trajectory = sample_fixed(self.rollout.evaluator, weights, records, first, batch)
        else:
            # In this order, because a chunk is dropped before its weights.
            received, step = self.weights.get(weights_version), self._steps.find(chunk)
            if step is None:
                return
            cut = step.slice_of(chunk.index)
            if self._given is not None:
                trajectory = self._read_images(step.records_of(chunk.index))
            else:
                trajectory = self.rollout.sampler.generate(
                    received, self._prompts[chunk.step], step.rows[cut], *step.draws.subset(cut)
                )
        self._trajectories[chunk] = jax.block_until_ready(trajectory)
        if not chunk.evaluation and self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def _read_images(self, records: list[dict[str, Any]]) -> Trajectory:
        """Returns the latents of image files as the end of trajectories without transitions."""
        group, none = self.rollout.group, jnp.zeros(0)
        latents = put(cast(GivenImages, self._given).latents(records), group.batch)
        sigmas = put(self.rollout.sampler.sigmas, group.replicated)
        return Trajectory(latents, Transitions(none, none, none, none, none), sigmas)

    def decode(self, chunk: Chunk) -> None:
        """Decodes a chunk's images to the host, scores them by the rewards on this mesh, and offers its samples.

        Raises:
          RewardError: A score is not finite.
        """
        trajectory = self._trajectories.pop(chunk, None)
        if trajectory is None:
            return
        if chunk.evaluation:
            decoded = fetch_clips(self.rollout.evaluator.decode(self._fixed, trajectory))
            self._keep(chunk, decoded, self._steps.evaluated(chunk)[1])
            return
        decoded = None
        if self._given is None:
            decoded = fetch_clips(self.rollout.sampler.decode(self._fixed, trajectory))
        step = self._steps.find(chunk)
        if step is None or self.removed:  # dropped, or reassigned to another worker
            return
        if trajectory.kl is not None:
            self.kl[chunk] = fetch(trajectory.kl).T
        # Before the samples are offered, because scoring may fail.
        if self._given is None:
            self._keep(chunk, decoded, step.records_of(chunk.index))
        if self.removed:
            return
        keys = put(step.training_keys[step.slice_of(chunk.index)], self.rollout.group.batch)
        samples = trained_part(trajectory, keys), trajectory.sigmas
        self._transfer.put(SamplesKey(self.name, chunk), jax.block_until_ready(samples))
        if self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def _keep(
        self, chunk: Chunk, clips: UInt8[np.ndarray, "b ..."] | None, records: list[dict[str, Any]]
    ) -> None:
        """Stores clips to score, without padding; the rewards on this mesh score them now."""
        if clips is not None:
            clips = clips[: len(records)]
            if self._scorers:
                with part("score"):
                    batch = reward_input(clips), [record["prompt"] for record in records], records
                    self.answers[chunk] = rewards.answers(self._scorers, batch)
        self.images[chunk] = clips

    def score(self, chunk: Chunk, pool: RewardPool) -> Future[ScoredChunk]:
        """Scores a decoded chunk and computes image statistics. Its images are kept until `scored`.

        The future raises DivergedError if an image has a NaN, and the errors of `RewardPool.submit`.
        """
        if self._given is not None and not chunk.evaluation:
            scores = self._given.scores(self._steps.settings.chunk_images)
            return pool.later(ScoredChunk(rewards.Scores(scores, {}), scores[:, 0]))
        clips = self.images[chunk]
        if clips is None:
            return failed(DivergedError("an image of the trained model has a NaN"))
        settings = self._steps.settings
        if chunk.evaluation:
            first, records = self._steps.evaluated(chunk)
        else:
            step = self._steps[chunk.step]
            records, rows = step.records_of(chunk.index), step.rows[step.slice_of(chunk.index)]
        stats = submit_image_stats(middle_frames(clips))  # in parallel with the rewards
        prompts, known = [record["prompt"] for record in records], self.answers.get(chunk, ())
        kl = self.kl.get(chunk)

        def scored_chunk(scored: Scored) -> ScoredChunk:
            values = rewards.total(scored.scores.columns, self._reward_weights)
            found = ScoredChunk(scored.scores, values, scored.seconds, scored.exchanges, stats)
            most = settings.shown_images
            if chunk.evaluation:  # the first clips, or their middle frames if no image is due
                kept = clips[: max(0, most - first)]
                if not settings.is_shown(chunk.step):
                    kept = middle_frames(kept)[:, None]
                return found._replace(clips=kept.copy())  # frees the other clips
            shown = settings.is_shown(chunk.step + 1)
            places = best_and_worst(values, rows, most if shown else 0)
            images = middle_frames(clips)[places]
            previews = dict(zip(places.tolist(), images, strict=True))
            return found._replace(previews=previews, kl=kl)

        return then(pool.submit(reward_input(clips), prompts, records, known), scored_chunk)

    def scored(self, chunk: Chunk) -> None:
        """Frees a chunk's images."""
        self.images.pop(chunk, None)
        self.kl.pop(chunk, None)
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
        """No-op; see `WorkerProxy.end_step`."""

    def remove(self) -> None:
        """Marks the worker as removed: its work is reassigned, and results of calls in progress are discarded."""
        self.removed = True


def open_rewards(config: TrainConfig) -> RewardPool:
    """Starts the rewards and tests them (sanity checks, `try_files`); the caller closes the pool.

    Raises:
      ConfigError: A reward fails, or a score is invalid.
    """
    found, settings = resolve(config.rewards, meshes=True), config.reward_pool
    seconds = functools.partial(time_limit, config.runtime.deadline)
    processes = settings.processes if config.rewards else 0
    pool = RewardPool(found, processes, settings.retries, seconds)
    try:
        run_sanity_checks(found, pool.score)
        try_files(config, pool.score)
    except BaseException:  # including Ctrl-C: otherwise its processes keep running
        pool.close()
        raise
    return pool


def try_files(config: TrainConfig, score: Callable[..., Any]) -> None:
    """Tests rewards on the training and evaluation prompts, with synthetic images or clips of the same sizes.

    `score` is a function such as `RewardPool.score`. Raises ConfigError; see `dry_run`.
    """
    if not config.rewards:
        return
    if not config.algorithm.given_images:  # else rewards score only evaluations
        dry_run(score, read_prompt_files(config.prompts.paths), config.model.size)
    dry_run(score, [read_prompt_file(config.evaluation.prompts)], config.evaluation_size)


def try_scorers(config: TrainConfig, scorers: "tuple[RewardModel, ...]") -> None:
    """Tests the rewards on a mesh (sanity checks, `try_files`). All processes of the mesh must call it.

    Raises:
      ConfigError: A score is invalid.
    """
    if not scorers:
        return
    found = rewards.Rewards(tuple(mesh_rewards(config.rewards, scorers).values()))
    run_sanity_checks(found, found.score)
    try_files(config, found.score)
