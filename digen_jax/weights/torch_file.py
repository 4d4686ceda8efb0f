"""Tensors in PyTorch's `.pt` and `.pth` files, read as numbers: no code of the file runs, and torch is not needed.

Such a file (torch.save since 1.6, torch/serialization.py) is a zip archive: `data.pkl` describes nested dicts and
lists whose tensors refer to the members `data/KEY`, which hold plain numbers; see `torch_pickle` for its program.
"""

import pathlib
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from digen_jax.weights.tensors import StoredTensor
from digen_jax.weights.torch_pickle import STORAGES, Machine, Refused, Storage

KINDS = {np.dtype(dtype): kind for dtype, kind in STORAGES.values()}

LARGEST_PICKLE = 2**26  # that of a model with ten thousand tensors is smaller

LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number, pickled, as in torch/serialization.py


class Numbers(NamedTuple):
    """An array as `StoredTensor.slice` has it."""

    array: np.ndarray

    def get_shape(self) -> list[int]:
        """The whole shape."""
        return list(self.array.shape)

    def get_dtype(self) -> str:
        """The name of the dtype in safetensors, such as BF16."""
        return KINDS[self.array.dtype]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part."""
        return np.asarray(self.array[index])


def open_arrays(file: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a state_dict by name; their numbers are read when they are used.

    Args:
      file: written by torch.save in 1.6 or later. It holds a state_dict, or a dict with one as `state_dict`.

    Raises:
      ValueError: names the file, and what in it is not supported or unsafe.
    """
    found = load(file)
    if isinstance(found, Mapping):
        found = found.get("state_dict", found)
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"{file} holds a {type(found).__name__}, not tensors by name")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise ValueError(f"{file}: {name!r} is a {type(value).__name__}, not a tensor")
    return dict(found)


def as_stored(
    file: str | pathlib.Path, arrays: Mapping[str, np.ndarray]
) -> dict[str, StoredTensor]:
    """Arrays as tensors of a file, which errors name."""
    return {name: StoredTensor(pathlib.Path(file), Numbers(a)) for name, a in arrays.items()}


def load(file: str | pathlib.Path) -> Any:
    """What torch.save wrote: dicts, lists, tuples, numbers, texts, and arrays that are mapped into memory.

    Raises:
      ValueError: names the file, and what in it is broken, not supported or unsafe.
    """
    file = pathlib.Path(file).expanduser()
    try:
        with file.open("rb") as opened:
            start = opened.read(len(LEGACY))
        if not start.startswith(b"PK"):
            old = "in torch's format before 1.6" if start == LEGACY else "no file of torch.save"
            raise Refused(
                f"it is {old}: load it where torch is, with weights_only=True, and torch.save it again"
            )
        with zipfile.ZipFile(file) as archive:
            return _Archive(file, archive).read()
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise ValueError(f"{file} is not whole or cannot be read: {error}") from error
    except Refused as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    # Operations that do not fit together, and numbers that are too large.
    except (
        ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError, struct.error
    ) as error:  # fmt: skip
        raise ValueError(f"{file} cannot be read, its contents are broken: {error}") from error


class _Archive:
    """The members of a file that torch.save wrote."""

    def __init__(self, file: pathlib.Path, archive: zipfile.ZipFile):
        self._file, self._archive = file, archive
        self._bytes = np.memmap(file, np.uint8, "r")
        self._storages: dict[tuple[str, str], Storage] = {}
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise Refused("it is no file of torch.save, which has one data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")

    def read(self) -> Any:
        info = self._member("data.pkl")
        if info.file_size > LARGEST_PICKLE:
            raise Refused(f"its data.pkl has {info.file_size} bytes, more than tensors need")
        order = self._root + "byteorder"
        if order in self._archive.namelist() and self._content("byteorder") != b"little":
            raise Refused("its numbers are big-endian: torch.save it again on another machine")
        content = self._content("data.pkl")
        return Machine(self.storage).run(content)

    def storage(self, kind: str, key: str, count: int) -> Storage:
        """The `count` numbers of a member."""
        if (kind, key) not in self._storages:
            if not key.isdecimal():
                raise Refused(f"a storage is named {key!r}, not by a number")
            raw = self._content(f"data/{key}")
            dtype = np.dtype(STORAGES[kind][0])
            if len(raw) % dtype.itemsize:
                raise Refused(f"storage {key} has {len(raw)} bytes, which are no {dtype} numbers")
            # Bytes other than 0 and 1 are no truth values of numpy.
            numbers = np.not_equal(raw, 0) if dtype == np.bool_ else raw.view(dtype)
            self._storages[kind, key] = Storage(numbers)
        found = self._storages[kind, key]
        if len(found.numbers) != count:
            raise Refused(f"storage {key} has {len(found.numbers)} numbers, not {count}")
        return found

    def _member(self, name: str) -> zipfile.ZipInfo:
        try:
            info = self._archive.getinfo(self._root + name)
        except KeyError as error:
            raise Refused(f"its member {name} is missing") from error
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Refused(f"its member {name} is compressed, which torch.save does not do")
        return info

    def _content(self, name: str) -> Any:
        """A member's bytes, mapped into memory."""
        info = self._member(name)
        begin = info.header_offset
        header = self._bytes[begin : begin + 30].tobytes()
        if header[:4] != b"PK\x03\x04":
            raise Refused(f"its member {name} is not where the archive says")
        # A member's bytes follow its own header, whose last two fields are the lengths of a name and of extra fields.
        begin += 30 + sum(struct.unpack("<HH", header[26:30]))
        content = self._bytes[begin : begin + info.file_size]
        if len(content) != info.file_size:
            raise Refused(f"its member {name} ends behind the file")
        return content if name.startswith("data/") else content.tobytes()
