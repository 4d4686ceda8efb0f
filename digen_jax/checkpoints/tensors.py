"""Trees of arrays and safetensors files: reads leaves directly onto a mesh, and writes them.

A device reads only its own part of a tensor. The host holds one leaf while reading, and the tensors of
one file while writing.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from digen_jax.checkpoints import names

Tree = Mapping[str, Any]

# safetensors' names of the dtypes that weights may have in a file.
FLOATING = {"F64", "F32", "F16", "BF16"}


class StoredTensor(NamedTuple):
    """A tensor in a file. Indexing `slice` reads only that part, bfloat16 included."""

    file: pathlib.Path
    slice: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape of the stored tensor."""
        return tuple(self.slice.get_shape())

    @property
    def kind(self) -> str:
        """The stored dtype in safetensors' notation, such as BF16."""
        return self.slice.get_dtype()


def open_file(file: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file by name."""
    try:
        handle = safe_open(file, "np")
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a whole safetensors file, so copy or download it again: {error}"
        ) from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return {name: StoredTensor(file, handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118


def file_metadata(file: pathlib.Path) -> dict[str, str]:
    """The free-form strings in a safetensors file's header."""
    with safe_open(file, "np") as handle:
        return handle.metadata() or {}


def read_tree(
    tensors: Mapping[str, StoredTensor],
    template: Tree,
    lists: tuple[str, ...],
    shardings: Any = None,
    dtype: DTypeLike | None = None,
    ignore: tuple[str, ...] = (),
    config: pathlib.Path | None = None,
) -> dict[str, Any]:
    """`read_params` from opened tensors; `config` as in `check_tensors`."""
    check_tensors(tensors, template, lists, ignore, config)
    leaves = flatten_dict(template)
    if shardings is None:
        shardings = SingleDeviceSharding(jax.local_devices()[0])
    shardings = flatten_dict(jax.tree.broadcast(shardings, unflatten_dict(leaves)))

    def read(path: names.Path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        stored = [(name, tensors[name]) for name in names.tensor_names(path, lists)]
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        target = jnp.dtype(dtype if dtype is not None and floating else leaf.dtype)
        scanned = names.is_scanned(path, lists)
        return _assemble(stored, path[-1], scanned, leaf.shape, target, shardings[path])

    return unflatten_dict({path: read(path, leaf) for path, leaf in leaves.items()})


def _assemble(
    stored: list[tuple[str, StoredTensor]],
    leaf: str,
    scanned: bool,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
) -> jax.Array:
    """One leaf, from one tensor or from one for each layer; reads only the parts of this host's devices."""
    shards: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        # JAX calls this once for each device; devices that hold the same part share it.
        key = str(index)
        if key not in shards:
            inner = index[1:] if scanned else index
            axes = names.file_axes(leaf, len(inner))
            cut = tuple(inner[axis] for axis in axes)
            back = names.flax_axes(leaf, len(inner))
            layers = stored[index[0]] if scanned else stored
            arrays = [
                _finite(tensor, name, tensor.slice[cut]).transpose(back).astype(dtype, copy=False)
                for name, tensor in layers
            ]
            shards[key] = np.stack(arrays) if scanned else arrays[0]
        return shards[key]

    return jax.make_array_from_callback(shape, sharding, part)


def _finite(tensor: StoredTensor, name: str, part: np.ndarray) -> np.ndarray:
    """Returns a part of a tensor unchanged; raises ValueError if it contains NaN or an infinity."""
    # A sum takes a tenth of the time of testing each number; it may overflow, and then each number is tested.
    with np.errstate(all="ignore"):
        whole = not jnp.issubdtype(part.dtype, jnp.floating) or np.isfinite(
            part.sum(dtype=np.float32)
        )
    if not whole and not np.isfinite(part).all():
        raise ValueError(
            f"tensor {name} in {tensor.file} holds NaN or infinite numbers: get a whole copy of the file"
        )
    return part


def check_tensors(
    tensors: Mapping[str, StoredTensor],
    template: Tree,
    lists: tuple[str, ...],
    ignore: tuple[str, ...] = (),
    config: pathlib.Path | None = None,
) -> None:
    """Raises ValueError for the first missing, misshapen or surplus tensor, and counts the others.

    `config` is the file that `template` was made from, which may be what is wrong; the others as in `read_params`.
    """
    expected, floating = {}, {}
    by = f", by {config}: the two belong to different models" if config else ""
    for path, leaf in flatten_dict(template).items():
        for name in names.tensor_names(path, lists):
            expected[name] = names.file_shape(path, leaf.shape, lists)
            floating[name] = jnp.issubdtype(leaf.dtype, jnp.floating)
    files = sorted({str(tensor.file) for tensor in tensors.values()})
    where = " to ".join(files[:1] + files[1:][-1:]) or "an empty file"
    problems = []
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"tensor {name} of shape {list(shape)} is missing from {where}{by}")
        elif tensors[name].shape != shape:
            found, file = list(tensors[name].shape), tensors[name].file
            problems.append(
                f"tensor {name} in {file} has shape {found}, expected {list(shape)}{by}"
            )
        elif floating[name] and tensors[name].kind not in FLOATING:
            problems.append(
                f"tensor {name} in {tensors[name].file} is of type {tensors[name].kind}, and quantised weights are "
                "not supported: use a copy in float32, bfloat16 or float16"
            )
    for name, tensor in tensors.items():
        if name not in expected and not any(fnmatchcase(name, pattern) for pattern in ignore):
            problems.append(
                f"tensor {name} of shape {list(tensor.shape)} in {tensor.file} "
                f"is surplus: the network has no place for it{by}"
            )
    if problems:
        more = f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)


def file_tensors(
    params: Tree, lists: tuple[str, ...], dtype: DTypeLike | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) in the file's layout, floating leaves as `dtype` if given.

    The host holds one leaf; a sharded leaf is gathered there.
    """
    for path, leaf in flatten_dict(params).items():
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"{'/'.join(path)} lies on several hosts; gather it before writing")
        names.file_shape(path, leaf.shape, lists)
        scanned = names.is_scanned(path, lists)
        array = np.asarray(leaf)
        if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(dtype)
        layers = array if scanned else array[None]
        for name, layer in zip(names.tensor_names(path, lists), layers, strict=True):
            # safetensors writes the raw buffer: a transposed view would be written in the wrong order
            tensor = layer.transpose(names.file_axes(path[-1], layer.ndim))
            yield name, np.ascontiguousarray(tensor)


def write_file(
    file: pathlib.Path, tensors: dict[str, np.ndarray], metadata: Mapping[str, str] = {}
) -> None:
    """Writes one safetensors file with the metadata that torch's readers require; it appears whole.

    Raises:
      OSError: names the file; no part of it remains.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt", **metadata})
        os.replace(partial, file)
    except (SafetensorError, OSError) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{file} cannot be written: {error}") from error
