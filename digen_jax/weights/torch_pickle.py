"""The program in a file of torch.save, carried out: dicts, lists, plain values and views of stored numbers.

A pickle is a program, and Python's unpickler calls any function that it names. Here its operations are carried out one
by one instead, and only those that tensors, dicts, lists and plain values need: none calls or imports something.
"""

import math
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

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

# That of a model with ten thousand tensors has less.
MOST_OPERATIONS = 2 * 10**6
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MOST_DIMENSIONS = 32  # of an array in numpy before its second version


class Refused(Exception):
    """What is wrong in a file, as a clause."""


class Storage(NamedTuple):
    """The numbers of one or more tensors."""

    numbers: np.ndarray


class _Name(NamedTuple):
    """A name that a pickle may refer to: it stands for what follows from it here."""

    module: str
    name: str


ORDERED = _Name("collections", "OrderedDict")
TENSOR = _Name("torch._utils", "_rebuild_tensor_v2")
NAMES = {ORDERED, TENSOR, *(_Name("torch", name) for name in STORAGES)}


class Machine:
    """Carries out the operations of a pickle (Python's pickletools describes them) that tensors need.

    Args:
      storage: gives the numbers of a kind in `STORAGES` that have a key, and as many as are expected.
    """

    def __init__(self, storage: Callable[[str, str, int], Storage]):
        self._numbers = storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """The value that the pickle describes."""
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if number > MOST_OPERATIONS:
                raise Refused(f"its data.pkl has more than {MOST_OPERATIONS} operations")
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
                    raise Refused("it sets attributes of something that is no dict")
                stack.append(target)
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case _:
                raise Refused(f"its data.pkl has the operation {operation}, which tensors do not")

    def _last(self, count: int) -> list[Any]:
        """Takes some values from the stack."""
        if count > len(self._stack):
            raise Refused("its data.pkl takes more values than it has")
        begin = len(self._stack) - count
        taken = self._stack[begin:]
        del self._stack[begin:]
        return taken

    def _marked(self) -> list[Any]:
        """Takes the values behind the last mark from the stack."""
        return self._last(len(self._stack) - self._marks.pop())

    def _storage(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise Refused("it refers to something that is no storage")
        _, kind, key, _, count = pid
        if not isinstance(kind, _Name) or kind.name not in STORAGES:
            raise Refused(f"it has a storage of kind {kind!r}, which is not supported")
        if not isinstance(key, str) or not _counts((count,)):
            raise Refused("it has a storage without a key and a number of elements")
        return self._numbers(kind.name, key, count)


def _named(*words: Any) -> _Name:
    # Texts first: the hash of tuples within tuples has no limit of depth.
    if not all(isinstance(word, str) for word in words) or words not in NAMES:
        raise Refused(
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
    raise Refused("it calls something that is neither a tensor nor an empty OrderedDict")


def _fill(target: Any, items: list[Any]) -> None:
    """Puts keys and values, in turn, into a dict."""
    if type(target) is not dict or len(items) % 2:
        raise Refused("it puts items into something that is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int):
            raise Refused(f"it has a dict with a {type(key).__name__} as key")
        target[key] = value


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise Refused("it appends to something that is no list")
    target.extend(items)


def _tensor(*arguments: Any) -> np.ndarray:
    """A view of a storage's numbers; raises Refused if it leaves them, or has a number twice."""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Storage):
        raise Refused("it has a tensor without a storage")
    storage, offset, shape, strides = arguments[:4]
    whole = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not whole or len(shape) > MOST_DIMENSIONS or not _counts((offset, *shape, *strides)):
        raise Refused("it has a tensor whose shape, strides and offset are no whole numbers from 0")
    numbers = storage.numbers
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    last = 0
    for stride, size in dims:
        if stride <= last:
            raise Refused(
                f"it has a tensor of shape {list(shape)} and strides {list(strides)}, whose elements overlap: "
                "torch.save a contiguous copy"
            )
        last += stride * (size - 1)
    if math.prod(shape) == 0:
        return np.zeros(shape, numbers.dtype)
    if offset + last >= len(numbers):
        raise Refused(
            f"it has a tensor of shape {list(shape)} that leaves its storage of {len(numbers)} numbers"
        )
    steps = [stride * numbers.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)


def _counts(values: tuple[Any, ...]) -> bool:
    """Whether all values are whole numbers from 0 that fit 62 bits."""
    return all(type(value) is int and 0 <= value < 2**62 for value in values)
