"""Rewards: functions from images, prompts and metadata to scores.

A reward is `f(images uint8 [b, h, w, 3], prompts, metadata) -> scores [b]`, or `{name: scores [b]}`, in numpy on the
host; clips are `[b, t, h, w, 3]`. `images.to_uint8` is the rule by which a model's images become bytes.

The rewards of a run score the same images, one after the other. Each has a column of scores, or several if it returns
several that are trained; the weighted sum of an image's columns (`total`) is its reward. A record's field "rewards"
names those that apply to its prompt; the columns of the others are NaN.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from digen_jax.rewards.call import Answer, Reward, call_reward
from digen_jax.rewards.request_log import take_exchanges
from digen_jax.rewards.settings import RewardSettings

Batch = tuple[UInt8[np.ndarray, "_ ..."], list[str], list[dict[str, Any]]]
# (index of a reward, indices of the images to which it applies, its answer)
Answers = Sequence[tuple[int, Int[np.ndarray, "_"], Answer]]


class Scores(NamedTuple):
    """The scores of a batch by all rewards; NaN where a reward does not apply."""

    columns: Float32[np.ndarray, "b k"]  # the scores that have a weight
    shown: Mapping[str, Float32[np.ndarray, "b"]]  # other scores, by "reward/score"


@dataclasses.dataclass(frozen=True)
class NamedReward:
    """A reward's function and its section of the config."""

    settings: RewardSettings
    function: Reward
    on_mesh: bool = False  # whether a run computes it on its sampling meshes, not by this function

    def applying(self, metadata: Sequence[Mapping[str, Any]]) -> Int[np.ndarray, "n"]:
        """Returns the indices of the records to which it applies."""
        name = self.settings.title
        return np.flatnonzero([name in record.get("rewards", (name,)) for record in metadata])

    def answer(self, batch: Batch) -> Answer:
        """Returns its checked scores of images to which it applies; raises as `call.call_reward`."""
        answer = call_reward(self.function, self.settings, *batch)
        return answer._replace(exchanges=take_exchanges())


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
        """The names of all rewards, for messages."""
        return ", ".join(one.settings.title for one in self.members)

    def merged(self, count: int, answers: Answers) -> Scores:
        """Returns the scores of `count` images."""
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
        """Returns the scores of a batch, computed in this thread; raises as `call.call_reward`."""
        found = answers(dict(enumerate(self.members)), (images, prompts, metadata))
        return self.merged(len(images), found)


def answers(members: Mapping[int, NamedReward], batch: Batch) -> Answers:
    """Returns the answers of rewards, by their indices, for the images to which they apply.

    Raises as `call.call_reward`.
    """
    applying = [(number, one, one.applying(batch[2])) for number, one in members.items()]
    return [
        (number, places, one.answer(cut(batch, places)))
        for number, one, places in applying
        if len(places)
    ]


def alone(name: str, function: Reward) -> Rewards:
    """Returns a function as the only reward of a run, for example one that a notebook defines."""
    return Rewards((NamedReward(RewardSettings(name), function),))


def cut(batch: Batch, places: Int[np.ndarray, "n"]) -> Batch:
    """Returns the images of a batch at some ascending indices, without a copy if these are all."""
    images, prompts, metadata = batch
    if len(places) == len(images):
        return batch
    return images[places], [prompts[i] for i in places], [metadata[i] for i in places]


def total(columns: Float[np.ndarray, "b k"], weights: Sequence[float]) -> Float32[np.ndarray, "b"]:
    """Returns the weighted sum of each image's scores, without those that are NaN."""
    weighted = columns.astype(np.float64) * np.asarray(weights)
    # No matrix product: it may add the rows of equal images in different orders.
    return np.where(np.isnan(weighted), 0.0, weighted).sum(axis=1).astype(np.float32)


def each(names: tuple[str, ...], scores: Scores) -> dict[str, Float32[np.ndarray, "b"]]:
    """Returns all scores by name, without that of a single reward, which is the total."""
    columns = dict(zip(names, scores.columns.T, strict=True)) if len(names) > 1 else {}
    return columns | dict(scores.shown)


def applicable(scores: Float[np.ndarray, "b"]) -> Float[np.ndarray, "n"]:
    """Returns the scores of the images to which their reward applies."""
    return scores[~np.isnan(scores)]


def joined(parts: Sequence[Scores]) -> Scores:
    """Returns the concatenated scores of several batches."""
    names = dict.fromkeys(name for part in parts for name in part.shown)

    def of(part: Scores, name: str) -> np.ndarray:
        return part.shown.get(name, np.full(len(part.columns), np.nan, np.float32))

    shown = {name: np.concatenate([of(part, name) for part in parts]) for name in names}
    return Scores(np.concatenate([part.columns for part in parts]), shown)
