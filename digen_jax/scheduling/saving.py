"""The scheduler's state to and from JSON, and its return to a point at which workers can join again."""

import dataclasses
import inspect
from typing import Any

from digen_jax.scheduling import batch, commands, costs, events, membership, settings, state, tasks

CLASSES = {
    name: found
    for module in (batch, commands, costs, events, membership, settings, state, tasks)
    for name, found in inspect.getmembers(module, dataclasses.is_dataclass)
}


def pack(value: Any) -> Any:
    """Dataclasses, dicts, tuples and sets become tagged dicts; numbers, strings and lists stay as they are."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {"is": "dict", "items": [[pack(k), pack(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"is": "tuple", "items": [pack(v) for v in value]}
    if isinstance(value, set):
        return {"is": "set", "items": [pack(v) for v in sorted(value, key=repr)]}
    if isinstance(value, list):
        return [pack(v) for v in value]
    # JSON has no infinities, and the bounds of a group without values are infinite.
    if value in (float("inf"), float("-inf")):
        return {"is": "float", "items": str(value)}
    return value


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind, items = value["is"], value.get("items")
    if kind == "float":
        return float(items)
    if kind == "dict":
        return {unpack(k): unpack(v) for k, v in items}
    if kind in ("tuple", "set"):
        return {"tuple": tuple, "set": set}[kind](unpack(v) for v in items)
    return CLASSES[kind](**{k: unpack(v) for k, v in value.items() if k != "is"})


def rewind(
    now: state.SchedulerState,
    new: settings.Settings | None = None,
    expected: settings.Costs | None = None,
) -> None:
    """Forgets the workers and all work in flight; groups that have begun keep their versions.

    The clock starts again at 0, as in a new process. `new`, if given, replaces the settings, which may
    have another number of steps or divide a step into other fragments; `expected` replaces all costs,
    measured ones included.

    Raises:
      ValueError: a part of the present step was trained.
    """
    if now.batch is not None and (now.batch.update or now.batch.has_trained):
        raise ValueError("a scheduler can only be resumed from the end of a step")
    now.trainer, now.rollout, now.idle, now.in_flight = None, {}, [], {}
    now.failures, now.failed_on, now.handovers = {}, {}, {}
    now.now, now.joins, now.rate = 0.0, 0, None
    now.settings = new or now.settings
    if expected is not None:
        now.costs = costs.CostModel(expected, now.settings.fragment_images)
    now.evaluations = {}  # at a step's end only the newest version can be in evaluation
    now.batches = {
        step: old.rewound(now.settings)
        for step, old in now.batches.items()
        if step < now.settings.steps
    }
    now.open_batches()
    now.references = {commands.Publication(now.version): 0}
    for begun in now.batches.values():
        for group in begun.groups:
            if group.version is not None:
                now.refer(commands.Publication(group.version))
    now.open_evaluation()
