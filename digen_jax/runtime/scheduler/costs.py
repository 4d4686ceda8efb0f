"""How long commands take: a moving average for every kind of command and worker."""

import dataclasses

from digen_jax.runtime.scheduler.settings import Costs

WEIGHT = 0.25  # of the newest measurement
SCALED = ("generate", "decode")  # kinds that a worker's speed divides


@dataclasses.dataclass
class CostModel:
    """Measured seconds, and the expected ones for what was not measured yet.

    `averages` are by kind and worker; under the worker "" they are of all workers, at speed 1.
    """

    expected: Costs
    images: int  # of a fragment
    averages: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def observe(self, kind: str, worker: str, speed: float, seconds: float) -> None:
        """Takes a measurement into the averages of its worker and of its kind."""
        known = self.averages.setdefault(kind, {})
        scale = speed if kind in SCALED else 1.0
        for name, new in ((worker, seconds), ("", seconds * scale)):
            known[name] = known[name] + WEIGHT * (new - known[name]) if name in known else new

    def predict(self, kind: str, worker: str, speed: float) -> float:
        """Seconds of the next command: this worker's average, else all workers', else as expected."""
        known = self.averages.get(kind)
        if not known:
            return self.expected.seconds(kind, self.images, speed)
        if worker in known:
            return known[worker]
        return known[""] / (speed if kind in SCALED else 1.0)
