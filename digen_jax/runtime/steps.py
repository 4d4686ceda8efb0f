"""Data of a step that every process computes from the config: prompts, and the keys of each image."""

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Array, Int, Key

from digen_jax.diffusion.noising import turn_keys
from digen_jax.parallel.sampler import Drawn, Draws
from digen_jax.scheduling.commands import Chunk


@dataclasses.dataclass
class StepImages:
    """The images of a step: image j is the (j mod G)-th of group j // G.

    With dynamic sampling the groups are all possible candidates, begun or not.
    """

    records: list[dict[str, Any]]
    size: int  # images of a chunk
    rows: Int[np.ndarray, "n"]
    drawn: Drawn
    training_keys: Key[Array, "n"]  # of training's noise: on the first turn the images' own keys
    dropped: set[int] = dataclasses.field(default_factory=set)  # begun, not needed

    @classmethod
    def begin(
        cls,
        number: int,
        records: list[dict[str, Any]],
        images: int,
        size: int,
        draws: Draws,
        turn: int = 0,
    ) -> "StepImages":
        """`images` a group, `size` a chunk. `turn`: how many times the step was trained before."""
        rows = np.repeat(np.arange(len(records), dtype=np.int32), images)
        serials = np.asarray([record["serial"] for record in records])[rows]
        drawn = draws.of(number, serials, np.tile(np.arange(images), len(records)))
        return cls(records, size, rows, drawn, turn_keys(drawn.keys, turn))

    def cut(self, index: int) -> slice:
        """The slice of a chunk's images."""
        return slice(index * self.size, (index + 1) * self.size)

    def shown(self, index: int) -> list[dict[str, Any]]:
        """The record of each image of a chunk."""
        return [self.records[row] for row in self.rows[self.cut(index)]]


class Steps:
    """The steps by number. Each draws its prompts at its first use, in order; those that have ended are not held.

    May be used by several threads.

    Args:
      batches: Prompt records of each step.
      images: Images of a group.
      size: Images of a chunk.
      draws: Draws keys and noise.
      first: The present step.
      set_steps: Steps after which `batches` repeats, if the images are a fixed set. 0 means never.
    """

    def __init__(
        self,
        batches: Iterator[list[dict[str, Any]]],
        images: int,
        size: int,
        draws: Draws,
        first: int,
        set_steps: int = 0,
    ):
        self.first = first  # the present step
        self._batches, self._make = batches, (images, size, draws)
        self._set_steps, self._next = set_steps, first
        self._steps: dict[int, StepImages] = {}
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> StepImages:
        with self._lock:
            while self._next <= number:
                records = next(self._batches)
                if self._next >= self.first:
                    turn = self._next // self._set_steps if self._set_steps else 0
                    begun = StepImages.begin(self._next, records, *self._make, turn)
                    self._steps[self._next] = begun
                self._next += 1
            return self._steps[number]

    def draw(self, number: int) -> None:
        """Draws the prompts of a step, unless it has ended: for a process in which no mesh encodes them."""
        if number >= self.first:
            self[number]

    def find(self, chunk: Chunk) -> StepImages | None:
        """The step of a chunk; None if the chunk was dropped (its step may have ended)."""
        with self._lock:
            step = self._steps.get(chunk.step)
            return None if step is None or chunk.index in step.dropped else step

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Marks candidates that do not form their step."""
        with self._lock:
            for chunk in chunks:
                self._steps[chunk.step].dropped.add(chunk.index)

    def end(self) -> None:
        """Forgets the present step, which has ended."""
        self.forget(self.first + 1)

    def forget(self, before: int) -> None:
        """Forgets all steps before this one, which have ended."""
        with self._lock:
            self.first = max(self.first, before)
            for number in [number for number in self._steps if number < self.first]:
                del self._steps[number]
