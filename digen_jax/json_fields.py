"""Validates values of a model folder's JSON files against the fields of a dataclass.

`int` is an integer from 1, `float` a finite number, `tuple[int, ...]` a list of integers; `X | None` also
allows null. `number` sets another range for a field, or for each number of a list.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

# No width, length or count of an existing network comes near this; above it even shapes take minutes.
LARGEST = 10**6


class Within(NamedTuple):
    """Range of a number, both ends included."""

    least: float
    most: float = LARGEST


hints = functools.cache(get_type_hints)


def number(default: Any, least: float, most: float = LARGEST) -> Any:
    """Returns a dataclass field for a number, or numbers, between `least` and `most`, both included."""
    return dataclasses.field(default=default, metadata={"within": Within(least, most)})


def check_values(kind: type, values: Mapping[str, Any]) -> None:
    """Checks each value against the field of the same name in the dataclass `kind`; ignores other names.

    Raises:
      ValueError: A value is not allowed; the message names the field and the allowed values.
    """
    for field in dataclasses.fields(kind):
        if field.name not in values:
            continue
        value, hint = values[field.name], hints(kind)[field.name]
        within = field.metadata.get("within")
        if not _holds(hint, value, within):
            raise ValueError(f"{field.name} must be {_words(hint, within)}, not {_shown(value)}")


def fields_of(kind: type, config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns the values of a diffusers config.json for the dataclass `kind`, lists as tuples.

    Skips keys that start with an underscore, which describe the file.

    Raises:
      ValueError: A key is not a field of `what`, or a value is not allowed.
    """
    fields = {key: value for key, value in config.items() if not key.startswith("_")}
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of {what}'s config: remove it")
    check_values(kind, fields)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _holds(hint: Any, value: Any, within: Within | None = None) -> bool:
    arguments = get_args(hint)
    if get_origin(hint) is types.UnionType:
        return any(_holds(one, value, within) for one in arguments)
    if get_origin(hint) is Literal:
        return value in arguments
    if get_origin(hint) is tuple:
        inner = within or Within(0)
        return isinstance(value, list | tuple) and all(
            _holds(arguments[0], one, inner) for one in value
        )
    if hint not in (int, float):
        return isinstance(value, hint)
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        return False
    within = within or (Within(1) if hint is int else Within(-math.inf, math.inf))
    return math.isfinite(value) and within.least <= value <= within.most


def _words(hint: Any, within: Within | None = None) -> str:
    arguments = get_args(hint)
    if get_origin(hint) is types.UnionType:
        return " or ".join(_words(one, within) for one in arguments)
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, arguments))
    if get_origin(hint) is tuple:
        return f"a list, each of it {_words(arguments[0], within or Within(0))}"
    if hint is int:
        within = within or Within(1)
    names = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}
    words = names.get(hint, "null")
    if within is None or hint not in (int, float):
        return words
    if within.least == within.most:
        return f"{within.least:g}"
    return f"{words} from {within.least:g} to {within.most:g}"


def _shown(value: Any) -> str:
    """Returns a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
