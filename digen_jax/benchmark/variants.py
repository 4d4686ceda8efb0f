"""The compared variants: a step's work, and the tactics one after the other, each at its best split."""

import dataclasses
import math
from collections.abc import Callable

from digen_jax.errors import ConfigError, check_positive
from digen_jax.scheduling.planner.problem import Problem, Scaling
from digen_jax.scheduling.planner.proposal import Proposal
from digen_jax.scheduling.planner.search import LEAST, Simulations, search
from digen_jax.scheduling.planner.space import proposals
from digen_jax.scheduling.settings import Costs, Settings

DECODE = 0.05  # of the seconds of generation


@dataclasses.dataclass(frozen=True)
class Work:
    """A step and the costs of its commands.

    Attributes:
      devices: number of equal devices.
      generate, train: the ratio of their device-seconds.
      seconds: duration of a step if all devices were always busy: the bound (G + T)/N.
      encode, update, publish: as shares of that bound.
      score: of a step's images by the one scorer, as a share of the bound.
      groups, images, fragment: groups of a step, images of a group and of a fragment.
      transitions: trained steps of a trajectory, which TSP splits.
    """

    devices: int = 8
    generate: float = 1.0
    train: float = 1.0
    seconds: float = 0.6
    encode: float = 0.005
    update: float = 0.01
    publish: float = 0.02
    score: float = 0.1
    groups: int = 16
    images: int = 8
    fragment: int = 4
    transitions: int = 9

    def check(self) -> None:
        """Refuses work that cannot be measured.

        Raises:
          ConfigError: names the field and what to change.
        """
        if self.devices < 2:
            raise ConfigError(f"devices must be at least 2 to be split, not {self.devices}")
        for name in ("generate", "train", "seconds"):
            check_positive(name, getattr(self, name))
        for name in ("encode", "update", "publish", "score"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def problem(self) -> Problem:
        """The planner's problem; the trainer and each worker speed up linearly as far as they can split."""
        image = self.seconds * self.devices / (self.groups * self.images)
        making = image * self.generate / (self.generate + self.train)
        costs = Costs(
            generate=making * (1 - DECODE),
            decode=making * DECODE,
            train=image - making,
            encode=self.encode * self.seconds,
            update=self.update * self.seconds,
            publish=self.publish * self.seconds,
            score=self.score * self.seconds / (self.groups * self.images),
        )
        fragments = self.groups * self.images // self.fragment
        settings = Settings(1, self.groups, self.images, self.fragment, tag_fragments=fragments)
        by_image = Scaling(images=self.fragment)
        return Problem(
            self.devices, settings, costs, by_image, by_image, self.transitions, scorers=1
        )


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table: its proposals, in a problem that may be an easier one."""

    name: str
    allowed: Callable[[Proposal], bool]
    problem: Callable[[Problem], Problem] = lambda problem: problem


def colocated(problem: Problem) -> Problem:
    """All devices sample, then all train: a fragment has as many images for each of them as a worker has."""
    settings = problem.settings
    images = settings.groups * settings.images
    size = math.gcd(images, settings.fragment_images * problem.devices)
    settings = dataclasses.replace(settings, fragment_images=size)
    free = Scaling()
    return dataclasses.replace(problem, settings=settings, worker=free, trainer=free)


def _apart(**tactics: bool | int) -> Callable[[Proposal], bool]:
    """Rollout workers of one device each, and some tactics on or off."""
    asked = {"worker_devices": 1, **tactics}
    return lambda c: bool(c.workers) and all(getattr(c, n) == on for n, on in asked.items())


PLAIN, COLOCATED = "plain", "colocated"
VARIANTS = (
    Variant(COLOCATED, lambda c: not c.workers, colocated),
    Variant(
        PLAIN,
        _apart(time=1, gap=False, tag=False, asynchrony=False),
        lambda p: dataclasses.replace(p, trainer=Scaling()),
    ),
    Variant("+ GAP", _apart(time=1, gap=True, tag=False, asynchrony=False)),
    Variant("+ TSP", _apart(gap=True, tag=False, asynchrony=False)),
    Variant("+ TAG", _apart(gap=True, tag=True, asynchrony=False)),
    Variant("+ asynchrony", _apart(gap=True, tag=True, asynchrony=True)),
)


def best_split(variant: Variant, problem: Problem) -> Proposal:
    """The fastest of a variant's proposals by the planner's search.

    Raises:
      ConfigError: there is none.
    """
    problem = variant.problem(problem)
    found = [c for c in proposals(problem) if variant.allowed(c)]
    if not found:
        raise ConfigError(
            f"{problem.devices} devices cannot be split for {variant.name!r}: use more"
        )
    return search(Simulations(problem), found, LEAST, simplify=False).proposal
