"""Paths, JSON, and atomic writes: a kill or a full disk leaves either the old or the complete new content."""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from digen_jax.errors import ConfigError

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

    Args:
      content: JSON text.
      constant: Called for NaN, Infinity and -Infinity. None means Python's values.

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
    """Appends to a file; on failure the file keeps its old length.

    Raises:
      OSError: Appending failed.
    """
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
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
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
