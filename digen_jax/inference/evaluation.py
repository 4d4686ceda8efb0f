"""Samples images of fixed prompts for an evaluation: each has its own fixed noise, and the sampler adds none."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from digen_jax import rewards
from digen_jax.diffusion.sampling import Trajectory, image_keys
from digen_jax.images import reward_input, to_uint8
from digen_jax.logging.evaluation import Evaluation
from digen_jax.parallel.mesh import fetch
from digen_jax.parallel.sampler import Sampler, Weights
from digen_jax.process.shutdown import during
from digen_jax.process.terminal import track

# The same for all runs, independent of their own seed, so that their evaluations can be compared.
SEED = 2**20


def evaluate(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[dict[str, Any]],
    asked: rewards.Rewards,
    batch: int,
    seed: int = SEED,
    head: str = "evaluating",
) -> Evaluation:
    """Samples one image for each record and scores it.

    Image i depends only on the seed, i, its prompt and the weights. `head` labels the progress bar.
    """
    clips, scores = [], []
    for start in track(range(0, len(records), batch), head, "batch"):
        part = list(records[start : start + batch])
        made = to_uint8(sample_clips(sampler, weights, part, start, batch, seed))
        prompts = [record["prompt"] for record in part]
        scores.append(asked.score(reward_input(made), prompts, part))
        clips.append(made)
    return Evaluation.of(list(records), clips, scores, asked.names, asked.weights)


def sample_clips(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[Mapping[str, Any]],
    first: int,
    batch: int,
    seed: int = SEED,
    of_each: int = 1,
) -> Float[np.ndarray, "n t h w 3"]:
    """Clips first, first + 1, ... of a seed, one for each of `records`, of which there are at most `batch`.

    If each record is repeated for several clips in a row, `of_each` is their number.
    """
    with during("the sampling of images"):
        trajectory = sample_fixed(sampler, weights, records, first, batch, seed, of_each)
        return fetch(sampler.decode(weights, trajectory))[: len(records)]


def sample_fixed(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[Mapping[str, Any]],
    first: int,
    batch: int,
    seed: int = SEED,
    of_each: int = 1,
) -> Trajectory:
    """The trajectories of `sample_clips`, padded to `batch`; returns immediately, as `Sampler.generate` does."""
    padded = [*records, *[records[-1]] * (batch - len(records))]
    numbers = np.arange(first, first + batch, dtype=np.int32)
    keys = image_keys(jax.random.key(seed), numbers // of_each, numbers % of_each)
    rows = np.arange(batch, dtype=np.int32)
    return sampler.generate(weights, sampler.encode(weights, padded), rows, keys)
