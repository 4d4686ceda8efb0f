"""LoRA (arXiv 2106.09685) for linen networks; see `lora_files` for file I/O.

A layer y = W x becomes y = W x + (alpha / rank) B A x. The low-rank term is added to the activations of every
`nn.Dense` with factors in the collection "lora", so that neither B A nor a gradient of W is computed. Networks need no
LoRA code, but their scans must declare `variable_axes={"params": 0, "lora": 0}`.
"""

import contextlib
import contextvars
import dataclasses
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from digen_jax.checkpoints.quantization import LARGEST
from digen_jax.checkpoints.tensors import Path, Tree, is_scanned, tensor_names
from digen_jax.errors import Count, PositiveFloat

# Distribution of the first factor; see `lora_init`.
Init = Literal["kaiming", "gaussian"]
# Logical axis between the two factors.
RANK = "rank"
# Parameters or their shapes, and `LISTS`, of each component.
Templates = Mapping[str, Tree]
Lists = Mapping[str, tuple[str, ...]]

_scale: contextvars.ContextVar[Any] = contextvars.ContextVar("scale", default=None)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA, which is trained instead of all weights."""

    rank: Count = 0  # rank of the factors; 0 means that all weights are trained, without a LoRA
    alpha: PositiveFloat = 1.0  # the low-rank term is scaled by alpha / rank
    # regular expression for the full names of linear layers, as in PyTorch, with or without the prefix of their
    # component, such as "transformer."; "" means the model family's default
    targets: str = ""
    # initialization of the first factor: "kaiming", the default of PEFT, or "gaussian", with standard deviation 1 /
    # rank
    init: Init = "kaiming"
    # LoRA whose training continues, with the same rank, alpha and layers: a folder, file or Hub id
    path: str = ""

    @property
    def scale(self) -> float:
        """Returns the scale of the low-rank term."""
        return self.alpha / self.rank


def lora_init(key: Array, templates: Templates, config: LoraConfig, lists: Lists) -> dict[str, Any]:
    """Initializes float32 factors like PEFT: a [..., in, r] random, b [..., r, out] zero.

    With "kaiming", PEFT's default, a is uniform within 1/sqrt(in), so that its std is 1/sqrt(3 in);
    with "gaussian" it is normal with std 1/r (peft 0.21.2, tuners/lora/layer.py,
    `reset_lora_parameters`), which Flow-GRPO, DiffusionNFT, AWM and GenRL use.

    `templates` contains each component's parameters or their shapes. Components without targets get no factors.
    The first component uses `key`, the others keys derived from it. The factors of a layer depend only on its
    torch name, not on how the network is split into scans.

    Raises:
      ValueError: The targets match nothing, or only some layers of a scan.
    """
    first, factors = next(iter(templates)), dict[str, dict[Path, Array]]()
    for part, path, kernel, layers in _adapted(templates, config.targets, lists):
        own = key if part == first else jax.random.fold_in(key, zlib.crc32(part.encode()))
        numbers = np.array([zlib.crc32(f"{one}.weight".encode()) for one in layers], np.uint32)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(own, numbers)
        *stack, inputs, outputs = kernel.shape

        def draw(key: Array, shape=(inputs, config.rank)) -> Array:
            if config.init == "gaussian":
                return jax.random.normal(key, shape, jnp.float32) / config.rank
            bound = shape[0] ** -0.5
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        a = jax.vmap(draw)(keys)
        found = factors.setdefault(part, {})
        found[*path, "a"] = a if stack else a[0]
        found[*path, "b"] = jnp.zeros((*stack, config.rank, outputs), jnp.float32)
    return {part: unflatten_dict(found) for part, found in factors.items()}


def adapted_layers(templates: Templates, targets: str, lists: Lists) -> dict[str, set[str]]:
    """Returns the torch names of linear layers that match `targets`, by component; omits those without matches.

    Raises:
      ValueError: No layer matches, or only some layers of a scan match.
    """
    found = dict[str, set[str]]()
    for part, _, _, layers in _adapted(templates, targets, lists):
        found.setdefault(part, set()).update(layers)
    return found


def _adapted(
    templates: Templates, targets: str, lists: Lists
) -> list[tuple[str, Path, Any, list[str]]]:
    """Returns (component, path, kernel, torch names of the layers of the scan) of matching linear layers.

    Names match with or without the component's name. Raises like `adapted_layers`.
    """
    given = f"lora targets {targets!r}"
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"{given} is not a regular expression: {error}") from error
    found, known = [], list[str]()
    for part, template in templates.items():
        for path, kernel, layers in dense_layers(template, lists[part]):
            known += layers
            names = [(layer, f"{part}.{layer}") for layer in layers]
            hits = [pair[0] for pair in names if any(map(pattern.fullmatch, pair))]
            if missed := [layer for layer in layers if hits and layer not in hits]:
                both = f"matches {hits[0]} but not {missed[0]}, which are scanned together"
                raise ValueError(f"{given} {both}: it must match all of them or none")
            if hits:
                found.append((part, path, kernel, layers))
    if not found:
        raise ValueError(
            f"{given} matches none of the {len(known)} linear layers; it must match a full name such as {known[0]}"
        )
    return found


def factor_axes(axes: Mapping[Path, tuple[str | None, ...]]) -> dict[Path, tuple[str | None, ...]]:
    """Returns the logical axes of the factors of all linear layers: a [..., in, rank], b [..., rank, out].

    `axes` contains the logical axes of the parameters, by path.
    """
    factors = {}
    for (*module, leaf), (*stack, last) in axes.items():
        if leaf == "kernel" and len(stack) > 0:
            *stack, first = stack
            factors[*module, "a"] = (*stack, first, RANK)
            factors[*module, "b"] = (*stack, RANK, last)
    return factors


def check_rank(rank: int, factors: Tree) -> None:
    """Raises ValueError if the rank is too large for every layer, given the factors or their shapes."""
    flat = flatten_dict(factors)
    layers = [path for *path, leaf in flat if leaf == "a"]
    highest = max(min(flat[*one, "a"].shape[-2], flat[*one, "b"].shape[-1]) for one in layers)
    if rank > highest:
        wrong = f"rank = {rank} is too large for all of its layers"
        raise ValueError(f"{wrong}: set it to {highest} or less")


@contextlib.contextmanager
def lora_layers(scale: float) -> Iterator[None]:
    """Adds the low-rank terms in `module.apply({"params": ..., "lora": ...}, ...)`; `scale` is alpha / rank.

    The context applies at trace time, so enter it inside the jitted function.
    """

    def intercept(call, args, kwargs, context):
        y = call(*args, **kwargs)
        dense = context.module
        if not is_adapted(dense):
            return y
        a, b = dense.get_variable("lora", "a"), dense.get_variable("lora", "b")
        x, a, b = promote_dtype(*args, a, b, dtype=dense.dtype)
        low = _product(dense, x, a) * scale
        return y + _product(dense, low, b).astype(y.dtype)

    token = _scale.set(scale)
    try:
        with nn.intercept_methods(intercept):
            yield
    finally:
        _scale.reset(token)


def lora_scale() -> float | None:
    """Returns the scale of the innermost `lora_layers` context, or None outside."""
    return _scale.get()


def is_adapted(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer with LoRA factors."""
    return isinstance(module, nn.Dense) and module.has_variable("lora", "a")


def _product(dense: nn.Dense, x: Array, factor: Array) -> Array:
    """Multiplies tokens [..., i] with a factor [i, o], using the layer's own dot product."""
    product = dense.dot_general or jax.lax.dot_general
    return product(x, factor, (((x.ndim - 1,), (0,)), ((), ())), precision=dense.precision)


def merge(params: Tree, lora: Tree, scale: float) -> dict[str, Any]:
    """Returns the merged weights W + scale A B, computed in float32 and cast to W's dtype.

    Raises:
      ValueError: W is quantized: merged weights have more digits.
    """
    merged, factors = flatten_dict(params), flatten_dict(lora)
    for *path, leaf in factors:
        if leaf == "a":
            kernel = merged[*path, "kernel"]
            if kernel.dtype in LARGEST:
                raise ValueError(f"{'/'.join(path)} is quantized: read its weights in float32")
            a, b = (factors[*path, factor].astype(jnp.float32) for factor in ("a", "b"))
            update = jnp.matmul(a, b, precision="highest") * scale
            merged[*path, "kernel"] = (kernel.astype(jnp.float32) + update).astype(kernel.dtype)
    return unflatten_dict(merged)


def dense_layers(template: Tree, lists: tuple[str, ...]) -> Iterator[tuple[Path, Any, list[str]]]:
    """Yields (path, kernel, torch names of the layers of the scan) of every linear layer."""
    for path, leaf in flatten_dict(template).items():
        if path[-1] == "kernel" and len(leaf.shape) - is_scanned(path, lists) == 2:
            tensors = tensor_names(path, lists)
            yield path[:-1], leaf, [tensor.removesuffix(".weight") for tensor in tensors]
