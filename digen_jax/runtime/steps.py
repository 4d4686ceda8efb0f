"""Per-process data of steps and evaluations: prompts, PRNG keys of images, scores, advantages, metrics.

Every process computes prompts and keys from the config. The coordinator collects the scores.
"""

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt8

from digen_jax import rewards
from digen_jax.algorithms.advantages import (
    AdvantageSettings,
    advantages,
    ranking,
    step_advantages,
    trained_images,
    with_kl,
)
from digen_jax.config.train_config import TrainConfig
from digen_jax.diffusion.noising import repeat_keys
from digen_jax.logging.evaluation import (
    Extremes,
    ImageStats,
    Sample,
    by_tag,
    group_diversity,
)
from digen_jax.parallel.sampler import SampleDraws, SampleRng
from digen_jax.rewards import Exchange
from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.settings import Settings


@dataclasses.dataclass
class StepImages:
    """Images of a step: image j is number j mod G of group j // G.

    With dynamic sampling, the groups are all possible candidates, started or not.
    """

    records: list[dict[str, Any]]
    size: int  # images per chunk
    rows: Int[np.ndarray, "n"]
    draws: SampleDraws
    training_keys: Key[Array, "n"]  # of training noise; in the first pass, `draws.keys`
    dropped: set[int] = dataclasses.field(default_factory=set)  # indices of unused chunks

    @classmethod
    def create(
        cls,
        number: int,
        records: list[dict[str, Any]],
        images: int,
        size: int,
        rng: SampleRng,
        repeat: int = 0,
    ) -> "StepImages":
        """Creates a step with groups of `images` and chunks of `size`; `repeat` counts earlier passes over it."""
        rows = np.repeat(np.arange(len(records), dtype=np.int32), images)
        serials = np.asarray([record["serial"] for record in records])[rows]
        draws = rng.draw(number, serials, np.tile(np.arange(images), len(records)))
        return cls(records, size, rows, draws, repeat_keys(draws.keys, repeat))

    def slice_of(self, index: int) -> slice:
        """Returns the slice of chunk `index`."""
        return slice(index * self.size, (index + 1) * self.size)

    def records_of(self, index: int) -> list[dict[str, Any]]:
        """Returns the prompt record of each image of a chunk."""
        return [self.records[row] for row in self.rows[self.slice_of(index)]]


class Steps:
    """Steps by number, created in order on first use and freed when they end, and prompts of evaluations. Thread-safe.

    Args:
      settings: Sizes of groups, chunks and evaluations.
      batches: Prompt records of each step.
      rng: Samples the PRNG keys and trained timesteps of images.
      first: The current step.
      set_steps: Period of `batches` in steps, if the images are a fixed set. 0 means no repetition.
      held_out: Prompt records of evaluations.
    """

    def __init__(
        self,
        settings: Settings,
        batches: Iterator[list[dict[str, Any]]],
        rng: SampleRng,
        first: int,
        set_steps: int = 0,
        held_out: Sequence[dict[str, Any]] = (),
    ):
        self.settings, self.first, self.held_out = settings, first, list(held_out)
        self._batches, self._rng = batches, rng
        self._set_steps, self._next = set_steps, first
        self._steps: dict[int, StepImages] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        batches: Iterator[list[dict[str, Any]]],
        first: int,
        held_out: Sequence[dict[str, Any]],
    ) -> "Steps":
        """Returns the steps of a run from `first` on."""
        settings = config.scheduled(len(held_out))
        return cls(settings, batches, config.rng, first, config.algorithm.set_steps, held_out)

    def evaluated(self, chunk: Chunk) -> tuple[int, list[dict[str, Any]]]:
        """Returns (index of the first image, records) of an evaluation's chunk; the last one may be smaller."""
        batch, count = self.settings.evaluation_batch, self.settings.evaluated_images(chunk.step)
        first = chunk.index * batch
        return first, self.held_out[first : min(first + batch, count)]

    def __getitem__(self, number: int) -> StepImages:
        with self._lock:
            while self._next <= number:
                records = next(self._batches)
                if self._next >= self.first:
                    repeat = self._next // self._set_steps if self._set_steps else 0
                    shape = self.settings.images, self.settings.chunk_images
                    step = StepImages.create(self._next, records, *shape, self._rng, repeat)
                    self._steps[self._next] = step
                self._next += 1
            return self._steps[number]

    def ensure(self, number: int) -> None:
        """Creates a step unless it has ended, in a process that does not encode its prompts."""
        if number >= self.first:
            self[number]

    def find(self, chunk: Chunk) -> StepImages | None:
        """Returns the step of a chunk, or None if the chunk was dropped or its step has ended."""
        with self._lock:
            step = self._steps.get(chunk.step)
            return None if step is None or chunk.index in step.dropped else step

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Marks candidates that are not part of their step."""
        with self._lock:
            for chunk in chunks:
                self._steps[chunk.step].dropped.add(chunk.index)

    def forget(self, before: int) -> None:
        """Ends and frees all steps before `before`."""
        with self._lock:
            self.first = max(self.first, before)
            for number in [number for number in self._steps if number < self.first]:
                del self._steps[number]


class ScoredChunk(NamedTuple):
    """Scores of a chunk's images, and the images of which others have a use."""

    scores: rewards.Scores
    values: Float32[np.ndarray, "b"] = np.zeros(0, np.float32)  # total reward
    seconds: float = 0.0  # of reward computation
    exchanges: tuple[Exchange, ...] = ()  # requests to servers, in `time.perf_counter` time
    image_stats: Future[ImageStats] | None = None  # if computed
    # By index in the chunk: candidates for the step's best and worst images.
    previews: Mapping[int, UInt8[np.ndarray, "h w 3"]] | None = None
    clips: UInt8[np.ndarray, "k t h w 3"] | None = None  # of an evaluation: the first clips
    kl: Float32[np.ndarray, "b s"] | None = None  # to the initial policy, with `kl_reward`


def ranked(
    values: Float32[np.ndarray, "k"], rows: Int[np.ndarray, "k"], sign: int
) -> Int[np.ndarray, "k"]:
    """Returns an argsort of images: best first for sign 1, worst first for -1. Ties alternate between groups."""
    place = np.zeros(len(values), int)
    for row, value in set(zip(rows, values, strict=True)):
        same = np.flatnonzero((rows == row) & (values == value))
        place[same] = np.arange(len(same))
    return np.lexsort((np.arange(len(values)), place, -sign * values))


class ChunkAdvantages(NamedTuple):
    """Trained images of a chunk, with their advantages and weights.

    `advantages` has ranks for an algorithm that `ranks`, rewards in early training, and one advantage for each step
    with `kl_reward`.
    """

    places: Int[np.ndarray, "k"]  # indices in the chunk
    advantages: Float[np.ndarray, "k *s"]
    weight: Float32[np.ndarray, "k"]  # 0 if the image's group is dropped


# Statistics of each reward, by metric name prefix.
STATISTICS: dict[str, Any] = {"": np.mean, "std_": np.std, "min_": np.min, "max_": np.max}


class StepScores:
    """Scores of a step's images. NaN means not scored, or that a reward does not apply."""

    def __init__(self, images: StepImages, settings: AdvantageSettings):
        count = len(images.rows)
        self.images, self.settings = images, settings
        self.scored: Bool[np.ndarray, n] = np.zeros(count, bool)
        # One column per score with a weight.
        shape = count, len(settings.reward_weights)
        self.scores: Float32[np.ndarray, "n k"] = np.full(shape, np.nan, np.float32)
        # Of each trained step, with `kl_reward`.
        self.kl: Float32[np.ndarray, "n s"] | None = None
        # Scores without a weight; see `rewards.Scores`.
        self.shown: dict[str, Float32[np.ndarray, n]] = {}
        self.image_stats: dict[int, Future[ImageStats]] = {}  # by chunk
        # Candidates for the step's best and worst images, by index in the step.
        self.previews: dict[int, UInt8[np.ndarray, "h w 3"]] = {}

    def add(self, index: int, scored_chunk: ScoredChunk) -> None:
        """Stores a chunk's scores and, in the coordinator, its image statistics and previews."""
        cut, scores = self.images.slice_of(index), scored_chunk.scores
        self.scores[cut], self.scored[cut] = scores.columns, True
        for name, found in scores.shown.items():
            empty = np.full(len(self.scored), np.nan, np.float32)
            self.shown.setdefault(name, empty)[cut] = found
        if scored_chunk.kl is not None:
            if self.kl is None:
                steps = scored_chunk.kl.shape[1]
                self.kl = np.full((len(self.scored), steps), np.nan, np.float32)
            self.kl[cut] = scored_chunk.kl
        if scored_chunk.image_stats is not None:
            self.image_stats[index] = scored_chunk.image_stats
        for place, image in (scored_chunk.previews or {}).items():
            self.previews[cut.start + place] = image

    @property
    def members(self) -> Bool[np.ndarray, "n"]:
        """Mask of the scored images of groups in the step."""
        images = self.images
        dropped = np.isin(np.arange(len(images.rows)) // images.size, list(images.dropped))
        return self.scored & ~dropped

    @property
    def values(self) -> Float32[np.ndarray, "n"]:
        """Total reward of each scored image: the weighted sum of the rewards that apply to it."""
        return rewards.total(self.scores, self.settings.reward_weights)

    @property
    def std(self) -> float:
        """Standard deviation of the total reward over the groups in the step."""
        return float(self.values[self.members].std(dtype=np.float64))

    def batch(self, index: int, ranks: bool = False, early: bool = False) -> ChunkAdvantages:
        """Returns the trained images of a chunk. Its group or step (`AdvantageSettings.needs`) must be scored.

        Dropped groups keep their images at weight 0, so that shapes are static. With `ranks` the required unit is
        `AdvantageSettings.ranking_needs`. With `early` only the chunk must be scored.
        """
        settings = self.settings
        if ranks or early:
            values = self.values[self.images.slice_of(index)] if early else self.ranking(index)
            return ChunkAdvantages(np.arange(len(values)), values, np.ones(len(values), np.float32))
        members, mine = self._known(index, settings.needs)
        scores, groups = self.scores[members], (self.images.rows[members], len(self.images.records))
        if self.kl is None:
            found = advantages(settings, scores, *groups)[mine]
        else:
            kl = self.kl[members]
            found = step_advantages(settings, scores, kl, *groups)[mine]
            settings, scores = with_kl(settings, scores, kl.mean(axis=1))
        known = scores, *groups
        given = trained_images(dataclasses.replace(settings, drop_zero_std=False), *known)[mine]
        weight = trained_images(settings, *known)[mine].astype(np.float32)
        return ChunkAdvantages(np.flatnonzero(given), found[given], weight[given])

    def ranking(self, index: int) -> Float[np.ndarray, "b"]:
        """Returns the ranks of a chunk's images. Its `AdvantageSettings.ranking_needs` must be scored."""
        members, mine = self._known(index, self.settings.ranking_needs)
        rows, groups = self.images.rows[members], len(self.images.records)
        return ranking(self.settings, self.scores[members], rows, groups)[mine]

    def _known(
        self, index: int, needs: Literal["group", "step"]
    ) -> tuple[Bool[np.ndarray, "n"], Bool[np.ndarray, "m"]]:
        """Returns (mask of the images of the chunk's groups or step, mask of the chunk's images among these)."""
        rows, cut = self.images.rows, self.images.slice_of(index)
        members = np.isin(rows, rows[cut]) if needs == "group" else self.members
        mine = np.isin(np.flatnonzero(members), np.arange(cut.start, cut.stop))
        return members, mine

    def extremes(self, most: int) -> Extremes | None:
        """Returns up to `most` best and `most` worst images, disjoint, or None without previews."""
        values, rows = self.values, self.images.rows
        found = np.asarray([p for p in np.flatnonzero(self.members) if p in self.previews], int)
        count = min(most, len(found) // 2)
        if not count:
            return None

        def sample(places: Int[np.ndarray, "k"], sign: int) -> tuple[np.ndarray, Sample]:
            places = places[ranked(values[places], rows[places], sign)][:count]
            records = [self.images.records[row] for row in rows[places]]
            images = np.stack([self.previews[one] for one in places])
            return places, Sample(records, images, values[places])

        places, best = sample(found, 1)
        _, worst = sample(np.setdiff1d(found, places), -1)
        return Extremes(best, worst)

    def metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        """Returns mean and std of the total reward over the groups in a step, overall and per task.

        With several rewards, adds mean, std, min and max of each one (`names`) over the images to which it applies.
        """
        members, records = self.members, self.images.records
        scores, rows = self.values[members], self.images.rows[members]
        shown, groups = [records[row] for row in rows], len(np.unique(rows))
        unweighted = {name: found[members] for name, found in self.shown.items()}
        each = rewards.each(names, rewards.Scores(self.scores[members], unweighted))
        each = {name: rewards.applicable(found) for name, found in each.items()}
        without_zero_std = dataclasses.replace(self.settings, best_and_worst=0, drop_zero_std=True)
        trained = trained_images(without_zero_std, self.scores[members], rows, len(records))
        metrics = {
            "reward": float(scores.mean()),
            "reward_std": float(scores.std()),
            "zero_std_groups": len(np.unique(rows[~trained])) / groups,
            **{
                f"reward_{what}of/{name}": float(statistic(found))
                for what, statistic in STATISTICS.items()
                for name, found in each.items()
                if len(found)
            },
            **{f"reward/{tag}": float(mean) for tag, mean in by_tag(shown, scores).items()},
            **{
                f"reward_std/{tag}": float(std)
                for tag, std in by_tag(shown, scores, np.std).items()
            },
        }
        if self.kl is not None:
            metrics["reward_kl"] = float(self.kl[members].mean())
        if len(records) > groups:  # dynamic sampling: count the started candidates
            started = members.copy()
            for index in self.images.dropped:
                started[self.images.slice_of(index)] = True
            metrics["candidates"] = float(len(np.unique(self.images.rows[started])))
        return metrics

    def image_metrics(self) -> dict[str, float]:
        """Returns image statistics of a step and the diversity within groups; empty without images."""
        chunks = [index for index in sorted(self.image_stats) if index not in self.images.dropped]
        if not chunks:
            return {}
        stats = ImageStats.concatenate([self.image_stats[index].result() for index in chunks])
        groups = np.concatenate([self.images.rows[self.images.slice_of(index)] for index in chunks])
        within = group_diversity(stats.thumbnails, groups)
        means = stats.means() | ({} if within is None else {"diversity": within})
        return {f"images/{name}": value for name, value in means.items()}
