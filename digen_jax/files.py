"""Paths, JSON, and atomic writes: a kill or a full disk leaves either the old or the complete new content.

`check_values` validates the values of a model folder's JSON file against the fields of a dataclass: `int` is an
integer from 1, `float` a finite number, `tuple[int, ...]` a list of integers; `X | None` also allows null. `number`
sets another range for a field, or for each number of a list.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from digen_jax.errors import ConfigError, Range

T = TypeVar("T")
DIGITS = 300  # of an integer, so that a float can represent it
DEEPEST = 100  # maximum nesting of lists and objects in a JSON file
DEEP = f"lists or objects are nested more than {DEEPEST} levels deep"


def in_home(path: str) -> str:
    """Replaces `~` or `~user` at the start of a path by that home folder; other strings are returned unchanged.

    Applied to every path flag (`command_line.define_path`) and every string of a config.

    Raises:
      ConfigError: The user is unknown, or the system does not know the home folder.
    """
    user, slash, _ = path.partition("/")
    if not user.startswith("~") or (not slash and user != "~"):
        return path
    found = os.path.expanduser(path)
    if found == path:
        raise ConfigError(
            f"{path!r} is in the home folder of {user[1:] or 'this user'}, which the system does not know: "
            "write the full path, or set the environment variable HOME"
        )
    return found


def parse_json(content: bytes | str, constant: Callable[[str], Any] | None = None) -> Any:
    """Parses JSON in UTF-8, with or without a byte order mark.

    `constant` is called for NaN, Infinity and -Infinity, which otherwise are Python's values.

    Raises:
      ValueError: The content is not JSON, is nested too deeply, or has too long integers.
    """
    text = content.removeprefix("\ufeff") if isinstance(content, str) else content
    try:
        value = json.loads(text, parse_int=_integer, parse_constant=constant)
    except RecursionError as error:
        raise ValueError(DEEP) from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST + 1):
        if not level:
            return value
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for many in inner for one in many if isinstance(one, dict | list)]
    raise ValueError(DEEP)


def read_json(path: Path | str) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError for a missing or malformed file."""
    try:
        value = parse_json(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path} is missing") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def leaves_of(config: dict[str, Any], path: str = "config") -> dict[str, Any]:
    """Flattens a nested dict to dotted names; empty sections and lists without sections are values."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        sections = {f"{path}.{name}": value}
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            sections = {f"{path}.{name}[{number}]": one for number, one in enumerate(value)}
        for place, one in sections.items():
            leaves |= leaves_of(one, place) if isinstance(one, dict) and one else {place: one}
    return leaves


PACKAGE = Path(__file__).parent
SHIPPED = ("assets", "configs", "launch")


def shipped(path: str) -> str:
    """Returns the path of a file or folder that is part of the package, such as "configs/shapes_demo.py".

    A wheel has these folders in the package, a checkout next to it. A path that exists in the current directory, or
    that is not part of the package, is returned unchanged.
    """
    if path.split("/", 1)[0] not in SHIPPED or Path(path).exists():
        return path
    found = (folder / path for folder in (PACKAGE, PACKAGE.parent))
    return str(next((one for one in found if one.exists()), path))


def make_examples_importable() -> None:
    """Adds the packages `benchmarks` and `examples` to Python's path.

    A wheel has them in the package's folder `bundled`, a checkout next to the package.
    """
    bundled = PACKAGE / "bundled"
    folder = str(bundled if bundled.exists() else PACKAGE.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits, more than {DIGITS}")
    return int(digits)


def append(path: Path, data: bytes) -> None:
    """Appends to a file; on failure the file keeps its old length. Raises OSError if appending failed."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def replace(path: Path, data: bytes) -> None:
    """Replaces the content of a file, or of the file that it links to.

    A kill leaves either the old or the new content, never a part.

    Raises:
      OSError: The disk is full, and the file is unchanged; or it is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    path = Path(os.path.realpath(path))
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def write_output(path: Path | str, data: bytes) -> None:
    """Replaces the content of a file, like `replace`; creates missing folders.

    Raises:
      OSError: See `replace`; or a folder cannot be created.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, data)


def without_torn_line(data: bytes) -> bytes:
    """Returns the complete lines, without a last line that a kill truncated."""
    return data[: data.rfind(b"\n") + 1]


def read_lines(path: Path | str, parse: Callable[[Any], T], problem: str) -> list[T]:
    """Returns `parse` of the JSON value of each complete line.

    Raises:
      ConfigError: A line is not JSON, or `parse` raised an error; names the line, followed by `problem`.
    """
    found = []
    lines = without_torn_line(Path(path).read_bytes()).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(parse(parse_json(line)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number} {problem}") from error
    return found


# No width, length or count of an existing network comes near this; above it even shapes take minutes.
LARGEST = 10**6


hints = functools.cache(get_type_hints)


def number(default: Any, least: float, most: float = LARGEST) -> Any:
    """Returns a dataclass field for a number, or numbers, between `least` and `most`, both included."""
    return dataclasses.field(default=default, metadata={"within": Range(least, most)})


def check_values(kind: type, values: Mapping[str, Any]) -> None:
    """Checks each value against the field of the same name in the dataclass `kind`; ignores other names.

    Raises:
      ValueError: A value is not allowed; the message names the field and the allowed values.
    """
    for field in dataclasses.fields(kind):
        if field.name not in values:
            continue
        described, is_allowed = _allowed(hints(kind)[field.name], field.metadata.get("within"))
        if not is_allowed(value := values[field.name]):
            text = repr(value)
            text = text if len(text) < 80 else f"{text[:77]}..."
            raise ValueError(f"{field.name} must be {described}, not {text}")


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


def _allowed(hint: Any, within: Range | None) -> tuple[str, Callable[[Any], bool]]:
    """Returns the values that a type allows, in words, and a function that checks a value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        each = [_allowed(one, within) for one in arguments]
        return " or ".join(described for described, _ in each), lambda value: any(
            f(value) for _, f in each
        )
    if origin is Literal:
        return " or ".join(map(repr, arguments)), lambda value: value in arguments
    if origin is tuple:
        described, check = _allowed(arguments[0], within or Range(0, LARGEST))

        def is_list(value: Any) -> bool:
            return isinstance(value, list | tuple) and all(map(check, value))

        return f"a list, each of it {described}", is_list
    names = {int: "an integer", float: "a finite number", str: "a text", bool: "true or false"}
    described = names.get(hint, "null")
    if hint not in (int, float):
        return described, lambda value: isinstance(value, hint)
    if hint is int:
        within = within or Range(1, LARGEST)
    if within is not None:
        described = f"{described} from {within.least:g} to {within.most:g}"
        if within.least == within.most:
            described = f"{within.least:g}"

    def is_number(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
            return False
        return math.isfinite(value) and (within is None or within.least <= value <= within.most)

    return described, is_number
