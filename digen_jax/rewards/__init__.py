"""Rewards: functions from images, prompts and metadata to scores.

A reward is `f(images uint8 [b, h, w, 3], prompts, metadata) -> scores [b]`, or `{name: scores [b]}`, numpy on the
host; clips are `[b, t, h, w, 3]`. `images.to_uint8` has the one rule that makes bytes of a model's pictures.

The rewards of a run score the same images, one after the other. Each has a column of scores, or several if it returns
several that are trained; the weighted sum of an image's columns (`total`) is its single number. A record's field
"rewards" names those that apply to its prompt; the others have no score there, and their columns hold NaN.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from digen_jax.rewards.call import Answer, Reward, called
from digen_jax.rewards.request_log import take_exchanges
from digen_jax.rewards.settings import RewardSettings

Batch = tuple[UInt8[np.ndarray, "_ ..."], list[str], list[dict[str, Any]]]
# (the number of a reward, the places of the images to which it applies, what it says of them)
Answers = Sequence[tuple[int, Int[np.ndarray, "_"], Answer]]


class Scores(NamedTuple):
    """What all rewards say of a batch."""

    columns: Float32[
        np.ndarray, "b k"
    ]  # the scores that have a weight; NaN: its reward does not apply
    # Scores that rewards return in addition to these, by "reward/score"; NaN likewise.
    shown: Mapping[str, Float32[np.ndarray, "b"]]


@dataclasses.dataclass(frozen=True)
class NamedReward:
    """A reward that can be called, and how a run asks for it."""

    settings: RewardSettings
    function: Reward
    on_mesh: bool = False  # a run computes it where it samples, and not by this function

    def applying(self, metadata: Sequence[Mapping[str, Any]]) -> Int[np.ndarray, "n"]:
        """The places of the records to which it applies."""
        name = self.settings.title
        return np.flatnonzero([name in record.get("rewards", (name,)) for record in metadata])

    def answer(self, batch: Batch) -> Answer:
        """Its checked scores of images to which it applies; raises as `call.called`."""
        return called(self.function, self.settings, *batch)._replace(exchanges=take_exchanges())


@dataclasses.dataclass(frozen=True)
class Rewards:
    """The rewards of a run."""

    members: tuple[NamedReward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each column of scores."""
        return tuple(name for one in self.members for name in one.settings.entries.values())

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each column."""
        return tuple(weight for one in self.members for weight in one.settings.weights)

    @property
    def label(self) -> str:
        """The names of all rewards, in errors."""
        return ", ".join(one.settings.title for one in self.members)

    def parts(self, metadata: Sequence[Mapping[str, Any]]) -> list[tuple[int, np.ndarray]]:
        """(the number of a reward, the places of the records to which it applies) of those that are asked."""
        found = [(number, one.applying(metadata)) for number, one in enumerate(self.members)]
        return [(number, places) for number, places in found if len(places)]

    def merged(self, count: int, answers: Answers) -> Scores:
        """The scores of `count` images: (the number of a reward, the places of the images, its answer) of each."""
        columns = np.full((count, len(self.names)), np.nan, np.float32)
        starts = np.cumsum([0, *(len(one.settings.entries) for one in self.members)])
        shown: dict[str, np.ndarray] = {}
        for number, places, answer in answers:
            columns[places, starts[number] : starts[number + 1]] = answer.columns
            for name, scores in answer.shown.items():
                shown[name] = np.full(count, np.nan, np.float32)
                shown[name][places] = scores
        return Scores(columns, shown)

    def score(self, images: np.ndarray, prompts: list[str], metadata: list[dict]) -> Scores:
        """The scores of a batch, asked in this thread; raises as `call.called`."""
        found = answers(dict(enumerate(self.members)), (images, prompts, metadata))
        return self.merged(len(images), found)


def answers(members: Mapping[int, NamedReward], batch: Batch) -> Answers:
    """What rewards, by their numbers, say of the images to which they apply; raises as `call.called`."""
    asked = ((number, one, one.applying(batch[2])) for number, one in members.items())
    return [
        (number, places, one.answer(cut(batch, places)))
        for number, one, places in asked
        if len(places)
    ]


def alone(name: str, function: Reward) -> Rewards:
    """A function as the only reward of a run, such as one that a notebook defines."""
    return Rewards((NamedReward(RewardSettings(name), function),))


def cut(batch: Batch, places: Int[np.ndarray, "n"]) -> Batch:
    """The images of a batch at some places, which ascend; all of them are not copied."""
    images, prompts, metadata = batch
    if len(places) == len(images):
        return batch
    return images[places], [prompts[i] for i in places], [metadata[i] for i in places]


def total(columns: Float[np.ndarray, "b k"], weights: Sequence[float]) -> Float32[np.ndarray, "b"]:
    """The weighted sum of each image's scores that are there: the number that is shown and compared."""
    weighed = columns.astype(np.float64) * np.asarray(weights)
    # no matrix product: it may add up the rows of equal images in different orders
    return np.where(np.isnan(weighed), 0.0, weighed).sum(axis=1).astype(np.float32)


def each(names: tuple[str, ...], scores: Scores) -> dict[str, Float32[np.ndarray, "b"]]:
    """All scores by their names, NaN where there is none; without that of a single reward, which is the total."""
    columns = dict(zip(names, scores.columns.T, strict=True)) if len(names) > 1 else {}
    return columns | dict(scores.shown)


def there(scores: Float[np.ndarray, "b"]) -> Float[np.ndarray, "n"]:
    """The scores of the images to which their reward applies."""
    return scores[~np.isnan(scores)]


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of several batches, one after the other."""
    columns = np.concatenate([part.columns for part in parts])
    names = dict.fromkeys(name for part in parts for name in part.shown)

    def of(part: Scores, name: str) -> np.ndarray:
        return part.shown.get(name, np.full(len(part.columns), np.nan, np.float32))

    return Scores(columns, {n: np.concatenate([of(part, n) for part in parts]) for n in names})
