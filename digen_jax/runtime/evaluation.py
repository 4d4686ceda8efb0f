"""Rewards of a model on a fixed prompt file: each prompt has its own fixed noise; the sampler adds none."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8

from digen_jax import rewards
from digen_jax.engine.hosts import fetch
from digen_jax.engine.sampler import Sampler, Weights
from digen_jax.flow.sampling import Trajectory, image_keys
from digen_jax.images import as_judged, to_uint8
from digen_jax.process.exhausted import during
from digen_jax.process.progress import watched
from digen_jax.process.terminal import printable
from digen_jax.runtime.image_statistics import Looks, diversity, joined
from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.settings import Settings

# The same for all runs, independent of their own seed, so that their evaluations can be compared.
SEED = 2**20


class TaskScore(NamedTuple):
    """A mean reward and its standard error, which is None for a single image."""

    mean: float
    standard_error: float | None
    images: int


class Evaluation(NamedTuple):
    """One clip a prompt and its score, which for several rewards is their weighted sum.

    A run keeps those of the first clips that it shows, and of these only the middle frame where no picture is due.
    """

    records: list[dict[str, Any]]
    clips: UInt8[np.ndarray, "k t h w 3"]
    scores: Float[np.ndarray, "n"]
    # By name, NaN where the reward does not apply: see `rewards.each`.
    each: Mapping[str, Float[np.ndarray, "n"]] = MappingProxyType({})
    looks: Looks | None = None

    @property
    def known(self) -> dict[str, Float[np.ndarray, "_"]]:
        """Each reward's scores of the images to which it applies; without rewards that apply to none."""
        found = {name: rewards.there(own) for name, own in self.each.items()}
        return {name: own for name, own in found.items() if len(own)}

    def metrics(self) -> dict[str, float]:
        """Mean reward over all prompts and for each task of the prompt file; if there are several, of each reward.

        Also what the pictures look like; their diversity is that between the prompts.
        """
        return {
            "evaluation/reward": float(self.scores.mean()),
            **{
                f"evaluation/reward_of/{name}": float(own.mean())
                for name, own in self.known.items()
            },
            **{
                f"evaluation/{tag}": mean for tag, mean in by_tag(self.records, self.scores).items()
            },
            **{f"evaluation/images/{name}": value for name, value in self._seen().items()},
        }

    def _seen(self) -> dict[str, float]:
        if self.looks is None:
            return {}
        several = len(self.records) > 1
        of_all = {"diversity": diversity(self.looks.thumbnails)} if several else {}
        return self.looks.means() | of_all

    def by_task(self) -> dict[str, TaskScore]:
        """The score of all prompts as "all", of each task of the prompt file, and of each of several rewards."""
        parts = {"all": self.scores, **_split_by_tag(self.records, self.scores), **self.known}
        return {name: _score(part) for name, part in parts.items()}


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
    for start in watched(range(0, len(records), batch), head, "batch"):
        part = list(records[start : start + batch])
        made = to_uint8(sample_clips(sampler, weights, part, start, batch, seed))
        prompts = [record["prompt"] for record in part]
        scores.append(asked.score(as_judged(made), prompts, part))
        clips.append(made)
    return _evaluation(list(records), clips, scores, asked.names, asked.weights)


def _evaluation(
    records: list[dict[str, Any]],
    clips: Sequence[UInt8[np.ndarray, "_ t h w 3"]],
    scores: Sequence[rewards.Scores],
    names: tuple[str, ...],
    weights: Sequence[float],
) -> Evaluation:
    """The evaluation of batches."""
    found = rewards.joined(scores)
    total, each = rewards.total(found.columns, weights), rewards.each(names, found)
    return Evaluation(records, np.concatenate(clips), total, each)


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


class HeldOut:
    """The prompts of a run's evaluations, divided into chunks by the scheduler's settings."""

    def __init__(self, records: Sequence[dict[str, Any]], settings: Settings):
        self.records, self._settings = list(records), settings

    @property
    def batch(self) -> int:
        """Images of a chunk."""
        return self._settings.evaluation_batch

    def of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The records of a chunk; the last one of an evaluation may have fewer than a batch."""
        count, first = self._settings.evaluated_images(chunk.step), self.first(chunk)
        return self.records[first : min(first + self.batch, count)]

    def first(self, chunk: Chunk) -> int:
        """The number of a chunk's first image."""
        return chunk.index * self.batch


class Gathering:
    """Collects scores and clips of evaluations, chunk by chunk, until a version is complete; on the leader."""

    def __init__(self, held_out: HeldOut, names: tuple[str, ...], weights: Sequence[float]):
        self._held_out, self._names, self._weights = held_out, names, weights
        self._found: dict[int, dict[int, tuple[rewards.Scores, np.ndarray, Future[Looks]]]] = (
            defaultdict(dict)
        )

    def note(
        self,
        chunk: Chunk,
        scores: rewards.Scores,
        clips: UInt8[np.ndarray, "k t h w 3"],
        looks: Future[Looks],
    ) -> None:
        """Stores a scored chunk, and those of its first clips that are shown."""
        self._found[chunk.step][chunk.index] = scores, clips, looks

    def take(self, version: int) -> Evaluation:
        """Returns a version's whole evaluation and forgets it."""
        parts = [part for _, part in sorted(self._found.pop(version).items())]
        scores, clips, looks = zip(*parts, strict=True)
        records = self._held_out.records[: sum(len(part.columns) for part in scores)]
        found = _evaluation(records, clips, scores, self._names, self._weights)
        return found._replace(looks=joined([one.result() for one in looks]))

    def forget(self, version: int) -> None:
        """Forgets a version's evaluation, of which nothing need be there."""
        self._found.pop(version, None)


def by_tag(
    records: Sequence[dict[str, Any]],
    scores: Float[np.ndarray, "n"],
    statistic: Callable[[np.ndarray], Any] = np.mean,
) -> dict[str, float]:
    """A statistic of each task's scores; empty if the prompt file names no tasks."""
    return {tag: float(statistic(part)) for tag, part in _split_by_tag(records, scores).items()}


def score_table(columns: Mapping[str, Mapping[str, TaskScore]]) -> str:
    """A line for each task with mean and standard error in each column; `columns` maps heads to scores."""
    rows = next(iter(columns.values()))
    lines = [f"{'':<24}{'images':>8}" + "".join(f"{head:>18}" for head in columns)]
    for name, first in rows.items():
        cells = (f"{_shown(column[name]):>18}" for column in columns.values())
        lines.append(f"{printable(name):<24}{first.images:>8}" + "".join(cells))
    return "\n".join(lines)


def _shown(score: TaskScore) -> str:
    error = score.standard_error
    return f"{score.mean:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _score(scores: Float[np.ndarray, "n"]) -> TaskScore:
    count = len(scores)
    error = float(scores.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return TaskScore(float(scores.mean()), error, count)


def _split_by_tag(
    records: Sequence[dict[str, Any]], scores: Float[np.ndarray, "n"]
) -> dict[str, Float[np.ndarray, "_"]]:
    """The scores of each task, in the order of their first records."""
    found = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if "tag" in record:
            found[record["tag"]].append(float(score))
    return {tag: np.asarray(part) for tag, part in found.items()}
