"""Space on the disk that is held in advance, so that a disk that fills up finds a run able to save itself."""

import errno
import os
from pathlib import Path

# What a disk or a quota without space answers.
FULL = (errno.ENOSPC, errno.EDQUOT)


class Room:
    """A file that takes up space until that is needed.

    Where a file system cannot give space in advance (or a limit on a file's size forbids it) none is held.
    """

    def __init__(self, path: Path):
        self._path = path

    def hold(self, size: int) -> None:
        """Holds so many bytes.

        Raises:
          OSError: the disk is full; then nothing is held.
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
        """Gives the space back to the disk."""
        self._path.unlink(missing_ok=True)
