"""Files that a kill or a full disk leaves as they were, or whole."""

import contextlib
import os
from pathlib import Path


def append(path: Path, data: bytes) -> None:
    """Adds to a file; where that fails the file is as long as it was.

    Raises:
      OSError: it failed.
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
    """Gives a file another content: a kill leaves the old one or the new one, never a part.

    Raises:
      OSError: the disk is full; the file is as it was.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def without_torn_line(data: bytes) -> bytes:
    """Whole lines: without a last one that a kill cut off."""
    return data[: data.rfind(b"\n") + 1]
