"""A step of a run with its programs, and with fixed advantages instead of a reward."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Float32, Int

from digen_jax import assemble
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_files
from digen_jax.diffusion.sampling import Trajectory
from digen_jax.parallel.accumulate import Totals
from digen_jax.parallel.sampler import Weights
from digen_jax.parallel.system import (
    SampledImages,
    System,
    make_train_batch,
    move_to_trainer,
    select_images,
)

Build = Callable[[TrainConfig, Sequence[jax.Device]], System]


class Step:
    """Programs and inputs of a step, which is always the first one."""

    def __init__(
        self, config: TrainConfig, devices: Sequence[jax.Device], build: Build = assemble.build
    ):
        self.system = build(config, devices)
        self.state = self.system.trainer.init(self.system.start)
        batch, size = config.batch, config.sampler.chunk
        known = [*itertools.chain(*read_prompt_files(config.prompts.paths))]
        records = [known[i % len(known)] for i in range(batch.groups)]
        self.prompts = self.system.sampler.encode(self.weights, records)
        self.rows = np.repeat(np.arange(batch.groups, dtype=np.int32), batch.images)
        numbers = np.tile(np.arange(batch.images), batch.groups)
        self.draws = self.system.rng.draw(0, self.rows, numbers)
        self.chunks = [slice(i, i + size) for i in range(0, len(self.rows), size)]
        self.trained = self.system.advantages.kept(size, batch.images)

    @property
    def weights(self) -> Weights:
        """Weights of the sampler, with the trainer's current parameters."""
        return self.system.rollout_weights(self.state.tuned)

    def generate(self) -> Iterator[tuple[Int[np.ndarray, "b"], Trajectory]]:
        """Yields the prompt indices and the trajectories of each chunk."""
        weights = self.weights
        for chunk in self.chunks:
            rows, draws = self.rows[chunk], self.draws.subset(chunk)
            yield rows, self.system.sampler.generate(weights, self.prompts, rows, *draws)

    def train(self, chunks: Iterable[SampledImages]) -> None:
        """Trains a step's chunks as they arrive, and updates."""
        totals = None
        for images in chunks:
            totals = jax.block_until_ready(self.accumulate(images, totals))
        self.state, _ = self.system.trainer.update(self.state, totals)
        jax.block_until_ready(self.state)

    def accumulate(self, images: SampledImages, totals: Totals | None = None) -> Totals:
        """Adds the gradient of a chunk."""
        trainer, mesh = self.system.trainer, self.system.placement.trainer
        images = move_to_trainer(images, mesh)
        if self.trained < len(images.rows):
            images = select_images(images, np.arange(self.trained), mesh)
        train_batch = make_train_batch(self.system, self.prompts, images, advantages(self.trained))
        return trainer.accumulate(
            self.state, self.system.base, train_batch, totals, self.state.tuned
        )


def advantages(images: int) -> Float32[np.ndarray, "b"]:
    """Returns the fixed advantages of a chunk's images, [b]."""
    return np.linspace(-1, 1, images, dtype=np.float32)
