"""Reads tensors from PyTorch `.pt` and `.pth` files without torch and without executing pickled code.

A file (torch.save since 1.6, torch/serialization.py) is a zip archive: `data.pkl` describes nested dicts and lists, and
tensors refer to raw data in the members `data/KEY`. The unpickler resolves only the names required by tensors and
dicts, to functions of this module.
"""

import io
import math
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from digen_jax.checkpoints.tensors import StoredTensor

# numpy dtype and safetensors dtype name of each torch storage type.
STORAGES: dict[str, tuple[np.dtype, str]] = {
    f"{kind}Storage": (np.dtype(dtype), name)
    for kind, dtype, name in (
        ("Double", np.float64, "F64"),
        ("Float", np.float32, "F32"),
        ("Half", np.float16, "F16"),
        ("BFloat16", ml_dtypes.bfloat16, "BF16"),
        ("Long", np.int64, "I64"),
        ("Int", np.int32, "I32"),
        ("Short", np.int16, "I16"),
        ("Char", np.int8, "I8"),
        ("Byte", np.uint8, "U8"),
        ("Bool", np.bool_, "BOOL"),
        ("ComplexFloat", np.complex64, "C64"),
        ("ComplexDouble", np.complex128, "C128"),
    )
}
NAMES = dict(STORAGES.values())
Path = str | pathlib.Path
LARGEST_PICKLE = 2**26  # in bytes; enough for ten thousand tensors
RELOAD = "load it with torch, with weights_only=True"
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number, pickled, as in torch/serialization.py


class Unsupported(Exception):
    """Raised for unsupported content; the message is a clause about the file."""


def open_arrays(file: Path) -> dict[str, np.ndarray]:
    """Memory-maps the tensors of a state_dict, or of a dict's entry `state_dict`, by name.

    Raises:
      ValueError: The file is unsafe or has unsupported content.
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


def as_stored(file: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, StoredTensor]:
    """Wraps arrays as tensors of a file, for error messages."""
    return {
        name: StoredTensor(pathlib.Path(file), a.shape, NAMES[a.dtype], a.__getitem__)
        for name, a in arrays.items()
    }


def load(file: Path) -> Any:
    """Loads dicts, lists, tuples, numbers, strings, and memory-mapped arrays.

    Raises:
      ValueError: The file is corrupted or unsafe, or has unsupported content.
    """
    file = pathlib.Path(file).expanduser()
    try:
        with file.open("rb") as opened:
            start = opened.read(len(LEGACY))
        if not start.startswith(b"PK"):
            old = "in torch's format before 1.6" if start == LEGACY else "not a file of torch.save"
            raise Unsupported(f"it is {old}: {RELOAD}, and torch.save it again")
        with zipfile.ZipFile(file) as archive:
            return _read(file, archive)
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise ValueError(f"{file} is incomplete or cannot be read: {error}") from error
    except Unsupported as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # unpickling may raise anything
        raise ValueError(f"{file} cannot be read, its content is damaged: {error}") from error


def _read(file: pathlib.Path, archive: zipfile.ZipFile) -> Any:
    mapped = np.memmap(file, np.uint8, "r")
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].count("/") != 1:
        raise Unsupported("it is not a file of torch.save, which has one data.pkl")
    root = pickles[0].removesuffix("data.pkl")

    def content(name: str) -> np.ndarray:
        """Returns a member's bytes. The last two header fields are the lengths of the name and the extra fields."""
        info = archive.getinfo(root + name)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Unsupported(f"its member {name} is compressed, which torch.save does not do")
        header = mapped[info.header_offset : info.header_offset + 30].tobytes()
        if header[:4] != b"PK\x03\x04":
            raise Unsupported(f"its member {name} is not at the offset stated in the archive")
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        found = mapped[begin : begin + info.file_size]
        if len(found) != info.file_size:
            raise Unsupported(f"its member {name} ends behind the file")
        return found

    if root + "byteorder" in archive.namelist() and content("byteorder").tobytes() != b"little":
        raise Unsupported("its numbers are big-endian: torch.save it again on another machine")
    program = content("data.pkl")
    if len(program) > LARGEST_PICKLE:
        raise Unsupported(f"its data.pkl has {len(program)} bytes, more than tensors need")
    return _Unpickler(io.BytesIO(program.tobytes()), content).load()


class _StateDict(dict):
    """Replaces torch's OrderedDict; drops its attributes (module versions)."""

    def __setstate__(self, state: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to tensors and dicts: see "Restricting Globals" in the pickle documentation."""

    def __init__(self, program: io.BytesIO, content: Callable[[str], np.ndarray]):
        super().__init__(program)
        self._content = content
        self._storages: dict[tuple[np.dtype, str], np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Returns this module's replacement of a torch name; rejects all other names."""
        if (module, name) == ("collections", "OrderedDict"):
            return _StateDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name][0]
        names = f"it names {module}.{name}, and only tensors and plain values are read"
        raise Unsupported(f"{names}: {RELOAD}, and torch.save its state_dict")

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Returns the array of a storage."""
        _, dtype, key, _, count = pid
        if not isinstance(dtype, np.dtype) or not str(key).isdecimal():
            raise Unsupported(f"it has a storage {key!r} of kind {dtype!r}, which is not supported")
        if (dtype, key) not in self._storages:
            raw = self._content(f"data/{key}")
            # Bytes other than 0 and 1 are not valid numpy bools.
            self._storages[dtype, key] = raw != 0 if dtype == np.bool_ else raw.view(dtype)
        numbers = self._storages[dtype, key]
        if len(numbers) != count:
            raise Unsupported(f"storage {key} has {len(numbers)} numbers, not {count}")
        return numbers


def _tensor(numbers: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """Returns a view of a storage. Elements must be in bounds and not overlap."""
    if not isinstance(numbers, np.ndarray):
        raise Unsupported("it has a tensor without a storage")
    if not all(type(n) is int and 0 <= n < 2**62 for n in (offset, *shape, *strides)):
        raise Unsupported("it has a tensor whose shape, strides and offset are not integers from 0")
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    last, what = 0, f"it has a tensor of shape {list(shape)}"
    for stride, size in dims:
        if stride <= last:
            overlap = f"{what} and strides {list(strides)}, whose elements overlap"
            raise Unsupported(f"{overlap}: torch.save a contiguous copy")
        last += stride * (size - 1)
    if math.prod(shape) == 0:
        return np.zeros(shape, numbers.dtype)
    if offset + last >= len(numbers):
        raise Unsupported(f"{what} that leaves its storage of {len(numbers)} numbers")
    steps = [stride * numbers.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)
