"""Names of files, and writing so that a kill or a full disk leaves the old content or the complete new one."""

import contextlib
import os
from pathlib import Path

from digen_jax.errors import ConfigError


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
    """Replaces the content of a file: a kill leaves the old or the new content, never a part.

    Raises:
      OSError: the disk is full; the file is unchanged.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def without_torn_line(data: bytes) -> bytes:
    """The complete lines, without a last one that a kill cut off."""
    return data[: data.rfind(b"\n") + 1]
