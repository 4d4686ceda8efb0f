"""LoRA (arXiv 2106.09685) on linen networks, and its files in the PEFT/diffusers format.

A layer y = W x becomes y = W x + (alpha / rank) B A x. The low-rank term is added to the
activations of every `nn.Dense` that has factors in the collection "lora", so that neither B A nor a
gradient of W is ever formed. Networks know nothing of it; their scans must declare
`variable_axes={"params": 0, "lora": 0}`.
"""

import dataclasses
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from digen_jax.weights import names
from digen_jax.weights.tensors import (
    Tree,
    file_metadata,
    file_tensors,
    open_file,
    read_tree,
    write_file,
)

FILE = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
# Our leaf names and torch's module names; both factors are stored like a Dense kernel.
FACTORS = {"a": "lora_A", "b": "lora_B"}
# PEFT settings that change the output of a LoRA with the same tensors; only these values are read.
PLAIN = {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which layers are adapted, and how.

    `targets` is a regular expression for the whole torch name of a linear layer, such as
    r"transformer_blocks\\..*\\.attn\\.(to_[qkv]|to_out\\.0)". The update is scaled by alpha / rank.
    """

    rank: int
    alpha: float | int
    targets: str

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora rank must be at least 1, not {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"lora alpha must be positive, not {self.alpha}")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise ValueError(
                f"lora targets {self.targets!r} is no regular expression: {error}"
            ) from error

    @property
    def scale(self) -> float:
        """What the low-rank term is multiplied by."""
        return self.alpha / self.rank


# -------------------------------------------------------------------------------------- training


def lora_init(
    key: Array, template: Tree, config: LoraConfig, lists: tuple[str, ...]
) -> dict[str, Any]:
    """Fresh float32 factors: a [.., in, r] uniform within 1/sqrt(in) (PEFT), b [.., r, out] zero.

    `template` is the network's parameters or their shapes. A layer's draw depends on its torch name
    only, not on how the network is cut into scans. ValueError where the targets match nothing, or
    only some layers of a scan.
    """
    factors = {}
    for path, kernel in _targets(template, config.targets, lists).items():
        layers = names.tensor_names((*path, "kernel"), lists)
        keys = jnp.stack([jax.random.fold_in(key, zlib.crc32(name.encode())) for name in layers])
        *stack, inputs, outputs = kernel.shape
        bound = inputs**-0.5

        def draw(key: Array, shape=(inputs, config.rank), bound=bound) -> Array:
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        a = jax.vmap(draw)(keys)
        factors[*path, "a"] = a if stack else a[0]
        factors[*path, "b"] = jnp.zeros((*stack, config.rank, outputs), jnp.float32)
    return unflatten_dict(factors)


def check_rank(rank: int, factors: Tree) -> None:
    """Raises ValueError for a rank that no layer has, given the factors or their shapes."""
    flat = flatten_dict(factors)
    highest = max(
        min(a.shape[-2], flat[*path, "b"].shape[-1])
        for (*path, leaf), a in flat.items()
        if leaf == "a"
    )
    if rank > highest:
        raise ValueError(
            f"rank = {rank} is more than any of the layers that it is for can have: set it to {highest} or less"
        )


def lora_layers(scale: float) -> AbstractContextManager[None]:
    """A context in which `module.apply({"params": ..., "lora": ...}, ...)` adds the low-rank terms.

    It acts while the module is traced, so enter it inside the jitted function.
    `scale` is alpha / rank.
    """

    def intercept(call, args, kwargs, context):
        y = call(*args, **kwargs)
        dense = context.module
        if not (isinstance(dense, nn.Dense) and dense.has_variable("lora", "a")):
            return y
        a, b = dense.get_variable("lora", "a"), dense.get_variable("lora", "b")
        x, a, b = promote_dtype(*args, a, b, dtype=dense.dtype)
        low = jnp.dot(x, a, precision=dense.precision) * scale
        return y + jnp.dot(low, b, precision=dense.precision).astype(y.dtype)

    return nn.intercept_methods(intercept)


def merge(params: Tree, lora: Tree, scale: float) -> dict[str, Any]:
    """Full weights W + scale A B, computed in float32 and rounded once to W's type."""
    merged, factors = flatten_dict(params), flatten_dict(lora)
    for *path, leaf in factors:
        if leaf == "a":
            kernel = merged[*path, "kernel"]
            a, b = (factors[*path, factor].astype(jnp.float32) for factor in FACTORS)
            update = jnp.matmul(a, b, precision="highest") * scale
            merged[*path, "kernel"] = (kernel.astype(jnp.float32) + update).astype(kernel.dtype)
    return unflatten_dict(merged)


def _dense(template: Tree, lists: tuple[str, ...]) -> Iterator[tuple[names.Path, Any, list[str]]]:
    """Every linear layer: its path, its kernel, and its torch name in each layer of the scan."""
    for path, leaf in flatten_dict(template).items():
        if path[-1] == "kernel" and len(leaf.shape) - names.is_scanned(path, lists) == 2:
            tensors = names.tensor_names(path, lists)
            yield path[:-1], leaf, [tensor.removesuffix(".weight") for tensor in tensors]


def _targets(template: Tree, targets: str, lists: tuple[str, ...]) -> dict[names.Path, Any]:
    """The kernels of the linear layers whose torch names match."""
    found, known = {}, []
    for path, kernel, layers in _dense(template, lists):
        known += layers
        hits = [layer for layer in layers if re.fullmatch(targets, layer)]
        if hits and len(hits) < len(layers):
            missed = next(layer for layer in layers if layer not in hits)
            raise ValueError(
                f"lora targets {targets!r} matches {hits[0]} but not {missed}; these layers are "
                "scanned together, so it must match all of them or none"
            )
        if hits:
            found[path] = kernel
    if not found:
        raise ValueError(
            f"lora targets {targets!r} matches none of the {len(known)} linear layers; "
            f"it must match a whole name such as {known[0]}"
        )
    return found


# -------------------------------------------------------------------------------------- files


def write_lora(
    folder: str | pathlib.Path,
    lora: Tree,
    alpha: float | int,
    lists: tuple[str, ...],
    prefix: str = "transformer",
) -> None:
    """Write `pytorch_lora_weights.safetensors`, which `pipe.load_lora_weights(folder)` reads.

    `prefix` is the component's name in the pipeline. Diffusers takes alpha from the metadata that
    is written too; without it alpha would be the rank.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(file_tensors(_as_modules(lora, prefix), lists))
    layers = sorted({name.removeprefix(f"{prefix}.").rsplit(".", 2)[0] for name in tensors})
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": layers}
    adapter = {f"{prefix}.{key}": value for key, value in settings.items()}
    write_file(folder / FILE, tensors, {METADATA: json.dumps(adapter, indent=2, sort_keys=True)})


def read_lora(
    folder: str | pathlib.Path,
    template: Tree,
    lists: tuple[str, ...],
    prefix: str = "transformer",
    shardings: Any = None,
) -> tuple[dict[str, Any], int, float]:
    """(lora, rank, alpha) from a folder or file that this module or diffusers wrote.

    `template` is the network's parameters or their shapes. A layer that the network lacks, a
    missing or misshapen factor, and a setting that plain LoRA has not are each a ValueError that
    names it.
    """
    file = pathlib.Path(folder)
    file = file / FILE if file.is_dir() else file
    tensors = open_file(file)
    rank, alpha = _rank_and_alpha(file, tensors, prefix)
    adapted = {name.rsplit(".lora_", 1)[0].removeprefix(f"{prefix}.") for name in tensors}
    factors = {}
    for path, kernel, layers in _dense(template, lists):
        if adapted.intersection(layers):
            *stack, inputs, outputs = kernel.shape
            factors[*path, "a"] = jax.ShapeDtypeStruct((*stack, inputs, rank), jnp.float32)
            factors[*path, "b"] = jax.ShapeDtypeStruct((*stack, rank, outputs), jnp.float32)
    modules = _as_modules(unflatten_dict(factors), prefix)
    read = flatten_dict(read_tree(tensors, modules, lists, shardings))
    short = {module: leaf for leaf, module in FACTORS.items()}
    lora = {(*path, short[module]): leaf for (_, *path, module, _), leaf in read.items()}
    return unflatten_dict(lora), rank, alpha


def _as_modules(lora: Tree, prefix: str) -> dict[str, Any]:
    """The tree whose tensor names are the file's: factors are kernels of modules lora_A, lora_B."""
    return unflatten_dict(
        {
            (prefix, *path, FACTORS[leaf], "kernel"): factor
            for (*path, leaf), factor in flatten_dict(lora).items()
        }
    )


def _rank_and_alpha(
    file: pathlib.Path, tensors: Mapping[str, Any], prefix: str
) -> tuple[int, float]:
    """Rank from the tensors; alpha from diffusers' metadata, where there is none the rank."""
    ranks = {
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.") and name.endswith(".lora_A.weight")
    }
    if not ranks:
        raise ValueError(f"{file} holds no tensor {prefix}.*.lora_A.weight, so no LoRA of {prefix}")
    if len(ranks) > 1:
        raise ValueError(f"{file} mixes the ranks {sorted(ranks)}; only a single rank is supported")
    rank = ranks.pop()
    metadata = json.loads(file_metadata(file).get(METADATA, "{}"))
    settings = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items()}
    for key, plain in PLAIN.items():
        if settings.get(key, plain) not in (plain, None):
            raise ValueError(f"{file} has {key}={settings[key]}, supported is only {key}={plain}")
    if settings.get("r", rank) != rank:
        raise ValueError(f"{file} says rank {settings['r']}, but its tensors have rank {rank}")
    return rank, float(settings.get("lora_alpha", rank))
