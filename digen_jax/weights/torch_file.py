"""Tensors in PyTorch's `.pt` and `.pth` files, read as numbers: no code of the file runs, and torch is not needed.

Such a file (torch.save since 1.6, torch/serialization.py) is a zip archive: `data.pkl` describes nested dicts and
lists whose tensors refer to the members `data/KEY`, which hold plain numbers. A pickle is a program, and Python's
unpickler calls any function that it names. Here its operations are carried out one by one instead, and only those that
tensors, dicts, lists and plain values need: there is no operation that calls or imports something.
"""

import math
import pathlib
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from digen_jax.weights.tensors import StoredTensor

# numpy's dtype, and safetensors' name of it, for each of torch's types of storages.
STORAGES: dict[str, tuple[Any, str]] = {
    "DoubleStorage": (np.float64, "F64"),
    "FloatStorage": (np.float32, "F32"),
    "HalfStorage": (np.float16, "F16"),
    "BFloat16Storage": (ml_dtypes.bfloat16, "BF16"),
    "LongStorage": (np.int64, "I64"),
    "IntStorage": (np.int32, "I32"),
    "ShortStorage": (np.int16, "I16"),
    "CharStorage": (np.int8, "I8"),
    "ByteStorage": (np.uint8, "U8"),
    "BoolStorage": (np.bool_, "BOOL"),
    "ComplexFloatStorage": (np.complex64, "C64"),
    "ComplexDoubleStorage": (np.complex128, "C128"),
}
KINDS = {np.dtype(dtype): kind for dtype, kind in STORAGES.values()}

# What a pickle may have; one of a model with ten thousand tensors has less.
LARGEST_PICKLE = 2**26
MOST_OPERATIONS = 2 * 10**6
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MOST_DIMENSIONS = 32  # of an array in numpy before its second version

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
            raise _Refused(
                f"it is {old}: load it where torch is, with weights_only=True, and torch.save it again"
            )
        with zipfile.ZipFile(file) as archive:
            return _Archive(file, archive).read()
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise ValueError(f"{file} is not whole or cannot be read: {error}") from error
    except _Refused as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    # Operations that do not fit together, and numbers that are too large.
    except (
        ValueError, TypeError, LookupError, OverflowError, MemoryError, RecursionError, struct.error
    ) as error:  # fmt: skip
        raise ValueError(f"{file} cannot be read, its contents are broken: {error}") from error


class _Refused(Exception):
    """What is wrong in a file, as a clause."""


class _Storage(NamedTuple):
    """The numbers of one or more tensors."""

    numbers: np.ndarray


class _Archive:
    """The members of a file that torch.save wrote."""

    def __init__(self, file: pathlib.Path, archive: zipfile.ZipFile):
        self._file, self._archive = file, archive
        self._bytes = np.memmap(file, np.uint8, "r")
        self._storages: dict[tuple[str, str], _Storage] = {}
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise _Refused("it is no file of torch.save, which has one data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")

    def read(self) -> Any:
        info = self._member("data.pkl")
        if info.file_size > LARGEST_PICKLE:
            raise _Refused(f"its data.pkl has {info.file_size} bytes, more than tensors need")
        order = self._root + "byteorder"
        if order in self._archive.namelist() and self._content("byteorder") != b"little":
            raise _Refused("its numbers are big-endian: torch.save it again on another machine")
        content = self._content("data.pkl")
        return _Machine(self).run(content)

    def storage(self, kind: str, key: str, count: int) -> _Storage:
        """The `count` numbers of a member."""
        if (kind, key) not in self._storages:
            if not key.isdecimal():
                raise _Refused(f"a storage is named {key!r}, not by a number")
            raw = self._content(f"data/{key}")
            dtype = np.dtype(STORAGES[kind][0])
            if len(raw) % dtype.itemsize:
                raise _Refused(f"storage {key} has {len(raw)} bytes, which are no {dtype} numbers")
            # Bytes other than 0 and 1 are no truth values of numpy.
            numbers = np.not_equal(raw, 0) if dtype == np.bool_ else raw.view(dtype)
            self._storages[kind, key] = _Storage(numbers)
        found = self._storages[kind, key]
        if len(found.numbers) != count:
            raise _Refused(f"storage {key} has {len(found.numbers)} numbers, not {count}")
        return found

    def _member(self, name: str) -> zipfile.ZipInfo:
        try:
            info = self._archive.getinfo(self._root + name)
        except KeyError as error:
            raise _Refused(f"its member {name} is missing") from error
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise _Refused(f"its member {name} is compressed, which torch.save does not do")
        return info

    def _content(self, name: str) -> Any:
        """A member's bytes, mapped into memory."""
        info = self._member(name)
        begin = info.header_offset
        header = self._bytes[begin : begin + 30].tobytes()
        if header[:4] != b"PK\x03\x04":
            raise _Refused(f"its member {name} is not where the archive says")
        # A member's bytes follow its own header, whose last two fields are the lengths of a name and of extra fields.
        begin += 30 + sum(struct.unpack("<HH", header[26:30]))
        content = self._bytes[begin : begin + info.file_size]
        if len(content) != info.file_size:
            raise _Refused(f"its member {name} ends behind the file")
        return content if name.startswith("data/") else content.tobytes()


class _Name(NamedTuple):
    """A name that a pickle may refer to: it stands for what follows from it here."""

    module: str
    name: str


ORDERED = _Name("collections", "OrderedDict")
TENSOR = _Name("torch._utils", "_rebuild_tensor_v2")
NAMES = {ORDERED, TENSOR, *(_Name("torch", name) for name in STORAGES)}


class _Machine:
    """Carries out the operations of a pickle (Python's pickletools describes them) that tensors need."""

    def __init__(self, archive: _Archive):
        self._archive = archive
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """The value that the pickle describes."""
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if number > MOST_OPERATIONS:
                raise _Refused(f"its data.pkl has more than {MOST_OPERATIONS} operations")
            self._do(operation.name, argument)
        return self._stack.pop()

    def _do(self, operation: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match operation:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case _ if operation in CONSTANTS:
                stack.append(CONSTANTS[operation])
            case _ if operation in VALUES:
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case _ if operation in TUPLES:
                stack.append(tuple(self._last(TUPLES[operation])))
            case "TUPLE":
                stack.append(tuple(self._marked()))
            case "SETITEM" | "SETITEMS":
                items = self._last(2) if operation == "SETITEM" else self._marked()
                _fill(stack[-1], items)
            case "APPEND" | "APPENDS":
                items = self._last(1) if operation == "APPEND" else self._marked()
                _extend(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_named(*argument.split(" ")))
            case "STACK_GLOBAL":
                stack.append(_named(*self._last(2)))
            case "REDUCE":
                stack.append(_made(*self._last(2)))
            case "BUILD":
                # Attributes, which of a state_dict are the versions of modules, are dropped.
                target, _ = self._last(2)
                if type(target) is not dict:
                    raise _Refused("it sets attributes of something that is no dict")
                stack.append(target)
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case _:
                raise _Refused(f"its data.pkl has the operation {operation}, which tensors do not")

    def _last(self, count: int) -> list[Any]:
        """Takes some values from the stack."""
        if count > len(self._stack):
            raise _Refused("its data.pkl takes more values than it has")
        begin = len(self._stack) - count
        taken = self._stack[begin:]
        del self._stack[begin:]
        return taken

    def _marked(self) -> list[Any]:
        """Takes the values behind the last mark from the stack."""
        return self._last(len(self._stack) - self._marks.pop())

    def _storage(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise _Refused("it refers to something that is no storage")
        _, kind, key, _, count = pid
        if not isinstance(kind, _Name) or kind.name not in STORAGES:
            raise _Refused(f"it has a storage of kind {kind!r}, which is not supported")
        if not isinstance(key, str) or not _counts((count,)):
            raise _Refused("it has a storage without a key and a number of elements")
        return self._archive.storage(kind.name, key, count)


def _named(*words: Any) -> _Name:
    # Texts first: the hash of tuples within tuples has no limit of depth.
    if not all(isinstance(word, str) for word in words) or words not in NAMES:
        raise _Refused(
            f"it names {'.'.join(map(str, words))}, and only tensors and plain values are read: load it where torch "
            "is, with weights_only=True, and torch.save its state_dict"
        )
    return _Name(*words)


def _made(name: Any, arguments: Any) -> Any:
    """What torch.save has pickled as a call: an empty dict, or a tensor."""
    if name == ORDERED and arguments == ():
        return {}
    if name == TENSOR and isinstance(arguments, tuple):
        return _tensor(*arguments)
    raise _Refused("it calls something that is neither a tensor nor an empty OrderedDict")


def _fill(target: Any, items: list[Any]) -> None:
    """Puts keys and values, in turn, into a dict."""
    if type(target) is not dict or len(items) % 2:
        raise _Refused("it puts items into something that is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int):
            raise _Refused(f"it has a dict with a {type(key).__name__} as key")
        target[key] = value


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise _Refused("it appends to something that is no list")
    target.extend(items)


def _tensor(*arguments: Any) -> np.ndarray:
    """A view of a storage's numbers; raises _Refused if it leaves them, or has a number twice."""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], _Storage):
        raise _Refused("it has a tensor without a storage")
    storage, offset, shape, strides = arguments[:4]
    whole = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not whole or len(shape) > MOST_DIMENSIONS or not _counts((offset, *shape, *strides)):
        raise _Refused(
            "it has a tensor whose shape, strides and offset are no whole numbers from 0"
        )
    numbers = storage.numbers
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    last = 0
    for stride, size in dims:
        if stride <= last:
            raise _Refused(
                f"it has a tensor of shape {list(shape)} and strides {list(strides)}, whose elements overlap: "
                "torch.save a contiguous copy"
            )
        last += stride * (size - 1)
    if math.prod(shape) == 0:
        return np.zeros(shape, numbers.dtype)
    if offset + last >= len(numbers):
        raise _Refused(
            f"it has a tensor of shape {list(shape)} that leaves its storage of {len(numbers)} numbers"
        )
    steps = [stride * numbers.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)


def _counts(values: tuple[Any, ...]) -> bool:
    """Whether all values are whole numbers from 0 that fit 62 bits."""
    return all(type(value) is int and 0 <= value < 2**62 for value in values)
