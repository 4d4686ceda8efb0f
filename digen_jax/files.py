"""Writing files so that a kill or a full disk leaves the old content or the complete new one."""

import contextlib
import os
from pathlib import Path


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
