"""On-disk cache of prompt embeddings in safetensors files, shared by all runs of a model.

    folder/embeddings/MODEL-BLOCK.safetensors    embeddings of texts that were encoded together

MODEL and BLOCK are hashes of the model description and of the texts. Tensors are named TEXT/ARRAY, where TEXT is also
a hash. The header metadata contains the description and a CRC-32 of each text's arrays. Files are immutable and
written atomically, so any number of processes can read, write and be killed concurrently.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from digen_jax.files import parse_json

Rows = Mapping[str, np.ndarray]  # one text's arrays
Model = Mapping[str, Any]  # what the arrays depend on besides the text, as JSON

FOLDER = "embeddings"
PARTIAL = ".partial"  # suffix of files that are being written
# Files read within this time are not evicted, because a run may still need them.
IN_USE_S = 86_400.0
# Upper bound of the header bytes per text.
HEADER = 1024


class CacheFile(NamedTuple):
    """An open cache file. It stays readable after it is removed."""

    path: pathlib.Path
    handle: Any  # safetensors.safe_open
    model: Model
    checksums: Mapping[str, int]  # by text hash
    arrays: Mapping[str, list[str]]  # array names by text hash


class EmbeddingCache:
    """Prompt embeddings of one model in a folder that several models may share. Not thread-safe.

    Args:
      folder: Cache folder.
      model: Description of the model.
      limit: Maximum size of all files in bytes. Concurrent writers may exceed it by one file each.
    """

    def __init__(self, folder: str | os.PathLike[str], model: Model, limit: int):
        self.model, self.limit = dict(model), limit
        self._folder = pathlib.Path(folder) / FOLDER
        self._key = _model_key(model)
        self._index: dict[str, CacheFile] = {}  # by text hash

    def missing(self, texts: Iterable[str]) -> list[str]:
        """Returns the unique texts that are not cached, and marks the files of the others as used.

        Raises:
          ValueError: A file is damaged.
        """
        self._refresh()
        hashes = {text: _hash(text) for text in texts}
        _mark_used(self._index[key] for key in hashes.values() if key in self._index)
        return [text for text, key in hashes.items() if key not in self._index]

    def add(self, rows: Mapping[str, Rows]) -> None:
        """Stores one or more texts in one file.

        If the limit requires it, files of any model that were not used for IN_USE_S are evicted, least recently used
        first.

        Raises:
          ValueError: The limit is too low.
        """
        hashes = {text: _hash(text) for text in rows}
        arrays = {text: dict(sorted(own.items())) for text, own in rows.items()}
        tensors = {f"{hashes[t]}/{n}": a for t, own in arrays.items() for n, a in own.items()}
        self._free(sum(array.nbytes for array in tensors.values()) + HEADER * len(rows))
        checksums = {hashes[text]: _checksum(own) for text, own in arrays.items()}
        header = {"model": json.dumps(self.model), "checksums": json.dumps(checksums)}
        file = self._folder / f"{self._key}-{_hash(*sorted(checksums))}.safetensors"
        partial = file.with_name(f"{file.stem}.{uuid.uuid4().hex}{PARTIAL}")
        try:
            save_file(tensors, partial, metadata=header)
            os.replace(partial, file)
        except (SafetensorError, OSError) as error:
            raise OSError(f"{file} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        self._refresh()

    def read(self, texts: Sequence[str]) -> list[Rows]:
        """Reads the arrays of each text.

        Raises:
          ValueError: A text is not cached, or a file is damaged.
        """
        if any(_hash(text) not in self._index for text in texts):
            self._refresh()
        for text in texts:
            if _hash(text) not in self._index:
                raise ValueError(f"{self._folder} has no embedding of {text!r}: encode it first")
        files = [self._index[_hash(text)] for text in texts]
        _mark_used(files)
        return [_read(file, _hash(text)) for file, text in zip(files, texts, strict=True)]

    def excess(self, needed: int) -> int:
        """Returns the bytes by which `needed` more would exceed the limit after eviction of all unused files."""
        removable = sum(map(_size, _unused(self._folder)))
        return max(0, self.size() - removable + needed - self.limit)

    def size(self) -> int:
        """Returns the size of all files in bytes, including those of other models."""
        return sum(_size(file) for file in self._folder.glob("*"))

    def _refresh(self) -> None:
        """Indexes files that other processes added, and drops removed ones."""
        known = {file.path: file for file in self._index.values()}
        index: dict[str, CacheFile] = {}
        for path in _paths(self._folder, self._key):
            with contextlib.suppress(FileNotFoundError):
                file = known.get(path) or _open(path)
                index |= dict.fromkeys(file.checksums, file)
        self._index = index

    def _free(self, needed: int) -> None:
        """Evicts files until `needed` more bytes fit within the limit."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob(f"*{PARTIAL}"):  # left by killed processes
            if time.time() - _last_use(file) > IN_USE_S:
                file.unlink(missing_ok=True)
        excess = self.size() + needed - self.limit
        for file in sorted(_unused(self._folder), key=_last_use):
            if excess <= 0:
                return
            excess -= _size(file)
            file.unlink(missing_ok=True)
        if excess > 0:
            raise ValueError(
                f"{needed:,} bytes of encoded prompts do not fit into {self._folder}, which may have {self.limit:,} "
                f"and holds {self.size():,} that are in use: raise the limit by {excess:,}, or delete what is not "
                "needed"
            )


def models(folder: str | os.PathLike[str]) -> list[Model]:
    """Returns the descriptions of the models with cached prompts in a folder.

    Raises:
      ValueError: A file is damaged.
    """
    found = {}
    for path in _paths(pathlib.Path(folder) / FOLDER):
        with contextlib.suppress(FileNotFoundError):
            model = _open(path).model
            found[json.dumps(model, sort_keys=True)] = model
    return [found[key] for key in sorted(found)]


def _open(path: pathlib.Path) -> CacheFile:
    """Opens a file, or raises FileNotFoundError if it was removed."""
    try:
        handle = safe_open(path, "np")
        header = {name: parse_json(text) for name, text in handle.metadata().items()}
        model, checksums = dict(header["model"]), dict(header["checksums"])
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error
    if not path.name.startswith(_model_key(model)):
        raise _damaged(path, "it has another model's description")
    arrays: dict[str, list[str]] = {}
    for name in sorted(handle.keys()):
        text, _, array = name.partition("/")
        arrays.setdefault(text, []).append(array)
    return CacheFile(path, handle, model, checksums, arrays)


def _read(file: CacheFile, key: str) -> Rows:
    """Reads the arrays of a text hash."""
    try:
        names = file.arrays.get(key, [])
        found = {name: file.handle.get_tensor(f"{key}/{name}") for name in names}
    except SafetensorError as error:
        raise _damaged(file.path, error) from error
    if _checksum(found) != file.checksums[key]:
        raise _damaged(file.path, "a prompt's embeddings have another checksum")
    return found


def _damaged(file: pathlib.Path, reason: Any) -> ValueError:
    return ValueError(
        f"{file} is damaged ({reason}): delete that file, and its prompts will be encoded again"
    )


def _model_key(model: Model) -> str:
    return _hash(json.dumps(dict(model), sort_keys=True))


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _checksum(rows: Rows) -> int:
    """Returns the CRC-32 of the arrays in order of their names."""
    crc = 0
    for name, array in rows.items():
        crc = zlib.crc32(f"{name} {array.dtype.name} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.tobytes(), crc)
    return crc


def _paths(folder: pathlib.Path, key: str = "*") -> list[pathlib.Path]:
    """Returns the files of one or all models, in a deterministic order."""
    return sorted(folder.glob(f"{key}-*.safetensors"))


def _unused(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that may be evicted."""
    return [file for file in _paths(folder) if time.time() - _last_use(file) > IN_USE_S]


def _size(file: pathlib.Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # removed by another process
        return 0


def _mark_used(files: Iterable[CacheFile]) -> None:
    for path in {file.path for file in files}:
        with contextlib.suppress(OSError):  # removed, or read-only for this user
            os.utime(path)


def _last_use(file: pathlib.Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
