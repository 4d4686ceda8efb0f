"""Commands, events, settings and costs to and from JSON."""

import dataclasses
from typing import Any

from digen_jax.scheduling import commands, costs, events, settings

CLASSES = {
    name: found
    for module in (commands, costs, events, settings)
    for name, found in vars(module).items()
    if dataclasses.is_dataclass(found)
}


def pack(value: Any) -> Any:
    """Dataclasses and tuples become tagged dicts; other values stay as they are."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: pack(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return {"is": "tuple", "items": [pack(v) for v in value]}
    if isinstance(value, dict):
        return {key: pack(v) for key, v in value.items()}
    return [pack(v) for v in value] if isinstance(value, list) else value


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "is" not in value:
        return {key: unpack(v) for key, v in value.items()}
    if value["is"] == "tuple":
        return tuple(unpack(v) for v in value["items"])
    return CLASSES[value["is"]](**{k: unpack(v) for k, v in value.items() if k != "is"})
