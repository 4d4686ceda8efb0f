"""Rewards of a model on a fixed prompt file: every prompt its own fixed noise, none in the sampler."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8

from digen_jax import rewards
from digen_jax.flow.sampling import image_keys
from digen_jax.pictures import to_uint8
from digen_jax.runtime.sampler import Sampler, Weights

# The same for all runs, whatever their own seed, so that their evaluations can be compared.
SEED = 2**20


class Evaluation(NamedTuple):
    """One image a prompt and its score."""

    records: list[dict[str, Any]]
    images: UInt8[np.ndarray, "n h w 3"]
    scores: Float[np.ndarray, "n"]

    def metrics(self) -> dict[str, float]:
        """Mean reward, over everything and for each task of the prompt file."""
        return {
            "evaluation/reward": float(self.scores.mean()),
            **{
                f"evaluation/{tag}": mean for tag, mean in by_tag(self.records, self.scores).items()
            },
        }


def evaluate(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[dict[str, Any]],
    reward: rewards.Reward,
    name: str,
    batch: int,
) -> Evaluation:
    """Samples one image for each record and scores it; image i depends on i, prompt and weights only."""
    images, scores = [], []
    for start in range(0, len(records), batch):
        part = list(records[start : start + batch])
        shown = sample_images(sampler, weights, [r["prompt"] for r in part], start, batch)
        scores.append(rewards.call(reward, name, shown, [r["prompt"] for r in part], part))
        images.append(to_uint8(shown))
    return Evaluation(list(records), np.concatenate(images), np.concatenate(scores))


def sample_images(
    sampler: Sampler, weights: Weights, prompts: list[str], first: int, batch: int, seed: int = SEED
) -> Float[np.ndarray, "n h w 3"]:
    """Images first, first + 1, ... of a seed, one a prompt; at most `batch`, filled up to it."""
    padded = prompts + prompts[-1:] * (batch - len(prompts))
    keys = image_keys(
        jax.random.key(seed), np.arange(first, first + batch), np.zeros(batch, np.int32)
    )
    rows = np.arange(batch, dtype=np.int32)
    images, _ = sampler.generate(weights, sampler.encode(weights, padded), rows, keys)
    return np.asarray(images)[: len(prompts)]


def by_tag(records: Sequence[dict[str, Any]], scores: Float[np.ndarray, "n"]) -> dict[str, float]:
    """The mean score of each task; nothing where the prompt file names no tasks."""
    found = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if "tag" in record:
            found[record["tag"]].append(float(score))
    return {tag: float(np.mean(values)) for tag, values in found.items()}
