"""What the executors tell the scheduler. `at` is their process's clock in seconds; it never goes back."""

import dataclasses

from digen_jax.scheduling.commands import Command


@dataclasses.dataclass(frozen=True)
class Event:
    """Something happened."""

    at: float


@dataclasses.dataclass(frozen=True)
class Joined(Event):
    """A worker is ready. `speed` is how fast it samples, relative to the others.

    The run begins when the trainer joins: rollout workers that are there from the start join before.
    """

    worker: str
    speed: float = 1.0


@dataclasses.dataclass(frozen=True)
class Lost(Event):
    """A worker is gone with all it was doing; whatever it may still report is ignored."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Completed(Event):
    """A command is done and took so many seconds; a Score's `values` are one an image."""

    command: Command
    seconds: float
    values: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Failed(Event):
    """A command failed; its worker is well and free."""

    command: Command
    reason: str
