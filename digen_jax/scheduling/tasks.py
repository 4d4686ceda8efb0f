"""What is under way: a worker and its task, a fragment that is handed over, an evaluation."""

import dataclasses

from digen_jax.scheduling.commands import Fragment, Publication


@dataclasses.dataclass
class Task:
    """The fragment assigned to a worker, and its progress."""

    fragment: Fragment
    publication: Publication
    generated: bool = False


@dataclasses.dataclass
class Handover:
    """A decoded fragment in transfer: its values to the scheduler, its samples to the trainer.

    Until both have arrived, it is lost if the worker that generated it is lost.
    """

    worker: str
    delivered: bool
    values: tuple[float, ...] | None = None


@dataclasses.dataclass
class Worker:
    """A rollout worker, or the trainer. It has a `task` until the fragment is decoded."""

    name: str
    speed: float
    order: int  # of joining
    role: str = "sample"
    held: set[Publication] = dataclasses.field(default_factory=set)
    arriving: set[Publication] = dataclasses.field(default_factory=set)
    encoded: set[int] = dataclasses.field(default_factory=set)  # steps
    task: Task | None = None
    busy: int | None = None  # serial of the command that occupies it
    free_at: float = 0.0  # expected end of its task

    @property
    def rank(self) -> tuple[float, int, str]:
        """Sort key: faster workers first, then those that joined first."""
        return -self.speed, self.order, self.name


@dataclasses.dataclass
class PendingEvaluation:
    """The fragments of a version's evaluation."""

    version: int
    queue: list[int]  # heap
    unscored: int
