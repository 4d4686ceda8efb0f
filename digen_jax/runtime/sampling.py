"""A rollout worker's executor: holds weights by version, prompts by step, and chunks in progress."""

from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from digen_jax import rewards
from digen_jax.diffusion.sampling import Trajectory
from digen_jax.images import as_scored, bytes_or_nan
from digen_jax.inference.evaluation import sample_fixed
from digen_jax.parallel.accumulate import trained_part
from digen_jax.parallel.mesh import fetch, put
from digen_jax.parallel.sampler import EncodedPrompts, Weights
from digen_jax.parallel.system import Rollout
from digen_jax.runtime.clock import part
from digen_jax.runtime.link import ConditioningOf, Link, SamplesOf
from digen_jax.runtime.scoring import ChunkScorer, HeldOut, ScoredChunk
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import Chunk, WeightsVersion


class SamplingExecutor:
    """Encodes, generates and decodes on one mesh; every method returns when its work is done.

    It holds its results until others have taken them: images for the rewards in `images`, scores of the rewards on
    this mesh in `answers`, samples for training on the link. The proxy of a worker in another process has the same
    attributes `name` and `devices` and the same methods.

    Args:
      name: Name of the worker.
      rollout: Programs and parameters of the mesh.
      steps: Steps of the run.
      held_out: Prompts of evaluations.
      link: The link to other workers.
      scorers: Rewards on this mesh, by their numbers among those of the run.
    """

    def __init__(
        self,
        name: str,
        rollout: Rollout,
        steps: Steps,
        held_out: HeldOut,
        link: Link,
        scorers: Mapping[int, rewards.NamedReward] = MappingProxyType({}),
    ):
        self.name, self.rollout = name, rollout
        self.devices = rollout.group.mesh.size
        self.weights: dict[WeightsVersion, Weights] = {}
        self.images: dict[Chunk, np.ndarray] = {}  # as bytes, not yet scored
        self.answers: dict[Chunk, rewards.Answers] = {}
        self.given_up = False
        self._steps, self._held_out, self._link, self._scorers = steps, held_out, link, scorers
        self._fixed = Weights(None, rollout.base, rollout.frozen)
        self._prompts: dict[int, EncodedPrompts] = {}
        self._begun: dict[Chunk, Trajectory] = {}

    def hold(self, weights_version: WeightsVersion, tuned: Any) -> None:
        """Keeps published weights that this process has, in the sampler's type and shardings."""
        self.weights[weights_version] = jax.block_until_ready(self.rollout.weights(tuned))

    def receive(self, weights_version: WeightsVersion) -> None:
        """Takes published weights; weights that were withdrawn are no longer needed."""
        tuned = self._link.take(weights_version, self.rollout.group.params, self.name)
        if tuned is not None:
            self.weights[weights_version] = Weights(tuned, self.rollout.base, self.rollout.frozen)

    def encode(self, number: int) -> None:
        """Encodes a step's prompts, for this mesh and for the trainer."""
        prompts = self.rollout.sampler.encode(self._fixed, self._steps[number].records)
        self._prompts[number] = jax.block_until_ready(prompts)
        if not self.given_up:
            self._link.offer(ConditioningOf(self.name, number), prompts)
        for old in [old for old in self._prompts if old < self._steps.first]:
            del self._prompts[old]
            self._link.withdraw(ConditioningOf(self.name, old))

    def generate(self, chunk: Chunk, weights_version: WeightsVersion) -> None:
        """Generates a chunk's trajectories with weights that were received."""
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
            cut = step.cut(chunk.index)
            trajectory = self.rollout.sampler.generate(
                weights, self._prompts[chunk.step], step.rows[cut], *step.drawn.cut(cut)
            )
        self._begun[chunk] = jax.block_until_ready(trajectory)
        if not chunk.evaluation and self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def decode(self, chunk: Chunk) -> None:
        """Brings a chunk's images to the host, and offers its samples for training on the link.

        The rewards on this mesh score the images.

        Raises:
          RewardMistake: their scores are not finite.
        """
        trajectory = self._begun.pop(chunk, None)
        if trajectory is None:
            return
        if chunk.evaluation:
            images = fetch(self.rollout.evaluator.decode(self._fixed, trajectory))
            records = self._held_out.of(chunk)
            self._keep(chunk, images[: len(records)], records)
            return
        images = fetch(self.rollout.sampler.decode(self._fixed, trajectory))
        step = self._steps.find(chunk)
        if step is None or self.given_up:  # another worker generates the chunk
            return
        # First, so that nothing is offered of a chunk whose scoring fails.
        self._keep(chunk, images, step.shown(chunk.index))
        if self.given_up:
            return
        keys = put(step.training_keys[step.cut(chunk.index)], self.rollout.group.batch)
        samples = trained_part(trajectory, keys), trajectory.sigmas
        self._link.offer(SamplesOf(self.name, chunk), jax.block_until_ready(samples))
        if self._steps.find(chunk) is None:
            self.drop_chunk(chunk)

    def _keep(self, chunk: Chunk, images: np.ndarray, records: list[dict[str, Any]]) -> None:
        """Holds images for the rewards; those on this mesh score them now."""
        made = bytes_or_nan(images)
        # With a NaN nothing is scored: the run ends where these images are taken.
        if self._scorers and made.dtype == np.uint8:
            with part("score"):
                batch = as_scored(made), [record["prompt"] for record in records], records
                self.answers[chunk] = rewards.answers(self._scorers, batch)
        self.images[chunk] = made

    def score(self, chunk: Chunk, scorer: ChunkScorer) -> Future[ScoredChunk]:
        """Has the rewards score a decoded chunk, whose images stay here until `scored`; see `ChunkScorer.submit`."""
        return scorer.submit(chunk, self.images[chunk], self.answers.get(chunk, ()))

    def scored(self, chunk: Chunk) -> None:
        """Frees a chunk's images, which are not needed again."""
        self.images.pop(chunk, None)
        self.answers.pop(chunk, None)

    def drop_chunk(self, chunk: Chunk) -> None:
        """Frees all data of a chunk."""
        self._begun.pop(chunk, None)
        self.scored(chunk)
        self._link.withdraw(SamplesOf(self.name, chunk))

    def drop_weights(self, weights_version: WeightsVersion) -> None:
        """Frees published weights."""
        self.weights.pop(weights_version, None)

    def end_step(self, step: int) -> None:
        """A step has ended, which this process has forgotten already."""

    def give_up(self) -> None:
        """Another worker repeats its work: results of calls in progress are not offered."""
        self.given_up = True
