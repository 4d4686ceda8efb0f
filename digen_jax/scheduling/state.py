"""The state of the scheduler between two events, and the JSON form of its commands, events and settings."""

import dataclasses
from collections import Counter
from typing import Any

from digen_jax.scheduling import commands, settings
from digen_jax.scheduling.commands import Chunk, Command, WeightsVersion
from digen_jax.scheduling.settings import CostModel, Settings
from digen_jax.scheduling.step import Piece, Step

SAMPLE, TRAIN = "sample", "train"  # roles


@dataclasses.dataclass
class Task:
    """A chunk that a worker samples, and its progress."""

    chunk: Chunk
    weights_version: WeightsVersion
    generated: bool = False


@dataclasses.dataclass
class Handover:
    """A decoded chunk in transfer: its values to the scheduler, its samples to a training worker."""

    worker: str
    delivered: bool
    values: tuple[float, ...] | None = None


@dataclasses.dataclass
class Worker:
    """A worker of the pool. `roles` are in order of preference; `task` is set until the chunk is decoded."""

    name: str
    order: int  # position in the order of joining
    first_roles: tuple[str, ...]  # roles that it joined with
    spare: tuple[str, ...] = ()  # roles that it takes while no other worker has them
    roles: tuple[str, ...] = ()
    failed_roles: set[str] = dataclasses.field(default_factory=set)  # after failures
    held: set[WeightsVersion] = dataclasses.field(default_factory=set)
    arriving: set[WeightsVersion] = dataclasses.field(default_factory=set)
    encoded: set[int] = dataclasses.field(default_factory=set)  # steps
    task: Task | None = None
    piece: Piece | None = None
    busy: int | None = None  # serial of the command that occupies it
    failed: Counter[str] = dataclasses.field(default_factory=Counter)  # consecutive, by role

    def can(self, role: str) -> bool:
        """Returns whether it may take a role: it joined with it (spare or not) and has not lost it after failures."""
        return role in (*self.first_roles, *self.spare) and role not in self.failed_roles

    @property
    def is_idle(self) -> bool:
        """Whether it has no task, no piece and no command."""
        return not (self.task or self.piece or self.busy)

    @property
    def rank(self) -> tuple[int, str]:
        """Sort key by order of joining."""
        return self.order, self.name


@dataclasses.dataclass
class PendingEvaluation:
    """The chunks of a version's evaluation."""

    version: int
    queue: list[int]  # heap
    unscored: int


@dataclasses.dataclass
class SchedulerState:
    """The state between two events. `step` is the current step, which is also the newest version."""

    settings: Settings
    costs: CostModel
    now: float = 0.0
    step: int = 0
    serials: int = 0
    joins: int = 0
    steps: dict[int, Step] = dataclasses.field(default_factory=dict)  # the current and later ones
    evaluations: dict[int, PendingEvaluation] = dataclasses.field(default_factory=dict)
    workers: dict[str, Worker] = dataclasses.field(default_factory=dict)
    trainers: list[str] = dataclasses.field(default_factory=list)  # workers that train, in order
    samplers: list[str] = dataclasses.field(default_factory=list)
    # Roles that no worker has as a first role; workers with them in `spare` take them.
    spare_roles: set[str] = dataclasses.field(default_factory=lambda: {SAMPLE, TRAIN})
    # Heaps of idle workers' ranks, by their roles.
    idle: dict[str, list[tuple[int, str]]] = dataclasses.field(default_factory=dict)
    in_flight: dict[int, Command] = dataclasses.field(default_factory=dict)
    # Number of groups and evaluations that need each weights version that the home worker keeps.
    references: Counter[WeightsVersion] = dataclasses.field(default_factory=Counter)
    handovers: dict[Chunk, Handover] = dataclasses.field(default_factory=dict)
    failures: Counter[str] = dataclasses.field(default_factory=Counter)  # by piece of work
    failed_on: dict[Chunk, list[str]] = dataclasses.field(default_factory=dict)
    delivered: int = 0  # delivered chunks of workers that only sample; selects the next receiver


CLASSES: dict[str, Any] = {
    name: found
    for module in (commands, settings)
    for name, found in vars(module).items()
    if dataclasses.is_dataclass(found)
}


# Field names in older checkpoints, and the new names.
RENAMED = {"evaluated_apart": "separate_eval_weights", "redundant_groups": "oversampled_groups"}


def pack(value: Any) -> Any:
    """Returns JSON values: dataclasses and tuples become tagged dicts, and other values are unchanged."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return {"is": "tuple", "items": [pack(v) for v in value]}
    if isinstance(value, dict):
        return {key: pack(v) for key, v in value.items()}
    return [pack(v) for v in value] if isinstance(value, list) else value


def unpack(value: Any) -> Any:
    """Inverts `pack`."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "is" not in value:
        return {key: unpack(v) for key, v in value.items()}
    if value["is"] == "tuple":
        return tuple(unpack(v) for v in value["items"])
    fields = {str(RENAMED.get(k, k)): unpack(v) for k, v in value.items() if k != "is"}
    return CLASSES[value["is"]](**fields)
