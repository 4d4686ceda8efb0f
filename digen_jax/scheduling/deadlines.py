"""How long something may take before who does it counts as hung."""

import dataclasses
import math

from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.costs import CostModel, cost_of

FACTOR = 10  # times as long as expected


@dataclasses.dataclass(frozen=True)
class Deadline:
    """Seconds that anything may take, however quick it was before; 0: nothing is ever taken for hung."""

    floor: float

    def seconds(self, expected: float | None = None) -> float:
        """Seconds that work may take of which so many are expected, None: nothing is known of it."""
        if not self.floor:
            return math.inf
        return max(self.floor, FACTOR * (expected or 0.0))


def expected(costs: CostModel, command: Command) -> float | None:
    """Seconds that a command takes by what was measured; None before the first of its kind was.

    What costs were assumed before a run does not count: they compare commands, and may have another unit.
    """
    kind = cost_of(command)
    if not costs.averages.get(kind):
        return None
    return costs.predict(kind, getattr(command, "worker", ""), 1.0)
