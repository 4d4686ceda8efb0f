"""Reads and writes pytrees as safetensors files with diffusers and transformers tensor names.

Networks use torch's attribute names, so a path is almost a tensor name: `xs_3` is the torch list entry `xs.3`;
`xs_0to12` is a scan over such entries, with leaves stacked along a leading axis. Each network declares its list names,
because `linear_1` is an ordinary attribute in diffusers.

Each device reads only its own shard of a tensor, or of a quantized kernel all inputs of its outputs, on which their
scale depends. Host memory holds one leaf while reading, and the tensors of one file while writing.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from digen_jax.checkpoints.quantization import LARGEST, SCALE, quantize, stored_shapes

Tree = Mapping[str, Any]
Path = tuple[str, ...]

LEAF_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
# Logical axis along which scanned leaves are stacked.
LAYERS = "layers"
# Supported dtypes of weights, in safetensors' notation.
FLOATING = {"F64", "F32", "F16", "BF16"}


def tensor_names(path: Path, lists: tuple[str, ...]) -> list[str]:
    """Returns the tensor names of a leaf: one, or one per layer of its scan.

    ("blocks_0to1", "to_q", "kernel") -> ["blocks.0.to_q.weight", "blocks.1.to_q.weight"].
    """
    names = [""]
    for part in path[:-1]:
        entries = _entries(part, lists)
        if len(names) > 1 and len(entries) > 1:
            raise ValueError(f"{'/'.join(path)} is scanned twice; a leaf can be stacked only once")
        names = [f"{name}{entry}." for name in names for entry in entries]
    return [name + LEAF_NAMES.get(path[-1], path[-1]) for name in names]


def is_scanned(path: Path, lists: tuple[str, ...]) -> bool:
    """Returns whether a leaf has a leading layer axis."""
    return any((match := _list_entry(part, lists)) and match["last"] for part in path[:-1])


def file_axes(leaf: str, ndim: int) -> tuple[int, ...]:
    """Returns the axis permutation from one layer's leaf to the file layout.

    A kernel [..., in, out] is the torch weight [out, in, ...]: Dense, and convolutions of any rank
    (HWIO <-> OIHW, DHWIO <-> OIDHW). All other leaves keep their layout.
    """
    if leaf != "kernel" or ndim < 2:
        return tuple(range(ndim))
    return (ndim - 1, ndim - 2, *range(ndim - 2))


def file_shape(path: Path, shape: tuple[int, ...], lists: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the file shape of each tensor of a (possibly stacked) leaf."""
    if is_scanned(path, lists):
        layers = len(tensor_names(path, lists))
        if shape[:1] != (layers,):
            has = f"{'/'.join(path)} has shape {list(shape)}"
            raise ValueError(f"{has}, but should stack {layers} layers")
        shape = shape[1:]
    return tuple(shape[axis] for axis in file_axes(path[-1], len(shape)))


def _list_entry(part: str, lists: tuple[str, ...]) -> re.Match | None:
    match = re.fullmatch(r"(?P<name>.+)_(?P<first>\d+)(to(?P<last>\d+))?", part)
    return match if match and match["name"] in lists else None


def _entries(part: str, lists: tuple[str, ...]) -> list[str]:
    """Converts a path component to torch's notation: `xs_3` -> xs.3, `xs_0to1` -> xs.0, xs.1."""
    match = _list_entry(part, lists)
    if match is None:
        return [part]
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"the scanned run {part} ends before it starts")
    return [f"{match['name']}.{layer}" for layer in range(first, last + 1)]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: pathlib.Path
    shape: tuple[int, ...]
    kind: str  # dtype in safetensors' notation, such as BF16
    read: Callable[[Any], np.ndarray]  # reads only the part at an index


def open_file(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Opens the tensors of one safetensors file by name."""
    try:
        handle = safe_open(file, "np")
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except SafetensorError as error:
        broken = f"{file} is not a complete safetensors file, so copy or download it again"
        raise ValueError(f"{broken}: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    return {
        name: StoredTensor(file, tuple(one.get_shape()), one.get_dtype(), one.__getitem__)
        for name, one in slices.items()
    }


def file_metadata(file: pathlib.Path) -> dict[str, str]:
    """Reads the header metadata of a safetensors file."""
    with safe_open(file, "np") as handle:
        return handle.metadata() or {}


def read_tree(
    tensors: Mapping[str, StoredTensor],
    template: Tree,
    lists: tuple[str, ...],
    shardings: Any = None,
    dtype: DTypeLike | None = None,
    ignore: Sequence[str] = (),
    config: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Reads parameters from opened tensors; see `read_params`, and `check_tensors` for `config`.

    If `dtype` is int8 or float8, kernels of linear layers are quantized, one tensor at a time.
    """
    check_tensors(tensors, template, lists, ignore, config)
    leaves = flatten_dict(template if dtype is None else stored_shapes(template, dtype))
    if shardings is None:
        shardings = SingleDeviceSharding(jax.local_devices()[0])
    shardings = flatten_dict(jax.tree.broadcast(shardings, unflatten_dict(leaves)))

    found: dict[Path, jax.Array] = {}

    def read(path: Path, leaf: jax.ShapeDtypeStruct) -> None:
        """Reads the local shards of a leaf, and of its scale if any, from one tensor, or from one per layer."""
        names, scanned = tensor_names(path, lists), is_scanned(path, lists)
        shards: dict[str, tuple[np.ndarray, ...]] = {}

        def part(index: tuple[slice, ...]) -> tuple[np.ndarray, ...]:
            """Returns part of the leaf; of a quantized kernel, also of its scale."""
            # JAX calls this once per device; devices with the same shard share it.
            if (key := str(index)) not in shards:
                inner = index[1:] if scanned else index
                axes = file_axes(path[-1], len(inner))
                cut, back = tuple(inner[axis] for axis in axes), np.argsort(axes)
                layers: list[tuple[np.ndarray, ...]] = []
                for name in names[index[0]] if scanned else names:
                    array = _finite(tensors[name], name, np.asarray(tensors[name].read(cut)))
                    array = array.transpose(back)
                    if leaf.dtype in LARGEST:
                        layers.append(quantize(array, leaf.dtype))
                    else:
                        layers.append((array.astype(leaf.dtype, copy=False),))
                stacked = zip(*layers, strict=True)
                shards[key] = tuple(map(np.stack, stacked)) if scanned else layers[0]
            return shards[key]

        def make(path: Path, shard: Callable[[Any], np.ndarray]) -> None:
            arguments: Any = leaves[path].shape, shardings[path], shard
            found[path] = jax.make_array_from_callback(*arguments)

        if leaf.dtype in LARGEST:
            every = slice(None)  # all inputs
            make(path, lambda i: part((*i[:-2], every, i[-1]))[0][..., i[-2], :])
            make((*path[:-1], SCALE), lambda i: part((*i[:-1], every, i[-1]))[1])
        else:
            make(path, lambda index: part(index)[0])

    for path, leaf in leaves.items():
        if path[-1] != SCALE:
            read(path, leaf)
    return unflatten_dict(found)


def _finite(tensor: StoredTensor, name: str, part: np.ndarray) -> np.ndarray:
    """Returns part of a tensor unchanged. Raises ValueError if it contains NaN or infinity."""
    # A sum is ten times faster than testing each number; if it overflows, each number is tested.
    if jnp.issubdtype(part.dtype, jnp.floating):
        with np.errstate(all="ignore"):
            total = part.sum(dtype=np.float32)
        if not np.isfinite(total) and not np.isfinite(part).all():
            wrong = f"tensor {name} in {tensor.file} holds NaN or infinite numbers"
            raise ValueError(f"{wrong}: get a complete copy of the file")
    return part


def check_tensors(
    tensors: Mapping[str, StoredTensor],
    template: Tree,
    lists: tuple[str, ...],
    ignore: Sequence[str] = (),
    config: pathlib.Path | None = None,
) -> None:
    """Raises ValueError for the first missing, misshapen or unexpected tensor, and counts the others.

    `config` is the source file of `template`, for the message; see `read_params` for the other arguments.
    """
    expected, floating = {}, {}
    by = f", by {config}: the two belong to different models" if config else ""
    for path, leaf in flatten_dict(template).items():
        for name in tensor_names(path, lists):
            expected[name] = file_shape(path, leaf.shape, lists)
            floating[name] = jnp.issubdtype(leaf.dtype, jnp.floating)
    files = sorted({str(tensor.file) for tensor in tensors.values()})
    where = " to ".join(files[:1] + files[1:][-1:]) or "an empty file"
    problems = []
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"tensor {name} of shape {list(shape)} is missing from {where}{by}")
            continue
        tensor = tensors[name]
        what = f"tensor {name} in {tensor.file}"
        if tensor.shape != shape:
            problems.append(f"{what} has shape {list(tensor.shape)}, expected {list(shape)}{by}")
        elif floating[name] and tensor.kind not in FLOATING:
            wrong = f"{what} is of type {tensor.kind}, and quantised weights are not supported"
            problems.append(f"{wrong}: use a copy in float32, bfloat16 or float16")
    for name, tensor in tensors.items():
        if name not in expected and not any(fnmatchcase(name, pattern) for pattern in ignore):
            what = f"tensor {name} of shape {list(tensor.shape)} in {tensor.file}"
            problems.append(f"{what} is unexpected: the network has no such parameter{by}")
    if problems:
        more = f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)


def file_tensors(params: Tree, lists: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) in file layout. Leaves are gathered to the host one at a time."""
    for path, leaf in flatten_dict(params).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"{'/'.join(path)} is on several hosts; gather it before writing")
        file_shape(path, leaf.shape, lists)
        scanned = is_scanned(path, lists)
        array = np.asarray(leaf)
        layers = array if scanned else array[None]
        for name, layer in zip(tensor_names(path, lists), layers, strict=True):
            # safetensors writes the raw buffer, so a transposed view would be in the wrong order
            tensor = layer.transpose(file_axes(path[-1], layer.ndim))
            yield name, np.ascontiguousarray(tensor)


def write_file(
    file: pathlib.Path, tensors: dict[str, np.ndarray], metadata: Mapping[str, str] = {}
) -> None:
    """Atomically writes one safetensors file with the metadata that torch readers require.

    Raises:
      OSError: Names the file; no partial file remains.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt", **metadata})
        os.replace(partial, file)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{file} cannot be written: {error}") from error
