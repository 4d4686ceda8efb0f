"""Durations of commands: a moving average for every kind of command and worker."""

import dataclasses

from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.settings import Costs

WEIGHT = 1 / 16  # of the newest measurement, after the first 1 / WEIGHT of them
SCALED = (
    "generate",
    "decode",
    "evaluate",
    "decode evaluation",
)  # kinds that a worker's speed divides
# An evaluation's fragments have another size, schedule and guidance.
OF_EVALUATION = {
    "generate": "evaluate",
    "decode": "decode evaluation",
    "score": "score evaluation",
}

# Before anything is measured: an image takes as long to train as to generate.
GUESSED = Costs(generate=1.0, train=1.0)


def cost_of(command: Command) -> str:
    """The kind of cost of a command."""
    fragment = getattr(command, "fragment", None)
    if fragment is not None and fragment.evaluation:
        return OF_EVALUATION[command.kind]
    return command.kind


@dataclasses.dataclass
class CostModel:
    """Measured seconds, and the expected ones for kinds that were not measured yet.

    `averages` are by kind and worker; those of worker "" are over all workers, scaled to speed 1. The
    first measurements have equal weights: otherwise one long or short first measurement would dominate.
    """

    expected: Costs
    images: int  # of a fragment
    averages: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def observe(self, kind: str, worker: str, speed: float, seconds: float) -> None:
        """Adds a measurement to the averages of its worker and of its kind."""
        known, counts = self.averages.setdefault(kind, {}), self.counts.setdefault(kind, {})
        scale = speed if kind in SCALED else 1.0
        # A kind without a worker, such as a score, is under "" only.
        for name, new in {worker: seconds, "": seconds * scale}.items():
            counts[name] = counts.get(name, 0) + 1
            average = known.get(name, new)
            known[name] = average + max(WEIGHT, 1 / counts[name]) * (new - average)

    def predict(self, kind: str, worker: str, speed: float) -> float:
        """Seconds of the next command: this worker's average, else all workers', else the expected cost."""
        known = self.averages.get(kind)
        if not known:
            return self.expected.seconds(kind, self.images, speed)
        if worker in known:
            return known[worker]
        return known[""] / (speed if kind in SCALED else 1.0)
