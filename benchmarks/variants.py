"""The compared kinds of layouts: the work of a step, and the best layout of a kind by the planner."""

import dataclasses

from digen_jax.errors import ConfigError, check_positive
from digen_jax.scheduling.layouts import PoolLayout, Problem
from digen_jax.scheduling.planner import Simulations, layouts, search
from digen_jax.scheduling.settings import Costs, Settings

DECODE = 0.05  # of the seconds of generation

# The rows of the table, as in `PoolLayout.kind`.
COLOCATED = "colocated"
KINDS = (
    COLOCATED,
    "disaggregated",
    "disaggregated, lag 1",
    "pool",
    "pool, lag 1",
    "rollout + pool, lag 1",
)


@dataclasses.dataclass(frozen=True)
class Work:
    """A step and the costs of its commands.

    Attributes:
      devices: Number of equal devices.
      generate, train: Ratio of their device-seconds.
      seconds: Duration of a step if all devices were always busy: the bound (G + T)/N.
      encode, update, sync: Shares of that bound.
      score: Duration of scoring a step's images by the one scorer, as a share of the bound.
      groups, images: Groups of a step, images of a group.
      chunk: Images of a chunk on each device of a worker.
      passes: Parts of the training of such a chunk.
    """

    devices: int = 8
    generate: float = 1.0
    train: float = 1.0
    seconds: float = 4.0
    encode: float = 0.002
    update: float = 0.01
    sync: float = 0.02
    score: float = 0.1
    groups: int = 16
    images: int = 8
    chunk: int = 1
    passes: int = 8

    def check(self) -> None:
        """Refuses work that cannot be measured.

        Raises:
          ConfigError: names the field and what to change.
        """
        if self.devices < 2:
            raise ConfigError(f"devices must be at least 2 to be split, not {self.devices}")
        for name in ("generate", "train", "seconds"):
            check_positive(name, getattr(self, name))
        for name in ("encode", "update", "sync", "score"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def problem(self) -> Problem:
        """The planner's problem; a worker of n devices takes 1/n of the seconds of one device."""
        images = self.groups * self.images
        image = self.seconds * self.devices / images
        sampling = image * self.generate / (self.generate + self.train)
        costs = Costs(
            generate=sampling * (1 - DECODE),
            decode=sampling * DECODE,
            train=image - sampling,
            encode=self.encode * self.seconds,
            update=self.update * self.seconds,
            sync=self.sync * self.seconds,
            score=self.score * self.seconds / images,
        )
        settings = Settings(1, self.groups, self.images, self.chunk, passes=self.passes)
        chunks = self.chunk, self.chunk * self.devices
        return Problem(self.devices, settings, costs, scorers=1, chunks=chunks)


def best_layout(work: Work, kind: str) -> PoolLayout:
    """The fastest layout of a kind by the planner's search. All workers but a colocated one have one device.

    Raises:
      ConfigError: no layout is of this kind.
    """
    problem = work.problem
    size = work.devices if kind == COLOCATED else 1
    found = [
        layout
        for layout in layouts(problem)
        if layout.kind == kind
        and layout.devices == size >= layout.rollout_devices
        and layout.chunk == work.chunk * size
    ]
    if not found:
        raise ConfigError(
            f"{work.devices} devices and {work.groups} groups of {work.images} images have no layout {kind!r}: "
            "use more devices, or groups that they divide"
        )
    return search(Simulations(problem), found).layout
