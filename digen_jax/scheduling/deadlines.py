"""The time after which a worker or a transfer counts as hung."""

import dataclasses
import math

from digen_jax.scheduling.commands import Command, Train
from digen_jax.scheduling.costs import CostModel, cost_of

FACTOR = 10  # times the expected duration


@dataclasses.dataclass(frozen=True)
class Deadline:
    """`floor` is the least number of seconds that count as hung; 0: no deadline."""

    floor: float

    def seconds(self, expected: float | None = None) -> float:
        """Seconds after which work counts as hung; `expected` is its usual duration, None: unknown."""
        if not self.floor:
            return math.inf
        return max(self.floor, FACTOR * (expected or 0.0))


def expected(costs: CostModel, command: Command) -> float | None:
    """Seconds of a command by measurement; None before the first measurement of its kind.

    Costs that were assumed before a run do not count: they compare commands, and may have another unit.
    """
    kind = cost_of(command)
    if not costs.averages.get(kind):
        return None
    seconds = costs.predict(kind, getattr(command, "worker", ""))
    return seconds * command.count if isinstance(command, Train) else seconds
