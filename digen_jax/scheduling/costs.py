"""Durations of commands: a moving average for every kind of command and worker, and when work counts as hung."""

import dataclasses
import math

from digen_jax.scheduling.commands import Command, Train
from digen_jax.scheduling.settings import Costs, Settings

WEIGHT = 1 / 16  # of the newest measurement, after the first 1 / WEIGHT of them
HUNG = 10  # times the expected duration, after which work counts as hung
# An evaluation's chunks have another size, schedule and guidance.
OF_EVALUATION = {
    "generate": "evaluate",
    "decode": "decode evaluation",
    "score": "score evaluation",
}

# Before anything is measured: an image takes as long to train as to generate.
GUESSED = Costs(generate=1.0, train=1.0)


def cost_of(command: Command) -> str:
    """The kind of cost of a command."""
    chunk = getattr(command, "chunk", None)
    if chunk is not None and chunk.evaluation:
        return OF_EVALUATION[command.kind]
    return command.kind


@dataclasses.dataclass
class CostModel:
    """Measured seconds, and the expected ones for kinds that were not measured yet; "train" is for one pass.

    `averages` are by kind and worker; those of worker "" are over all workers. The first measurements have equal
    weights: otherwise one long or short first measurement would dominate.
    """

    expected: Costs
    images: int  # of a chunk
    passes: int  # of a chunk
    averages: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def begin(cls, expected: Costs, settings: Settings) -> "CostModel":
        """Nothing is measured yet."""
        return cls(expected, settings.chunk_images, settings.passes)

    def observe(self, command: Command, seconds: float) -> None:
        """Adds a measurement to the averages of its worker and of its kind."""
        kind, worker = cost_of(command), getattr(command, "worker", "")
        if isinstance(command, Train):
            seconds /= command.count
        known, counts = self.averages.setdefault(kind, {}), self.counts.setdefault(kind, {})
        # A kind without a worker, such as a score, is under "" only.
        for name in {worker, ""}:
            counts[name] = counts.get(name, 0) + 1
            average = known.get(name, seconds)
            known[name] = average + max(WEIGHT, 1 / counts[name]) * (seconds - average)

    def predict(self, kind: str, worker: str = "") -> float:
        """Seconds of the next command: this worker's average, else all workers', else the expected cost."""
        known = self.averages.get(kind)
        if not known:
            return self.expected.seconds(kind, self.images, 1 / self.passes)
        return known.get(worker, known[""])

    def measured(self, command: Command) -> float | None:
        """Seconds of a command by measurement. None before the first measurement of its kind.

        The expected costs do not count: they compare commands, and may have another unit.
        """
        kind = cost_of(command)
        if not self.averages.get(kind):
            return None
        seconds = self.predict(kind, getattr(command, "worker", ""))
        return seconds * command.count if isinstance(command, Train) else seconds


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The time after which a worker or a transfer counts as hung: at least `least` seconds. 0 means no deadline."""

    least: float

    def seconds(self, expected: float | None = None) -> float:
        """Seconds after which work counts as hung.

        Args:
          expected: its usual duration. None means unknown.
        """
        return max(self.least, HUNG * (expected or 0.0)) if self.least else math.inf
