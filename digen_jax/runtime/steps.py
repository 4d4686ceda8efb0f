"""The data of the steps that are on or ahead: prompts, keys, and what became of each fragment."""

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from digen_jax import rewards
from digen_jax.algorithms.advantages import AdvantageSettings, advantages, ranking, trained_images
from digen_jax.engine.draws import Drawn, Draws
from digen_jax.engine.packing import Endpoints
from digen_jax.engine.sampler import Prompts
from digen_jax.flow.noising import turn_keys
from digen_jax.flow.sampling import Transitions
from digen_jax.images import as_judged
from digen_jax.scheduling.commands import Fragment


class Images(NamedTuple):
    """A fragment's images as they were sampled."""

    version: int  # of the policy that sampled them
    rows: Int[np.ndarray, "b"]  # each image's group within the step
    samples: Transitions | Endpoints
    sigmas: Float32[Array, "sigmas"]


class Lesson(NamedTuple):
    """The images of a fragment that are given to the trainer, and what it makes of each."""

    places: Int[np.ndarray, "k"]  # within the fragment
    advantages: Float32[np.ndarray, "k"]
    weight: Float32[np.ndarray, "k"]  # 0: of a group that is dropped


@dataclasses.dataclass
class Step:
    """One step: image j is the (j mod G)-th of group j // G. What is ready lies on the trainer mesh.

    With dynamic sampling the groups are all candidates that there may be, begun or not.
    """

    records: list[dict[str, Any]]
    size: int  # images of a fragment
    rows: Int[np.ndarray, "n"]
    drawn: Drawn
    training_keys: Key[
        Array, "n"
    ]  # of training's noise: the images' own, until it is their turn again
    scores: Float32[np.ndarray, "n k"]  # a column for each reward; NaN where not scored yet
    settings: AdvantageSettings
    prompts: Prompts | None = None
    sampled: dict[int, Images] = dataclasses.field(default_factory=dict)  # by fragment
    decoded: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # pictures to score
    dropped: set[int] = dataclasses.field(default_factory=set)  # begun fragments of no use

    @classmethod
    def begin(
        cls,
        number: int,
        records: list[dict[str, Any]],
        images: int,
        size: int,
        draws: Draws,
        settings: AdvantageSettings,
        turn: int = 0,
    ) -> "Step":
        """Nothing sampled yet; `images` a group, `size` a fragment. `turn`: times that it was trained before."""
        rows = np.repeat(np.arange(len(records), dtype=np.int32), images)
        serials = np.asarray([record["serial"] for record in records])[rows]
        numbers = np.tile(np.arange(images), len(records))
        drawn = draws.of(number, serials, numbers)
        scores = np.full((len(rows), len(settings.reward_weights)), np.nan, np.float32)
        return cls(records, size, rows, drawn, turn_keys(drawn.keys, turn), scores, settings)

    def cut(self, index: int) -> slice:
        """A fragment's images."""
        return slice(index * self.size, (index + 1) * self.size)

    @property
    def members(self) -> Bool[np.ndarray, "n"]:
        """The images of the groups that form the step, once these are known and scored."""
        dropped = np.isin(np.arange(len(self.rows)) // self.size, list(self.dropped))
        return np.isfinite(self.scores).all(axis=1) & ~dropped

    @property
    def values(self) -> Float32[np.ndarray, "n"]:
        """The one number of each image: its reward, of several the weighted sum."""
        return rewards.total(self.scores, self.settings.reward_weights)

    @property
    def reward_std(self) -> float:
        """The std of the rewards of the groups that form the step."""
        return float(self.values[self.members].std(dtype=np.float64))

    @property
    def generated(self) -> int:
        """The candidates that were begun, once it is known which form the step."""
        begun = self.members
        for index in self.dropped:
            begun[self.cut(index)] = True
        return len(np.unique(self.rows[begun]))

    def to_score(self, index: int) -> tuple[np.ndarray, list[str], list[dict[str, Any]]]:
        """(pictures or clips, prompts, metadata) of a decoded fragment."""
        shown = [self.records[row] for row in self.rows[self.cut(index)]]
        return as_judged(self.decoded[index]), [record["prompt"] for record in shown], shown

    def lesson(self, index: int) -> Lesson:
        """What of a fragment trains, once what `AdvantageSettings.needs` is scored.

        However many groups are dropped, as many images are given to the trainer.
        """
        settings = self.settings
        known, mine = self._known(index, settings.needs)
        given = trained_images(dataclasses.replace(settings, drop_zero_std=False), *known)[mine]
        weight = trained_images(settings, *known)[mine].astype(np.float32)
        found = advantages(settings, *known)[mine]
        return Lesson(np.flatnonzero(given), found[given], weight[given])

    def ranking(self, index: int) -> Float[np.ndarray, "b"]:
        """How the images of a fragment are ordered, once what `AdvantageSettings.ranking_needs` is scored."""
        known, mine = self._known(index, self.settings.ranking_needs)
        return ranking(self.settings, *known)[mine]

    def _known(
        self, index: int, needs: Literal["group", "step"]
    ) -> tuple[tuple[np.ndarray, np.ndarray, int], Bool[np.ndarray, "m"]]:
        """((scores, groups, number of groups) of the images of a fragment's groups or the step, which are its own)."""
        cut = self.cut(index)
        members = np.isin(self.rows, self.rows[cut]) if needs == "group" else self.members
        mine = np.isin(np.flatnonzero(members), np.arange(cut.start, cut.stop))
        return (self.scores[members], self.rows[members], len(self.records)), mine


class Steps:
    """The steps by number. Each draws its prompts when it is first asked for, in turn.

    Where the images are a fixed set, `batches` comes round again after `set_steps` steps; 0: never.
    May be used by several threads.
    """

    def __init__(
        self,
        batches: Iterator[list[dict[str, Any]]],
        images: int,
        size: int,
        draws: Draws,
        first: int,
        settings: AdvantageSettings,
        set_steps: int = 0,
    ):
        self.first = first  # the step that is on
        self._batches, self._make = batches, (images, size, draws, settings)
        self._set_steps, self._next = set_steps, first
        self._steps: dict[int, Step] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Step:
        with self._lock:
            while self._next <= number:
                turn = self._next // self._set_steps if self._set_steps else 0
                records = next(self._batches)
                self._steps[self._next] = Step.begin(self._next, records, *self._make, turn)
                self._next += 1
            return self._steps[number]

    def of(self, fragment: Fragment) -> Step:
        """A fragment's step."""
        return self[fragment.step]

    def find(self, fragment: Fragment) -> Step | None:
        """A fragment's step; None where the fragment has been dropped, and maybe its step has ended."""
        with self._lock:
            step = self._steps.get(fragment.step)
            return None if step is None or fragment.index in step.dropped else step

    def store(self, fragment: Fragment, pictures: np.ndarray, images: Images) -> None:
        """A fragment is whole; of one that was dropped meanwhile nothing is kept."""
        with self._lock:
            step = self._steps.get(fragment.step)
            if step is not None and fragment.index not in step.dropped:
                step.decoded[fragment.index] = pictures
                step.sampled[fragment.index] = images

    def drop(self, fragments: Iterable[Fragment]) -> None:
        """Frees what there is of candidates that do not form their step."""
        with self._lock:
            for fragment in fragments:
                step = self._steps[fragment.step]
                step.dropped.add(fragment.index)
                step.sampled.pop(fragment.index, None)
                step.decoded.pop(fragment.index, None)

    def end(self) -> Step:
        """The step that is on has ended: forgets and returns it."""
        with self._lock:
            self.first += 1
            return self._steps.pop(self.first - 1)
