"""Events from the executors to the scheduler. `at`, in seconds of their process's clock, never decreases."""

import dataclasses

from digen_jax.scheduling.commands import Command


@dataclasses.dataclass(frozen=True)
class Event:
    """`at` is the time of the event, in seconds."""

    at: float


@dataclasses.dataclass(frozen=True)
class Joined(Event):
    """A worker is ready. `roles`, "sample" and "train", are in order of preference.

    It takes a role in `spare` only while no other worker has this role. The run starts when the home worker, TRAINER,
    joins; the others of the start join before it.
    """

    worker: str
    roles: tuple[str, ...]
    spare: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lost(Event):
    """A worker is lost with all its work; its later reports are ignored."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Completed(Event):
    """A command is done after `seconds`; a Score has one value per image in `values`.

    `parts` are (kind, begin, end) of parts of the work in another process, in seconds before this event.
    """

    command: Command
    seconds: float
    values: tuple[float, ...] = ()
    parts: tuple[tuple[str, float, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Failed(Event):
    """A command failed; its worker still works and is free. `kind` names an error of another process."""

    command: Command
    reason: str
    kind: str = ""
