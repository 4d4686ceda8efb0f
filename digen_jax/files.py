"""Paths, JSON, and atomic writes: a kill or a full disk leaves the old content or the complete new one."""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from digen_jax.errors import ConfigError

DIGITS = 300  # of an integer, which a float can hold
DEEPEST = 100  # levels of lists and objects in a JSON file
DEEP = f"lists or objects are nested more than {DEEPEST} levels deep"


def in_home(path: str) -> str:
    """Replaces `~` or `~user` at the start of a path by that home folder; other texts are returned unchanged.

    Every flag for a path (`command_line.define_path`) and every text of a config passes through it.

    Raises:
      ConfigError: there is no such user, or the system does not know the home folder.
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
      content: the text.
      constant: called for NaN, Infinity and -Infinity. None reads them as Python does.

    Raises:
      ValueError: it is not JSON, or has too many levels or too long integers.
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
    that is none of these, stays as it is.
    """
    if path.split("/", 1)[0] not in SHIPPED or Path(path).exists():
        return path
    found = (folder / path for folder in (PACKAGE, PACKAGE.parent))
    return str(next((one for one in found if one.exists()), path))


def make_examples_importable() -> None:
    """Puts the packages `benchmarks` and `examples` on Python's path.

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
    """Appends to a file; if that fails, the file keeps its old length.

    Raises:
      OSError: appending failed.
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
    """Replaces the content of a file, or of the one that it links to.

    A kill leaves the old or the new content, never a part.

    Raises:
      OSError: the disk is full, and the file is unchanged; or it is no regular file.
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
      OSError: as `replace`, or a folder cannot be created.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, data)


def without_torn_line(data: bytes) -> bytes:
    """Returns the complete lines, without a last one that a kill truncated."""
    return data[: data.rfind(b"\n") + 1]
