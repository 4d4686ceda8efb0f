"""Disk space that is reserved in advance, so that a run can save itself when the disk is full."""

import errno
import os
from pathlib import Path

# Error numbers of a disk or a quota without space.
FULL = (errno.ENOSPC, errno.EDQUOT)


class Room:
    """A file that occupies space until the space is needed.

    Where a file system cannot reserve space (or a limit on a file's size forbids it), none is reserved.
    """

    def __init__(self, path: Path):
        self._path = path

    def hold(self, size: int) -> None:
        """Reserves a number of bytes.

        Raises:
          OSError: the disk is full; then nothing is reserved.
        """
        if self._path.exists() and self._path.stat().st_size == size:
            return
        self.release()
        try:
            with self._path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            self.release()
            if error.errno in FULL:
                raise

    def release(self) -> None:
        """Frees the space."""
        self._path.unlink(missing_ok=True)
