"""Rewards: functions from images, prompts and metadata to scores.

A reward is `f(images uint8 [b, h, w, 3], prompts, metadata) -> scores [b]`, or `{name: scores [b]}`, in numpy on the
host; clips are `[b, t, h, w, 3]`. `images.to_uint8` converts a model's images to uint8.

The rewards of a run score the same images sequentially. Each reward has one column of scores per trained score; the
weighted sum of an image's columns (`total`) is its reward. The record field "rewards" names the rewards that apply to
a prompt; the columns of the others are NaN.
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
# (index of a reward, indices of the images to which it applies, answer)
Answers = Sequence[tuple[int, Int[np.ndarray, "_"], Answer]]


class Scores(NamedTuple):
    """Scores of a batch by all rewards; NaN if a reward does not apply."""

    columns: Float32[np.ndarray, "b k"]  # scores with a weight
    shown: Mapping[str, Float32[np.ndarray, "b"]]  # other scores, by "reward/score"


@dataclasses.dataclass(frozen=True)
class NamedReward:
    """Reward function and config section."""

    settings: RewardSettings
    function: Reward
    on_mesh: bool = False  # whether a run computes it on its rollout meshes, not by this function

    def applying(self, metadata: Sequence[Mapping[str, Any]]) -> Int[np.ndarray, "n"]:
        """Returns the indices of the records to which the reward applies."""
        name = self.settings.title
        return np.flatnonzero([name in record.get("rewards", (name,)) for record in metadata])

    def answer(self, batch: Batch) -> Answer:
        """Returns validated scores of images to which the reward applies. Raises like `call.call_reward`."""
        answer = call_reward(self.function, self.settings, *batch)
        return answer._replace(exchanges=take_exchanges())


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Rewards of a run."""

    members: tuple[NamedReward, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the score columns."""
        return tuple(name for one in self.members for name in one.settings.entries.values())

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the score columns."""
        return tuple(weight for one in self.members for weight in one.settings.weights)

    @property
    def label(self) -> str:
        """Names of all rewards, for messages."""
        return ", ".join(one.settings.title for one in self.members)

    def merged(self, count: int, answers: Answers) -> Scores:
        """Merges answers to the scores of `count` images."""
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
        """Scores a batch in this thread. Raises like `call.call_reward`."""
        found = answers(dict(enumerate(self.members)), (images, prompts, metadata))
        return self.merged(len(images), found)


def answers(members: Mapping[int, NamedReward], batch: Batch) -> Answers:
    """Returns the answers of `members` (by index) for the images to which they apply.

    Raises like `call.call_reward`.
    """
    applying = [(number, one, one.applying(batch[2])) for number, one in members.items()]
    return [
        (number, places, one.answer(cut(batch, places)))
        for number, one, places in applying
        if len(places)
    ]


def alone(name: str, function: Reward) -> Rewards:
    """Wraps a function, such as one defined in a notebook, as the only reward of a run."""
    return Rewards((NamedReward(RewardSettings(name), function),))


def cut(batch: Batch, places: Int[np.ndarray, "n"]) -> Batch:
    """Returns the subset of a batch at ascending indices; does not copy if that is the full batch."""
    images, prompts, metadata = batch
    if len(places) == len(images):
        return batch
    return images[places], [prompts[i] for i in places], [metadata[i] for i in places]


def total(columns: Float[np.ndarray, "b k"], weights: Sequence[float]) -> Float32[np.ndarray, "b"]:
    """Returns the weighted sum of each image's scores, ignoring NaN."""
    weighted = columns.astype(np.float64) * np.asarray(weights)
    # A matrix product could sum the rows of equal images in different orders.
    return np.where(np.isnan(weighted), 0.0, weighted).sum(axis=1).astype(np.float32)


def each(names: tuple[str, ...], scores: Scores) -> dict[str, Float32[np.ndarray, "b"]]:
    """Returns all scores by name; omits the score of a single reward, which equals the total."""
    columns = dict(zip(names, scores.columns.T, strict=True)) if len(names) > 1 else {}
    return columns | dict(scores.shown)


def applicable(scores: Float[np.ndarray, "b"]) -> Float[np.ndarray, "n"]:
    """Returns the scores that are not NaN."""
    return scores[~np.isnan(scores)]


def joined(parts: Sequence[Scores]) -> Scores:
    """Concatenates the scores of several batches."""
    names = dict.fromkeys(name for part in parts for name in part.shown)

    def of(part: Scores, name: str) -> np.ndarray:
        return part.shown.get(name, np.full(len(part.columns), np.nan, np.float32))

    shown = {name: np.concatenate([of(part, name) for part in parts]) for name in names}
    return Scores(np.concatenate([part.columns for part in parts]), shown)
