"""Commands, events and keys as JSON. What cannot be read is refused: only known dataclasses are made of it."""

import json
from typing import Any, get_args

from digen_jax.runtime.link import Key
from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.events import Completed, Event, Failed
from digen_jax.scheduling.saving import pack, unpack

LONGEST = 2**20  # characters of a text


class Unreadable(ValueError):
    """A text that no process of the same version writes."""


KEYS = {kind.__name__: kind for kind in get_args(Key)}


def write(value: Command | Event) -> str:
    """A command or an event."""
    return json.dumps(pack(value))


def read_command(text: str) -> Command:
    """The inverse of `write` for a command."""
    return _read(text, Command)


def read_event(text: str) -> Completed | Failed:
    """The same for the answer to a command."""
    event = _read(text, Completed | Failed)
    if not isinstance(event.command, Command):
        raise Unreadable(f"an event about {type(event.command).__name__}")
    if isinstance(event, Completed) and not _is_measured(event):
        raise Unreadable("a completed command whose seconds, values or parts are no numbers")
    return event


def _is_measured(event: Completed) -> bool:
    """Whether the numbers of an event are what the driver can count with."""
    try:
        numbers = [event.seconds, *event.values, *(n for _, *span in event.parts for n in span)]
        whole = all(isinstance(kind, str) for kind, _, _ in event.parts)
    except (TypeError, ValueError):
        return False
    return whole and all(type(number) in (int, float) for number in numbers)


def _read(text: str, kind: Any) -> Any:
    if len(text) > LONGEST:
        raise Unreadable(f"{len(text)} characters")
    try:
        found = unpack(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(repr(error)) from error
    if not isinstance(found, kind):
        raise Unreadable(f"a {type(found).__name__}")
    return found


def write_key(key: Key) -> str:
    """The key of an offered tree."""
    return json.dumps(pack(key))


def read_key(text: str) -> Key:
    """The inverse of `write_key`."""
    try:
        fields = json.loads(text)
        kind = KEYS[fields.pop("is")]
        return kind(**{name: unpack(value) for name, value in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(repr(error)) from error
