"""Data of a step and of an evaluation in one process: prompts, keys of images, scores, advantages, metrics.

Every process computes prompts and keys from the config. Scores are collected in the first process.
"""

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt8

from digen_jax import rewards
from digen_jax.algorithms.advantages import AdvantageSettings, advantages, ranking, trained_images
from digen_jax.diffusion.noising import repeat_keys
from digen_jax.logging.evaluation import (
    Evaluation,
    Extremes,
    ImageStats,
    Sample,
    by_tag,
    group_diversity,
)
from digen_jax.parallel.sampler import SampleDraws, SampleRng
from digen_jax.rewards.request_log import Exchange
from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.settings import Settings


@dataclasses.dataclass
class StepImages:
    """The images of a step: image j is the (j mod G)-th of group j // G.

    With dynamic sampling the groups are all possible candidates, started or not.
    """

    records: list[dict[str, Any]]
    size: int  # images of a chunk
    rows: Int[np.ndarray, "n"]
    drawn: SampleDraws
    training_keys: Key[Array, "n"]  # of training's noise: the first time the keys of the images
    dropped: set[int] = dataclasses.field(default_factory=set)  # started, not needed

    @classmethod
    def create(
        cls,
        number: int,
        records: list[dict[str, Any]],
        images: int,
        size: int,
        rng: SampleRng,
        turn: int = 0,
    ) -> "StepImages":
        """`images` a group, `size` a chunk. `turn`: how many times the step was trained before."""
        rows = np.repeat(np.arange(len(records), dtype=np.int32), images)
        serials = np.asarray([record["serial"] for record in records])[rows]
        drawn = rng.draw(number, serials, np.tile(np.arange(images), len(records)))
        return cls(records, size, rows, drawn, repeat_keys(drawn.keys, turn))

    def slice_of(self, index: int) -> slice:
        """Returns the slice of a chunk's images."""
        return slice(index * self.size, (index + 1) * self.size)

    def records_of(self, index: int) -> list[dict[str, Any]]:
        """Returns the record of each image of a chunk."""
        return [self.records[row] for row in self.rows[self.slice_of(index)]]


class Steps:
    """The steps by number. Each draws its prompts at its first use, in order; those that have ended are not stored.

    Any thread may call.

    Args:
      batches: Prompt records of each step.
      images: Images of a group.
      size: Images of a chunk.
      rng: Draws the keys and steps of images.
      first: The current step.
      set_steps: Steps after which `batches` repeats, if the images are a fixed set. 0 means never.
    """

    def __init__(
        self,
        batches: Iterator[list[dict[str, Any]]],
        images: int,
        size: int,
        rng: SampleRng,
        first: int,
        set_steps: int = 0,
    ):
        self.first = first  # the current step
        self._batches, self._make = batches, (images, size, rng)
        self._set_steps, self._next = set_steps, first
        self._steps: dict[int, StepImages] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> StepImages:
        with self._lock:
            while self._next <= number:
                records = next(self._batches)
                if self._next >= self.first:
                    turn = self._next // self._set_steps if self._set_steps else 0
                    step = StepImages.create(self._next, records, *self._make, turn)
                    self._steps[self._next] = step
                self._next += 1
            return self._steps[number]

    def draw(self, number: int) -> None:
        """Draws the prompts of a step, unless it has ended: for a process in which no worker encodes them."""
        if number >= self.first:
            self[number]

    def find(self, chunk: Chunk) -> StepImages | None:
        """Returns the step of a chunk, or None if the chunk was dropped or its step has ended."""
        with self._lock:
            step = self._steps.get(chunk.step)
            return None if step is None or chunk.index in step.dropped else step

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Marks candidates that do not form their step."""
        with self._lock:
            for chunk in chunks:
                self._steps[chunk.step].dropped.add(chunk.index)

    def end(self) -> None:
        """Ends the current step."""
        self.forget(self.first + 1)

    def forget(self, before: int) -> None:
        """Frees all steps before this one, which have ended."""
        with self._lock:
            self.first = max(self.first, before)
            for number in [number for number in self._steps if number < self.first]:
                del self._steps[number]


# Statistics of each reward, by prefix of the metric's name.
STATISTICS = {"": np.mean, "std_": np.std, "min_": np.min, "max_": np.max}


class HeldOut:
    """The prompts of a run's evaluations, divided into chunks by the scheduler's settings."""

    def __init__(self, records: Sequence[dict[str, Any]], settings: Settings):
        self.records, self._settings = list(records), settings
        self.batch = settings.evaluation_batch  # images of a chunk

    def of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Returns the records of a chunk; the last one of an evaluation may have fewer than a batch."""
        count, first = self._settings.evaluated_images(chunk.step), self.first(chunk)
        return self.records[first : min(first + self.batch, count)]

    def first(self, chunk: Chunk) -> int:
        """Returns the number of a chunk's first image."""
        return chunk.index * self.batch


class Previews(NamedTuple):
    """Images of a chunk that may be among the step's best and worst."""

    places: Int[np.ndarray, "k"]  # within the chunk
    images: UInt8[np.ndarray, "k h w 3"]


class ScoredChunk(NamedTuple):
    """Scores and previews of a chunk's images."""

    scores: rewards.Scores
    values: Float32[np.ndarray, "b"] = np.zeros(0, np.float32)  # that the scheduler compares
    seconds: float = 0.0  # that the rewards took
    exchanges: tuple[Exchange, ...] = ()  # with servers, on the clock of `time.perf_counter`
    image_stats: Future[ImageStats] | None = None  # image statistics, if computed
    previews: Previews | None = None  # of a step
    clips: UInt8[np.ndarray, "k t h w 3"] | None = None  # of an evaluation: the first ones


def ranked(
    values: Float32[np.ndarray, "k"], rows: Int[np.ndarray, "k"], sign: int
) -> Int[np.ndarray, "k"]:
    """Returns an order of images: best first for sign 1, worst first for -1; of equal ones first one of each group."""
    turn = np.zeros(len(values), int)
    for row, value in set(zip(rows, values, strict=True)):
        same = np.flatnonzero((rows == row) & (values == value))
        turn[same] = np.arange(len(same))
    return np.lexsort((np.arange(len(values)), turn, -sign * values))


class EvaluationScores:
    """Collects scores and clips of evaluations in the first process, until a version is complete."""

    def __init__(self, held_out: HeldOut, names: tuple[str, ...], weights: Sequence[float]):
        self._held_out, self._names, self._weights = held_out, names, weights
        self._found: dict[int, dict[int, ScoredChunk]] = defaultdict(dict)

    def add(self, chunk: Chunk, scored_chunk: ScoredChunk) -> None:
        """Stores a scored chunk."""
        self._found[chunk.step][chunk.index] = scored_chunk

    def take(self, version: int) -> Evaluation:
        """Returns and removes a version's complete evaluation."""
        parts = [part for _, part in sorted(self._found.pop(version).items())]
        clips, scores = [part.clips for part in parts], [part.scores for part in parts]
        records = self._held_out.records[: sum(len(part.columns) for part in scores)]
        found = Evaluation.of(records, clips, scores, self._names, self._weights)
        return found._replace(
            image_stats=ImageStats.concatenate([part.image_stats.result() for part in parts])
        )

    def forget(self, version: int) -> None:
        """Removes a version's evaluation, if there is one."""
        self._found.pop(version, None)


class ChunkAdvantages(NamedTuple):
    """The images of a chunk that are trained, with their advantages and weights.

    Instead of advantages there are ranks for an algorithm that `ranks`, and rewards in early training.
    """

    places: Int[np.ndarray, "k"]  # within the chunk
    advantages: Float[np.ndarray, "k"]
    weight: Float32[np.ndarray, "k"]  # 0 if the image's group is dropped


@dataclasses.dataclass
class StepScores:
    """The scores of a step's images; NaN for those that are not scored, and where a reward does not apply."""

    images: StepImages
    scores: Float32[np.ndarray, "n k"]  # a column for each score that has a weight
    settings: AdvantageSettings
    scored: Bool[np.ndarray, "n"]
    # Scores that have no weight: see `rewards.Scores`.
    shown: dict[str, Float32[np.ndarray, "n"]] = dataclasses.field(default_factory=dict)
    image_stats: dict[int, Future[ImageStats]] = dataclasses.field(default_factory=dict)  # by chunk
    # Images that may be the step's best and worst, by their places in the step.
    previews: dict[int, UInt8[np.ndarray, "h w 3"]] = dataclasses.field(default_factory=dict)

    @classmethod
    def create(cls, images: StepImages, settings: AdvantageSettings) -> "StepScores":
        """Creates the scores of a step without a scored image."""
        count = len(images.rows)
        empty = np.full((count, len(settings.reward_weights)), np.nan, np.float32)
        return cls(images, empty, settings, np.zeros(count, bool))

    def add(self, index: int, scores: rewards.Scores) -> None:
        """Stores a chunk's scores."""
        cut = self.images.slice_of(index)
        self.scores[cut], self.scored[cut] = scores.columns, True
        for name, found in scores.shown.items():
            empty = np.full(len(self.scored), np.nan, np.float32)
            self.shown.setdefault(name, empty)[cut] = found

    def add_previews(self, index: int, image_stats: Future[ImageStats], previews: Previews) -> None:
        """Stores the image statistics of a scored chunk, and the images that may be shown."""
        self.image_stats[index] = image_stats
        start = self.images.slice_of(index).start
        self.previews |= {
            start + int(place): one
            for place, one in zip(previews.places, previews.images, strict=True)
        }

    @property
    def members(self) -> Bool[np.ndarray, "n"]:
        """Which images are scored and of groups that form the step."""
        images = self.images
        dropped = np.isin(np.arange(len(images.rows)) // images.size, list(images.dropped))
        return self.scored & ~dropped

    @property
    def values(self) -> Float32[np.ndarray, "n"]:
        """The value of each scored image: the weighted sum of the scores of the rewards that apply to it."""
        return rewards.total(self.scores, self.settings.reward_weights)

    @property
    def std(self) -> float:
        """The std of the rewards over the groups that form the step."""
        return float(self.values[self.members].std(dtype=np.float64))

    def batch(self, index: int, ranks: bool = False, early: bool = False) -> ChunkAdvantages:
        """Returns the trained part of a chunk, when the unit `AdvantageSettings.needs` is scored.

        The number of images given to the trainer does not depend on how many groups are dropped. With `ranks` the
        unit is `AdvantageSettings.ranking_needs`; `early`: before advantages are known.
        """
        settings = self.settings
        if ranks or early:
            values = self.values[self.images.slice_of(index)] if early else self.ranking(index)
            return ChunkAdvantages(np.arange(len(values)), values, np.ones(len(values), np.float32))
        known, mine = self._known(index, settings.needs)
        given = trained_images(dataclasses.replace(settings, drop_zero_std=False), *known)[mine]
        weight = trained_images(settings, *known)[mine].astype(np.float32)
        found = advantages(settings, *known)[mine]
        return ChunkAdvantages(np.flatnonzero(given), found[given], weight[given])

    def ranking(self, index: int) -> Float[np.ndarray, "b"]:
        """Returns the ranks of a chunk's images, when the unit `AdvantageSettings.ranking_needs` is scored."""
        known, mine = self._known(index, self.settings.ranking_needs)
        return ranking(self.settings, *known)[mine]

    def _known(
        self, index: int, needs: Literal["group", "step"]
    ) -> tuple[tuple[np.ndarray, np.ndarray, int], Bool[np.ndarray, "m"]]:
        """Returns ((scores, groups, number of groups) of the chunk's groups or step, which of them are the chunk's)."""
        rows, cut = self.images.rows, self.images.slice_of(index)
        members = np.isin(rows, rows[cut]) if needs == "group" else self.members
        mine = np.isin(np.flatnonzero(members), np.arange(cut.start, cut.stop))
        return (self.scores[members], rows[members], len(self.images.records)), mine

    def extremes(self, most: int) -> Extremes | None:
        """Returns at most `most` of the best and of the worst images, none in both, or None without previews."""
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
        """Returns mean and spread of the rewards of the groups that form a step, over all prompts and for each task.

        For several rewards these are of the weighted sum; mean, spread and range of each reward over the images to
        which it applies are added by its name, one of `names`.
        """
        members, records = self.members, self.images.records
        scores, rows = self.values[members], self.images.rows[members]
        shown, groups = [records[row] for row in rows], len(np.unique(rows))
        unweighted = {name: found[members] for name, found in self.shown.items()}
        each = rewards.each(names, rewards.Scores(self.scores[members], unweighted))
        each = {name: rewards.applicable(found) for name, found in each.items()}
        teaching = dataclasses.replace(self.settings, best_and_worst=0, drop_zero_std=True)
        taught = trained_images(teaching, self.scores[members], rows, len(records))
        metrics = {
            "reward": float(scores.mean()),
            "reward_std": float(scores.std()),
            "zero_std_groups": len(np.unique(rows[~taught])) / groups,
            **{
                f"reward_{what}of/{name}": float(statistic(found))
                for what, statistic in STATISTICS.items()
                for name, found in each.items()
                if len(found)
            },
            **{f"reward/{tag}": mean for tag, mean in by_tag(shown, scores).items()},
            **{f"reward_std/{tag}": std for tag, std in by_tag(shown, scores, np.std).items()},
        }
        if len(records) > groups:  # dynamic sampling: the candidates that were started
            started = members.copy()
            for index in self.images.dropped:
                started[self.images.slice_of(index)] = True
            metrics["candidates"] = float(len(np.unique(self.images.rows[started])))
        return metrics

    def image_metrics(self) -> dict[str, float]:
        """Returns statistics of the images of a step, and the diversity within a group; empty without images."""
        chunks = [index for index in sorted(self.image_stats) if index not in self.images.dropped]
        if not chunks:
            return {}
        stats = ImageStats.concatenate([self.image_stats[index].result() for index in chunks])
        groups = np.concatenate([self.images.rows[self.images.slice_of(index)] for index in chunks])
        within = group_diversity(stats.thumbnails, groups)
        means = stats.means() | ({} if within is None else {"diversity": within})
        return {f"images/{name}": value for name, value in means.items()}
