"""The scores of a step on the leader, and the advantages that follow from them."""

import dataclasses
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

from digen_jax import rewards
from digen_jax.algorithms.advantages import AdvantageSettings, advantages, ranking, trained_images
from digen_jax.runtime.image_statistics import Looks, joined
from digen_jax.runtime.steps import StepImages


def sent(columns: Float32[np.ndarray, "b k"]) -> list[list[float | None]]:
    """Scores for other processes: None where there is none."""
    return [[None if np.isnan(one) else float(one) for one in row] for row in columns]


def received(columns: list[list[float | None]]) -> rewards.Scores:
    """The inverse of `sent`; scores that are only shown are not sent."""
    return rewards.Scores(np.asarray(columns, np.float32), {})


class Lesson(NamedTuple):
    """The images of a chunk that are given to the trainer, and their advantages and weights."""

    places: Int[np.ndarray, "k"]  # within the chunk
    advantages: Float32[np.ndarray, "k"]
    weight: Float32[np.ndarray, "k"]  # 0: the image's group is dropped


class Sample(NamedTuple):
    """A few of a step's images, with the records of their prompts and their values."""

    records: list[dict[str, Any]]
    images: UInt8[np.ndarray, "k h w 3"]
    values: Float32[np.ndarray, "k"]


class Extremes(NamedTuple):
    """The best and the worst images of a step, the most extreme first; of equal ones, of several prompts."""

    best: Sample
    worst: Sample


class Kept(NamedTuple):
    """Those pictures of a chunk that may be the step's best and worst."""

    places: Int[np.ndarray, "k"]  # within the chunk
    pictures: UInt8[np.ndarray, "k h w 3"]


class Seen(NamedTuple):
    """A chunk's pictures: what they look like, and those that may be the step's best and worst, by their places."""

    looks: Future[Looks]
    kept: dict[int, UInt8[np.ndarray, "h w 3"]]


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


@dataclasses.dataclass
class StepScores:
    """The scores of a step's images; NaN for those that are not scored, and where a reward does not apply."""

    images: StepImages
    scores: Float32[np.ndarray, "n k"]  # a column for each score that has a weight
    settings: AdvantageSettings
    scored: Bool[np.ndarray, "n"]
    # Scores that have no weight: see `rewards.Scores`.
    shown: dict[str, Float32[np.ndarray, "n"]] = dataclasses.field(default_factory=dict)
    seen: dict[int, Seen] = dataclasses.field(default_factory=dict)  # by chunk

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
        """Notes what the pictures of a scored chunk look like, and holds those that may be shown."""
        start = self.images.cut(index).start
        pictures = zip(kept.places, kept.pictures, strict=True)
        self.seen[index] = Seen(looks, {start + int(place): one for place, one in pictures})

    def looks(self) -> tuple[Looks, Int[np.ndarray, "m"]] | None:
        """(what the members look like, the group of each); None where no picture was seen."""
        found = [index for index in sorted(self.seen) if index not in self.images.dropped]
        if not found:
            return None
        rows = [self.images.rows[self.images.cut(index)] for index in found]
        return joined([self.seen[index].looks.result() for index in found]), np.concatenate(rows)

    def extremes(self, most: int) -> Extremes | None:
        """At most this many of the best images and of the worst, none in both; None where none was kept."""
        kept = {place: one for seen in self.seen.values() for place, one in seen.kept.items()}
        members = np.flatnonzero(self.members)
        found = np.asarray([place for place in members if place in kept], int)
        count = min(most, len(found) // 2)
        if not count:
            return None
        best = self._order(found, 1)[:count]
        worst = self._order(np.setdiff1d(found, best), -1)[:count]

        def sample(places: Int[np.ndarray, "k"]) -> Sample:
            records = [self.images.records[row] for row in self.images.rows[places]]
            return Sample(records, np.stack([kept[one] for one in places]), self.values[places])

        return Extremes(sample(best), sample(worst))

    def _order(self, places: Int[np.ndarray, "k"], sign: int) -> Int[np.ndarray, "k"]:
        """Places of images in the order of `order`."""
        return places[order(self.values[places], self.images.rows[places], sign)]

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

    def each(self, names: tuple[str, ...]) -> dict[str, Float32[np.ndarray, "m"]]:
        """The scores of the members by name: see `rewards.each`."""
        members = self.members
        shown = {name: found[members] for name, found in self.shown.items()}
        return rewards.each(names, rewards.Scores(self.scores[members], shown))

    @property
    def std(self) -> float:
        """The std of the rewards over the groups that form the step."""
        return float(self.values[self.members].std(dtype=np.float64))

    @property
    def generated(self) -> int:
        """The number of begun candidates, when it is known which form the step."""
        begun = self.members
        for index in self.images.dropped:
            begun[self.images.cut(index)] = True
        return len(np.unique(self.images.rows[begun]))

    def lesson(self, index: int) -> Lesson:
        """The trained part of a chunk, when the unit `AdvantageSettings.needs` is scored.

        The number of images given to the trainer does not depend on how many groups are dropped.
        """
        settings = self.settings
        known, mine = self._known(index, settings.needs)
        given = trained_images(dataclasses.replace(settings, drop_zero_std=False), *known)[mine]
        weight = trained_images(settings, *known)[mine].astype(np.float32)
        found = advantages(settings, *known)[mine]
        return Lesson(np.flatnonzero(given), found[given], weight[given])

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
