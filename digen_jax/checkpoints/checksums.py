"""Checksums of the files of a folder, which show whether it was damaged later.

They are CRC-32, which detects accidents, not forgeries. Writing or checking them reads every file once, on a
few threads: about 1 GB/s of a core, so that the 30 GB of a model of 2.5 billion float32 parameters
with Adam's moments take some ten seconds; when they are saved, this happens during training.
"""

import json
import os
import zlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from digen_jax.files import parse_json

NAME = "checksums.json"
CHUNK = 1 << 22  # bytes
THREADS = 4


def write_checksums(folder: Path, without: Collection[str] = ()) -> None:
    """Writes size and CRC-32 of a folder's files, except some names, into its `NAME`; on the disk on return."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in without)
    names = [path.relative_to(folder).as_posix() for path in files]
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(names, threads.map(_measured, files), strict=True))
    with (folder / NAME).open("w") as file:
        json.dump(found, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path) -> str | None:
    """The first mismatch of a folder with its checksums, in a few words; None if it is as it was written.

    Files that were added later are not checked.
    """
    try:
        noted = {
            str(name): (int(size), int(crc))
            for name, (size, crc) in parse_json((folder / NAME).read_bytes()).items()
        }
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"its {NAME} cannot be read"
    with ThreadPoolExecutor(THREADS) as threads:
        wrong = threads.map(lambda item: _wrong(folder, *item), noted.items())
        return next(filter(None, wrong), None)


def _wrong(folder: Path, name: str, noted: tuple[int, int]) -> str | None:
    path = folder / name
    try:
        if path.stat().st_size != noted[0]:
            return f"{name} has {path.stat().st_size} bytes, not {noted[0]}"
        return None if _measured(path) == noted else f"{name} is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _measured(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
