"""Rewards: their config section, calls, and validated scores.

A reward is `f(images uint8 [b, h, w, 3], prompts, metadata) -> scores [b]`, or `{name: scores [b]}`, in numpy on the
host; clips are `[b, t, h, w, 3]`. `images.to_uint8` converts a model's images to uint8. A function with the attribute
`groupwise` is called separately for each group, with all of its images (`NamedReward.groupwise`).

The rewards of a run score the same images sequentially. Each reward has one column of scores per trained score; the
weighted sum of an image's columns (`total`) is its reward. The record field "rewards" names the rewards that apply to
a prompt; the columns of the others are NaN.

Requests of rewards to servers (`Exchange`) are recorded in the scoring process and returned with the answer, as times
relative to it. The processes need not share a clock; the error is the latency of the answer.
"""

import collections
import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from digen_jax.errors import NonNegativeFloat
from digen_jax.images import writable_copy
from digen_jax.process.shutdown import exits_raise
from digen_jax.rewards.dry_run import call_watched
from digen_jax.rewards.errors import DELIBERATE, RewardError, user_code


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """Settings of one reward; the config has a list of these sections. A name stands for a section with that name.

    On the command line, `--config.rewards[0].weight=0.5` sets a field of the first section in the config file.
    `--config.rewards`, repeated for several names, replaces the list.
    """

    name: str = "shapes_geneval"  # built-in reward, or module:function
    # factor of its scores in the trained sum, or of its advantages (see `advantages.combine`); for a reward that
    # returns several scores, a dict with a factor per trained score; 0 means logged, but not trained
    weight: float | Mapping[str, float] = 1.0
    # settings of the reward, by name
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # name in metrics and in the field "rewards" of prompts; "" means `name`. Sections with the same reward, such as
    # two of "served" with different servers, need different labels
    label: str = ""
    # timeout per batch of images in seconds; 0 means `runtime.deadline`
    limit: NonNegativeFloat = 0.0
    # maximum absolute advantage before weighting, if `advantages.combine` is "advantages"; 0 means no limit
    clip: NonNegativeFloat = 0.0
    # where it is computed: "mesh", on the sampling devices after decoding (clip_score, pickscore, hpsv2 and
    # aesthetic); "pool", in the processes of `reward_pool`; "" means on the mesh if possible
    where: Literal["", "mesh", "pool"] = ""

    @property
    def title(self) -> str:
        """Label, or name if there is none; unique among the sections."""
        return self.label or self.name

    @property
    def entries(self) -> dict[str, str]:
        """Scores with a weight: maps keys of the reward's returned dict to score names.

        The key of a reward with a single weight is the reward's name, without its module.
        """
        if isinstance(self.weight, Mapping):
            return {entry: f"{self.title}/{entry}" for entry in self.weight}
        return {self.name.rpartition(":")[2]: self.title}

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each of `entries`."""
        weights = self.weight.values() if isinstance(self.weight, Mapping) else [self.weight]
        return tuple(map(float, weights))

    @property
    def clips(self) -> tuple[float, ...]:
        """Advantage clip limit of each of `entries`."""
        return (self.clip,) * len(self.entries)


ADDRESS = 40  # maximum characters of an address in a row name
KEPT = 10_000  # maximum requests kept until the next answer; older ones are dropped


class Exchange(NamedTuple):
    """A request in the timeline; times are `time.perf_counter` seconds unless stated otherwise."""

    server: str
    begin: float
    end: float
    images: int
    failure: str | None  # reason for a retry


_recorded: collections.deque[Exchange] = collections.deque(maxlen=KEPT)


def record_exchange(
    kind: str, address: str, begin: float, images: int, failure: str | None
) -> None:
    """Records a request that ends now, to a server of a kind such as "judge". Thread-safe.

    The row of a server is its kind and address, such as "judge 127.0.0.1:8000"; long addresses are shortened.
    """
    short = address.partition("://")[2]
    if len(short) > ADDRESS:
        short = f"{short[: ADDRESS // 2]}…{short[-ADDRESS // 2 + 1 :]}"
    _recorded.append(Exchange(f"{kind} {short}", begin, time.perf_counter(), images, failure))


def take_exchanges() -> tuple[Exchange, ...]:
    """Returns and clears the recorded requests, with (negative) times relative to now."""
    found = []
    while _recorded:
        found.append(_recorded.popleft())
    return moved(found, -time.perf_counter())


def moved(exchanges: Iterable[Exchange], seconds: float) -> tuple[Exchange, ...]:
    """Shifts the times of exchanges by some seconds, such as to another clock."""
    return tuple(e._replace(begin=e.begin + seconds, end=e.end + seconds) for e in exchanges)


Reward = Callable[..., Any]
LARGEST = 1e15  # maximum absolute score; sums of squares still fit float32


class Answer(NamedTuple):
    """Scores of images by one reward."""

    columns: Float32[np.ndarray, "b c"]  # one per entry of `RewardSettings.entries`
    shown: Mapping[str, Float32[np.ndarray, "b"]]  # other scores, by "reward/score"
    seconds: float  # duration of the call
    exchanges: tuple[Exchange, ...]  # server requests: see `take_exchanges`


def _list(names: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, names)) or "of no name"


def _check(returned: object, name: str, prompts: list[str]) -> Float32[np.ndarray, "b"]:
    """Returns one float32 score per prompt."""
    returned_by, count = f"reward {name!r} returned", len(prompts)
    if returned is None:
        raise RewardError(f"{returned_by} None: return one number per image")
    try:
        scores = np.asarray(_readable(returned))
    # Ragged lists raise this, and custom classes may raise anything.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"a {type(returned).__name__} that is no array ({reason})"
        raise RewardError(f"{returned_by} {what}: return one number per image") from error
    if scores.shape != (count,):
        shapes = f"{scores.shape} for {count} images"
        raise RewardError(f"{returned_by} shape {shapes}: return one number per image")
    if scores.dtype.kind not in "biuf":
        raise RewardError(f"{returned_by} {scores.dtype} values: return numbers")
    for i in np.flatnonzero(~(np.abs(scores.astype(np.float64)) <= LARGEST)):
        where = f"{scores[i]} for image {i} ({prompts[i]!r})"
        raise RewardError(f"{returned_by} {where}: return finite numbers, at most {LARGEST:g}")
    return scores.astype(np.float32)


def _readable(scores: Any) -> Any:
    """Converts scores for numpy, including torch tensors on any device, with or without gradients.

    bfloat16 and other dtypes without numpy equivalent are widened; lists are converted per item.
    """
    if isinstance(scores, list | tuple):
        return [_readable(one) for one in scores]
    if hasattr(scores, "detach") and hasattr(scores, "cpu"):
        scores = scores.detach().cpu()
        scores = scores.double() if scores.is_floating_point() else scores
    if not hasattr(scores, "__array__"):
        return scores
    found = np.asarray(scores)
    extended = found.dtype.kind == "V" and np.can_cast(found.dtype, np.float32)
    return found.astype(np.float32) if extended else found


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

    @property
    def groupwise(self) -> bool:
        """Whether the function must get exactly one complete group: its attribute `groupwise`."""
        return bool(getattr(getattr(self.function, "func", self.function), "groupwise", False))

    def applying(self, metadata: Sequence[Mapping[str, Any]]) -> Int[np.ndarray, "n"]:
        """Returns the indices of the records to which the reward applies."""
        name = self.settings.title
        return np.flatnonzero([name in record.get("rewards", (name,)) for record in metadata])

    def answer(self, batch: Batch) -> Answer:
        """Returns the reward's scores of images to which it applies, as validated float32 values.

        The reward gets copies of its arguments, because it may modify them. A group is consecutive images with equal
        records; records of different groups of a step differ in their `serial`.

        Raises:
          RewardFailed: The reward raises an exception.
          RewardError: There is not one finite score per image, or a score with a weight is missing.
        """
        start = time.perf_counter()
        if self.groupwise:
            places, metadata = np.arange(len(batch[1])), batch[2]
            starts = [place for place in places[1:] if metadata[place] != metadata[place - 1]]
            groups = np.split(places, starts)
            scores = joined([self._score(subset(batch, group)) for group in groups])
        else:
            scores = self._score(batch)
        return Answer(*scores, time.perf_counter() - start, take_exchanges())

    def _score(self, batch: Batch) -> "Scores":
        """Returns the scores of one call; see `answer`."""
        name, weight, entries = self.settings.title, self.settings.weight, self.settings.entries
        images, prompts, metadata = batch

        def score(images: np.ndarray) -> Any:
            return self.function(writable_copy(images), [*prompts], copy.deepcopy(metadata))

        with user_code(name, "raised", DELIBERATE), exits_raise():
            returned = call_watched(name, score, images)
        if not isinstance(returned, Mapping):
            if isinstance(weight, Mapping):
                raise RewardError(
                    f"reward {name!r} returned no dict, but its weight names the scores "
                    f"{_list(weight)}: return {{name: scores}}, or give it a number as weight"
                )
            return Scores(_check(returned, name, prompts)[:, None], {})
        if missing := [entry for entry in entries if entry not in returned]:
            raise RewardError(
                f"reward {name!r} returned the scores {_list(returned)}, but {missing[0]!r} is to be "
                "trained: return that too, or give the reward a weight of the form {name: factor}"
            )
        found = {entry: _check(one, f"{name}/{entry}", prompts) for entry, one in returned.items()}
        columns = np.stack([found[entry] for entry in entries], axis=1)
        shown = {f"{name}/{one}": scores for one, scores in found.items() if one not in entries}
        return Scores(columns, shown)


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
        """Scores a batch in this thread. Raises like `NamedReward.answer`."""
        found = answers(dict(enumerate(self.members)), (images, prompts, metadata))
        return self.merged(len(images), found)


def answers(members: Mapping[int, NamedReward], batch: Batch) -> Answers:
    """Returns the answers of `members` (by index) for the images to which they apply.

    Raises like `NamedReward.answer`.
    """
    found = []
    for number, one in members.items():
        if len(places := one.applying(batch[2])):
            found.append((number, places, one.answer(subset(batch, places))))
    return found


def alone(name: str, function: Reward) -> Rewards:
    """Wraps a function, such as one defined in a notebook, as the only reward of a run."""
    return Rewards((NamedReward(RewardSettings(name), function),))


def subset(batch: Batch, places: Int[np.ndarray, "n"]) -> Batch:
    """Returns the subset of a batch at ascending indices; does not copy consecutive images."""
    images, prompts, metadata = batch
    first, end = places[0], places[-1] + 1
    images = images[first:end] if end - first == len(places) else images[places]
    return images, [prompts[i] for i in places], [metadata[i] for i in places]


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
    missing = [np.full(len(part.columns), np.nan, np.float32) for part in parts]
    shown = {}
    for name in dict.fromkeys(name for part in parts for name in part.shown):
        pairs = zip(parts, missing, strict=True)
        shown[name] = np.concatenate([part.shown.get(name, nan) for part, nan in pairs])
    return Scores(np.concatenate([part.columns for part in parts]), shown)
