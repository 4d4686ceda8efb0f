"""The data of the steps that are on or ahead: prompts, keys, and what became of each fragment."""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32, Int, Key

from digen_jax.algorithms.advantages import group_advantages
from digen_jax.flow.sampling import Transitions, image_keys
from digen_jax.runtime.sampler import Prompts
from digen_jax.runtime.scheduler.commands import Fragment


class Images(NamedTuple):
    """A fragment's images as they were sampled."""

    version: int  # of the policy that sampled them
    rows: Int[np.ndarray, "b"]  # each image's group within the step
    transitions: Transitions
    sigmas: Float32[Array, "sigmas"]


@dataclasses.dataclass
class Step:
    """One step: image j is the (j mod G)-th of group j // G. What is ready lies on the trainer mesh."""

    records: list[dict[str, Any]]
    size: int  # images of a fragment
    rows: Int[np.ndarray, "n"]
    keys: Key[Array, "n"]
    scores: Float32[np.ndarray, "n"]  # NaN where not scored yet
    prompts: Prompts | None = None
    sampled: dict[int, Images] = dataclasses.field(default_factory=dict)  # by fragment
    decoded: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # pictures to score

    @classmethod
    def begin(cls, records: list[dict[str, Any]], images: int, size: int, seed: int) -> "Step":
        """Nothing sampled yet; `images` a group, `size` a fragment."""
        rows = np.repeat(np.arange(len(records), dtype=np.int32), images)
        serials = np.asarray([record["serial"] for record in records])[rows]
        numbers = np.tile(np.arange(images), len(records))
        keys = image_keys(jax.random.key(seed), serials, numbers)
        return cls(records, size, rows, keys, np.full(len(rows), np.nan, np.float32))

    @property
    def texts(self) -> list[str]:
        """The prompt of each group."""
        return [record["prompt"] for record in self.records]

    def cut(self, index: int) -> slice:
        """A fragment's images."""
        return slice(index * self.size, (index + 1) * self.size)

    def to_score(self, index: int) -> tuple[np.ndarray, list[str], list[dict[str, Any]]]:
        """(pictures, prompts, metadata) of a decoded fragment, whose pictures are given away."""
        shown = [self.records[row] for row in self.rows[self.cut(index)]]
        return self.decoded.pop(index), [record["prompt"] for record in shown], shown

    def advantages(self, index: int, std: Literal["group", "global"]) -> Float32[np.ndarray, "b"]:
        """A fragment's advantages, once its groups, or for a global std all of them, are scored."""
        cut = self.cut(index)
        members = np.ones(len(self.rows), bool)
        if std == "group":
            members = np.isin(self.rows, self.rows[cut])
        found = np.zeros(len(self.rows), np.float32)
        found[members] = group_advantages(
            self.scores[members], self.rows[members], len(self.records), std
        )
        return found[cut]


class Steps:
    """The steps by number. Each draws its prompts when it is first asked for, in turn.

    May be used by several threads.
    """

    def __init__(
        self, batches: Iterator[list[dict[str, Any]]], images: int, size: int, seed: int, first: int
    ):
        self.first = first  # the step that is on
        self._batches, self._make = batches, (images, size, seed)
        self._next = first
        self._steps: dict[int, Step] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Step:
        with self._lock:
            while self._next <= number:
                self._steps[self._next] = Step.begin(next(self._batches), *self._make)
                self._next += 1
            return self._steps[number]

    def of(self, fragment: Fragment) -> Step:
        """A fragment's step."""
        return self[fragment.step]

    def end(self) -> Step:
        """The step that is on has ended: forgets and returns it."""
        with self._lock:
            self.first += 1
            return self._steps.pop(self.first - 1)
