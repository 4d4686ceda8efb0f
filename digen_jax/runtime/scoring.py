"""Scores of images: by the worker that decoded them, and by step in the first process, with advantages and metrics.

Only scores and previews leave a worker's process. An image of a step leaves it only if it may be one of the best or
worst that are shown, one of an evaluation only if it is shown.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Num, UInt8

from digen_jax import rewards
from digen_jax.algorithms.advantages import AdvantageSettings, advantages, ranking, trained_images
from digen_jax.config.train_config import TrainConfig
from digen_jax.data.prompt_files import read_prompt_file, read_prompt_files
from digen_jax.errors import DivergedError
from digen_jax.images import as_scored, check_images, stills
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.parallel.reward_model import Scoring
from digen_jax.records.evaluation import Evaluation, Extremes, Sample, by_tag
from digen_jax.records.image_statistics import Looks, group_diversity, joined, look_beside
from digen_jax.rewards.built_in import on_mesh
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.exchanges import Exchange
from digen_jax.rewards.pool import RewardPool, Scored
from digen_jax.rewards.trial import try_out
from digen_jax.runtime.steps import StepImages, Steps
from digen_jax.scheduling.commands import Chunk
from digen_jax.scheduling.settings import Settings

# Statistics of each reward, by prefix of the metric's name.
STATISTICS = {"": np.mean, "std_": np.std, "min_": np.min, "max_": np.max}


class HeldOut:
    """The prompts of a run's evaluations, divided into chunks by the scheduler's settings."""

    def __init__(self, records: Sequence[dict[str, Any]], settings: Settings):
        self.records, self._settings = list(records), settings
        self.batch = settings.evaluation_batch  # images of a chunk

    def of(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The records of a chunk; the last one of an evaluation may have fewer than a batch."""
        count, first = self._settings.evaluated_images(chunk.step), self.first(chunk)
        return self.records[first : min(first + self.batch, count)]

    def first(self, chunk: Chunk) -> int:
        """The number of a chunk's first image."""
        return chunk.index * self.batch


class Kept(NamedTuple):
    """Images of a chunk that may be the step's best and worst."""

    places: Int[np.ndarray, "k"]  # within the chunk
    pictures: UInt8[np.ndarray, "k h w 3"]


class ScoredChunk(NamedTuple):
    """Scores and previews of a chunk's images."""

    scores: rewards.Scores
    values: Float32[np.ndarray, "b"] = np.zeros(0, np.float32)  # by which the scheduler compares
    seconds: float = 0.0  # that the rewards took
    exchanges: tuple[Exchange, ...] = ()  # with servers, on the clock of `time.perf_counter`
    looks: Future[Looks] | None = None  # None: without image statistics
    kept: Kept | None = None  # of a step
    clips: UInt8[np.ndarray, "k t h w 3"] | None = None  # of an evaluation: the first ones


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
        """A future `ScoredChunk` of images as bytes; `known` holds the scores of rewards on a mesh.

        The future raises the errors of `RewardPool.submit`'s, and DivergedError for NaN, which is no reward's error.
        """
        try:
            check_images(clips)
        except DivergedError as error:
            return failed(error)
        if chunk.evaluation:
            records = self.held_out.of(chunk)
        else:
            step = self.steps[chunk.step]
            records, rows = step.shown(chunk.index), step.rows[step.cut(chunk.index)]
        looks = look_beside(stills(clips))  # in parallel to the rewards
        prompts = [record["prompt"] for record in records]

        def scored_chunk(scored: Scored) -> ScoredChunk:
            values = rewards.total(scored.scores.columns, self.weights)
            found = ScoredChunk(scored.scores, values, scored.seconds, scored.exchanges, looks)
            most = self.settings.shown_images
            if chunk.evaluation:  # the first clips; if no picture is due only their middle frames
                first = clips[: max(0, most - self.held_out.first(chunk))]
                if not self.settings.is_shown(chunk.step):
                    first = stills(first)[:, None]
                return found._replace(clips=first.copy())  # so that the others can be freed
            shown = self.settings.is_shown(chunk.step + 1)
            places = ends(values, rows, most if shown else 0)
            return found._replace(kept=Kept(places, stills(clips)[places]))

        return then(self.pool.submit(as_scored(clips), prompts, records, known), scored_chunk)


def order(
    values: Float32[np.ndarray, "k"], rows: Int[np.ndarray, "k"], sign: int
) -> Int[np.ndarray, "k"]:
    """An order of images, for 1 the best first, for -1 the worst; of equal values first one of each group."""
    turn = np.zeros(len(values), int)
    for row, value in set(zip(rows, values, strict=True)):
        same = np.flatnonzero((rows == row) & (values == value))
        turn[same] = np.arange(len(same))
    return np.lexsort((np.arange(len(values)), turn, -sign * values))


def ends(
    values: Float32[np.ndarray, "b"], rows: Int[np.ndarray, "b"], keep: int
) -> Int[np.ndarray, "k"]:
    """The places of a chunk's best images and of its worst, so many of each, in ascending order."""
    return np.unique(np.concatenate([order(values, rows, sign)[:keep] for sign in (1, -1)]))


class Gathering:
    """Collects scores and clips of evaluations, chunk by chunk, until a version is complete; in the first process."""

    def __init__(self, held_out: HeldOut, names: tuple[str, ...], weights: Sequence[float]):
        self._held_out, self._names, self._weights = held_out, names, weights
        self._found: dict[int, dict[int, ScoredChunk]] = defaultdict(dict)

    def note(self, chunk: Chunk, scored_chunk: ScoredChunk) -> None:
        """Stores a scored chunk."""
        self._found[chunk.step][chunk.index] = scored_chunk

    def take(self, version: int) -> Evaluation:
        """Returns a version's complete evaluation and forgets it."""
        parts = [part for _, part in sorted(self._found.pop(version).items())]
        clips, scores = [part.clips for part in parts], [part.scores for part in parts]
        records = self._held_out.records[: sum(len(part.columns) for part in scores)]
        found = Evaluation.of(records, clips, scores, self._names, self._weights)
        return found._replace(looks=joined([part.looks.result() for part in parts]))

    def forget(self, version: int) -> None:
        """Forgets a version's evaluation, if there is one."""
        self._found.pop(version, None)


class TrainBatch(NamedTuple):
    """The images of a chunk that are given to the trainer, and their advantages and weights.

    For an algorithm that `ranks` they have ranks, and in early training rewards, instead of advantages.
    """

    places: Int[np.ndarray, "k"]  # within the chunk
    advantages: Float[np.ndarray, "k"]
    weight: Float32[np.ndarray, "k"]  # 0: the image's group is dropped


@dataclasses.dataclass
class StepScores:
    """The scores of a step's images; NaN for those that are not scored, and where a reward does not apply."""

    images: StepImages
    scores: Float32[np.ndarray, "n k"]  # a column for each score that has a weight
    settings: AdvantageSettings
    scored: Bool[np.ndarray, "n"]
    # Scores that have no weight: see `rewards.Scores`.
    shown: dict[str, Float32[np.ndarray, "n"]] = dataclasses.field(default_factory=dict)
    looks: dict[int, Future[Looks]] = dataclasses.field(default_factory=dict)  # by chunk
    # Images that may be the step's best and worst, by their places in the step.
    kept: dict[int, UInt8[np.ndarray, "h w 3"]] = dataclasses.field(default_factory=dict)

    @classmethod
    def begin(cls, images: StepImages, settings: AdvantageSettings) -> "StepScores":
        """Scores of a step of which nothing is scored."""
        count = len(images.rows)
        empty = np.full((count, len(settings.reward_weights)), np.nan, np.float32)
        return cls(images, empty, settings, np.zeros(count, bool))

    def note(self, index: int, scores: rewards.Scores) -> None:
        """Stores a chunk's scores."""
        cut = self.images.cut(index)
        self.scores[cut], self.scored[cut] = scores.columns, True
        for name, found in scores.shown.items():
            empty = np.full(len(self.scored), np.nan, np.float32)
            self.shown.setdefault(name, empty)[cut] = found

    def see(self, index: int, looks: Future[Looks], kept: Kept) -> None:
        """Stores the image statistics of a scored chunk, and the images that may be shown."""
        self.looks[index] = looks
        start = self.images.cut(index).start
        self.kept |= {
            start + int(place): one for place, one in zip(kept.places, kept.pictures, strict=True)
        }

    @property
    def members(self) -> Bool[np.ndarray, "n"]:
        """The scored images of the groups that form the step."""
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

    def batch(self, index: int, ranks: bool = False, early: bool = False) -> TrainBatch:
        """The trained part of a chunk, when the unit `AdvantageSettings.needs` is scored.

        The number of images given to the trainer does not depend on how many groups are dropped. With `ranks` the
        unit is `AdvantageSettings.ranking_needs`; `early`: before advantages are known.
        """
        settings = self.settings
        if ranks or early:
            values = self.values[self.images.cut(index)] if early else self.ranking(index)
            return TrainBatch(np.arange(len(values)), values, np.ones(len(values), np.float32))
        known, mine = self._known(index, settings.needs)
        given = trained_images(dataclasses.replace(settings, drop_zero_std=False), *known)[mine]
        weight = trained_images(settings, *known)[mine].astype(np.float32)
        found = advantages(settings, *known)[mine]
        return TrainBatch(np.flatnonzero(given), found[given], weight[given])

    def ranking(self, index: int) -> Float[np.ndarray, "b"]:
        """The ranks of a chunk's images, when the unit `AdvantageSettings.ranking_needs` is scored."""
        known, mine = self._known(index, self.settings.ranking_needs)
        return ranking(self.settings, *known)[mine]

    def _known(
        self, index: int, needs: Literal["group", "step"]
    ) -> tuple[tuple[np.ndarray, np.ndarray, int], Bool[np.ndarray, "m"]]:
        """((scores, groups, number of groups) of the images in the chunk's groups or step, which are its own)."""
        rows, cut = self.images.rows, self.images.cut(index)
        members = np.isin(rows, rows[cut]) if needs == "group" else self.members
        mine = np.isin(np.flatnonzero(members), np.arange(cut.start, cut.stop))
        return (self.scores[members], rows[members], len(self.images.records)), mine

    def extremes(self, most: int) -> Extremes | None:
        """At most this many of the best images and of the worst, none in both; None where none was kept."""
        values, rows = self.values, self.images.rows
        found = np.asarray([p for p in np.flatnonzero(self.members) if p in self.kept], int)
        count = min(most, len(found) // 2)
        if not count:
            return None

        def sample(places: Int[np.ndarray, "k"], sign: int) -> tuple[np.ndarray, Sample]:
            places = places[order(values[places], rows[places], sign)][:count]
            records = [self.images.records[row] for row in rows[places]]
            images = np.stack([self.kept[one] for one in places])
            return places, Sample(records, images, values[places])

        places, best = sample(found, 1)
        _, worst = sample(np.setdiff1d(found, places), -1)
        return Extremes(best, worst)

    def metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        """Mean and spread of the rewards of the groups that form a step, over all prompts and for each task.

        For several rewards these are of the weighted sum; mean, spread and range of each reward over the images to
        which it applies are added by its name, one of `names`.
        """
        members, records = self.members, self.images.records
        scores, rows = self.values[members], self.images.rows[members]
        shown, groups = [records[row] for row in rows], len(np.unique(rows))
        unweighted = {name: found[members] for name, found in self.shown.items()}
        each = rewards.each(names, rewards.Scores(self.scores[members], unweighted))
        each = {name: rewards.there(own) for name, own in each.items()}
        teaching = dataclasses.replace(self.settings, best_and_worst=0, drop_zero_std=True)
        taught = trained_images(teaching, self.scores[members], rows, len(records))
        metrics = {
            "reward": float(scores.mean()),
            "reward_std": float(scores.std()),
            "zero_std_groups": len(np.unique(rows[~taught])) / groups,
            **{
                f"reward_{what}of/{name}": float(statistic(own))
                for what, statistic in STATISTICS.items()
                for name, own in each.items()
                if len(own)
            },
            **{f"reward/{tag}": mean for tag, mean in by_tag(shown, scores).items()},
            **{f"reward_std/{tag}": std for tag, std in by_tag(shown, scores, np.std).items()},
        }
        if len(records) > groups:  # dynamic sampling: the candidates that were begun
            begun = members.copy()
            for index in self.images.dropped:
                begun[self.images.cut(index)] = True
            metrics["candidates"] = float(len(np.unique(self.images.rows[begun])))
        return metrics

    def image_metrics(self) -> dict[str, float]:
        """Image statistics of the groups that form a step, and the diversity within a group; empty without images."""
        chunks = [index for index in sorted(self.looks) if index not in self.images.dropped]
        if not chunks:
            return {}
        looks = joined([self.looks[index].result() for index in chunks])
        groups = np.concatenate([self.images.rows[self.images.cut(index)] for index in chunks])
        within = group_diversity(looks.thumbnails, groups)
        means = looks.means() | ({} if within is None else {"diversity": within})
        return {f"images/{name}": value for name, value in means.items()}


def then(found: Future, call: Callable[[Any], Any]) -> Future:
    """The future of a call with a future's result, in the thread that has the result; passes errors on."""
    made: Future = Future()

    def settle(done: Future) -> None:
        try:
            made.set_result(call(done.result()))
        except BaseException as error:
            made.set_exception(error)

    found.add_done_callback(settle)
    return made


def ready(result: Any) -> Future:
    """A future that has its result."""
    found: Future = Future()
    found.set_result(result)
    return found


def failed(error: BaseException) -> Future:
    """A future that has an error."""
    found: Future = Future()
    found.set_exception(error)
    return found


def try_files(recipe: TrainConfig, score: Callable[..., Any]) -> None:
    """Tries rewards on the prompts of training and of evaluation, with made-up images of the size that each has.

    Args:
      recipe: The validated config.
      score: As `RewardPool.score`.

    Raises:
      ConfigError: See `try_out`.
    """
    size = recipe.evaluation_size
    training = read_prompt_files(recipe.prompts.paths)
    try_out(score, training, recipe.model.height, recipe.model.width)
    try_out(score, [read_prompt_file(recipe.evaluation.prompts)], size.height, size.width)


def try_scorers(recipe: TrainConfig, scorers: tuple[Scoring, ...]) -> None:
    """Tries the rewards on a mesh by known scores and as `try_files`; with several processes in all of them.

    Raises:
      ConfigError: A score is not as it must be.
    """
    if not scorers:
        return
    found = rewards.Rewards(tuple(named(on_mesh(recipe.rewards), scorers).values()))
    check_canaries(found, found.score)
    try_files(recipe, found.score)
