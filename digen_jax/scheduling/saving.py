"""The scheduler's state to and from JSON."""

import dataclasses
import inspect
from types import ModuleType
from typing import Any

from digen_jax.scheduling import commands, costs, events, membership, settings, state, step

MODULES: tuple[ModuleType, ...] = commands, costs, events, membership, settings, state, step
CLASSES = {
    name: found
    for module in MODULES
    for name, found in inspect.getmembers(module)
    if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
}


def pack(value: Any) -> Any:
    """Dataclasses, dicts, tuples and sets become tagged dicts; numbers, strings and lists stay as they are."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"is": type(value).__name__, **{k: pack(v) for k, v in value._asdict().items()}}
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
