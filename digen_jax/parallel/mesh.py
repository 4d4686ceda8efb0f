"""Device mesh axes, and the sharding of parameters and activations over them.

Every mesh has all axes; unused ones have size 1. `ShardingRules` applies a config's rules to logical axes.

| axis     | splits                                                                                        |
| -------- | --------------------------------------------------------------------------------------------- |
| time     | the denoising steps of a training pass                                                        |
| data     | images                                                                                        |
| fsdp     | images, and parameters that are gathered before use (ZeRO, arXiv 1910.02054)                  |
| tensor   | parameters by heads and inner widths, so that each device computes a part (arXiv 1909.08053)  |
| sequence | tokens, or heads in attention, so that each device has a part of the activations              |

Devices that differ only in `tensor` or `sequence` work on the same images.

`put`, `fetch` and `job_devices` are for meshes whose devices belong to several processes.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Shaped

from digen_jax.attention.kernels import SEQUENCE, TENSOR, on_mesh
from digen_jax.checkpoints.lora import factor_axes
from digen_jax.checkpoints.quantization import scale_axes
from digen_jax.checkpoints.tensors import LAYERS
from digen_jax.errors import ConfigError
from digen_jax.models.family import Params
from digen_jax.process import job

TIME, DATA, FSDP = "time", "data", "fsdp"
BATCH = (DATA, FSDP)  # axes that split images
MODEL = (TENSOR, SEQUENCE)  # axes that split the work on an image; their devices are neighbours
SAMPLES = (TIME, *BATCH)  # axes with different samples: a gradient is the sum over them
PARAMETERS = (FSDP, TENSOR)  # axes that may split a parameter
ALL = (*SAMPLES, *MODEL)


def axis_sizes(**given: int) -> dict[str, int]:
    """Returns the sizes of all axes; unspecified ones are 1."""
    return dict.fromkeys(ALL, 1) | given


def make_mesh(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    """Creates a mesh of all devices in order, the last axis varying fastest; `sizes` as in `axis_sizes`."""
    grid = np.asarray(devices).reshape(list(axis_sizes(**sizes).values()))
    return Mesh(grid, ALL, axis_types=(AxisType.Auto,) * len(ALL))


def parts(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the product of the sizes of some axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def put(value: Any, sharding: Sharding) -> Array:
    """Shards a value over a mesh; every process passes the full value. Typed keys are supported.

    `jax.device_put` does the same, but over several processes it first compares all values.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns shapes with shardings; a sharding may be for a subtree."""
    each = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, each)


def any_of(mask: Bool[np.ndarray, "n"], mesh: Mesh) -> Bool[np.ndarray, "n"]:
    """Combines the masks of all processes of a mesh by logical or; every process must call it."""
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # one per device
    masks = jax.make_array_from_callback(
        (mesh.size, len(mask)), rows, lambda index: mask[None, cast(Any, index)[1]]
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    return fetch(jax.jit(lambda masks: masks.any(0), out_shardings=replicated)(masks))


def fetch(array: Shaped[Array, "..."]) -> Shaped[np.ndarray, "..."]:
    """Returns the full array on the host of every process; if it spans several processes, all must call it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def job_devices(count: int, field: str) -> list[jax.Device]:
    """Returns the devices for the mesh of a config field, the same number from each process of this process group.

    Raises:
      ConfigError: a process has too few devices.
    """
    processes = job.members() or range(job.size())
    share, found = count // len(processes), []
    for process in processes:
        local = [one for one in jax.devices() if one.process_index == process]
        if len(local) < share:
            raise ConfigError(
                f"{field} has {count} devices, but its process has {len(local)} "
                f"({jax.devices()[0].device_kind}): reduce it, or start the process with more devices"
            )
        found += local[:share]
    return found


# Minimum size of a parameter that "fsdp" splits: gathering a smaller one costs more than its memory.
FSDP_MIN_SIZE = 2**14
TACTICS = REPLICATE, SPLIT = "replicate", FSDP

# (regex, tactic) or (regex, logical axis, mesh axis); see `ShardingRules`.
Rules = Sequence[tuple[str, ...]]
REPLICATED = ((".*", REPLICATE),)
# Megatron's rules: the first of two layers is split by columns, the second by rows (arXiv 1909.08053).
TENSOR_RULES = ((".*", "heads", TENSOR), (".*", "mlp", TENSOR))


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Sharding rules for parameters on any mesh.

    A parameter's name is its component and path, such as "transformer/context_embedder/kernel". Rules
    whose regex matches part of the name apply in order:

    - (regex, logical axis, mesh axis): the mesh axis splits the parameter's first dimension with that
      logical axis, as in MaxText's `logical_axis_rules`;
    - (regex, "fsdp"): the mesh axis fsdp splits the largest dimension, except a scan's layers, of
      parameters with at least `FSDP_MIN_SIZE` elements;
    - (regex, "replicate"): no later rule applies.

    A dimension is split at most once, by a size that divides it, and a mesh axis splits at most one dimension.
    Rules that violate this are skipped. If no rule uses the axis tensor, `TENSOR_RULES` come first.

    Attributes:
      rules: Rules of the config.
      axes: Logical axis of each dimension, by parameter name. Other parameters have none.
    """

    rules: Rules = REPLICATED
    axes: Mapping[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, rules: Rules, axes: Params) -> "ShardingRules":
        """Creates the layout from a family's `axes()`, including the LoRA factors and scales that kernels may get."""
        named = flatten_dict(axes)
        named |= factor_axes(named) | scale_axes(named)
        return cls(tuple(rules), {"/".join(path): names for path, names in named.items()})

    def check(self) -> None:
        """Raises ConfigError for a rule that applies to no parameter."""
        for pattern, *about in self.rules:
            logical = about[0] if len(about) == 2 else None
            if logical and not any(
                logical in axes and re.search(pattern, name) for name, axes in self.axes.items()
            ):
                raise ConfigError(
                    f"config.placement.rules splits the axis {logical!r} of parameters that match {pattern!r}, "
                    "but no such parameter has it: change or remove that rule"
                )

    def spec(self, name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
        """Returns the mesh axis that splits each dimension, on a mesh with these axis sizes.

        Raises:
          ConfigError: no rule of the config matches the name.
        """
        matching = list(self._matching(name))
        if not matching:
            raise ConfigError(
                f"config.placement.rules has no rule that matches the parameter {name}: end it with ('.*', 'replicate')"
            )
        placed: list[str | None] = [None] * len(shape)
        default = () if any(rule[-1] == TENSOR for rule in self.rules) else TENSOR_RULES
        for axis, dimension in self._splits((*default, *matching), name, shape, sizes):
            placed[dimension] = axis
        while placed and placed[-1] is None:
            placed.pop()
        return PartitionSpec(*placed)

    def bytes(self, tree: Params, sizes: Mapping[str, int]) -> int:
        """Returns the bytes per device of parameters or shapes, on a mesh with these axis sizes."""
        total = 0
        for path, leaf in jax.tree.leaves_with_path(tree):
            spec = self.spec(parameter_name(path), leaf.shape, sizes)
            parts = math.prod(sizes[axis] for axis in spec if axis)
            total += leaf.size * leaf.dtype.itemsize // parts
        return total

    def _matching(self, name: str) -> Iterator[tuple[str, ...]]:
        """Yields the matching rules, up to the first (regex, "replicate")."""
        for rule in self.rules:
            if re.search(rule[0], name):
                yield rule
                if rule[1:] == (REPLICATE,):
                    return

    def _splits(
        self,
        rules: Iterable[tuple[str, ...]],
        name: str,
        shape: tuple[int, ...],
        sizes: Mapping[str, int],
    ) -> Iterator[tuple[str, int]]:
        """Yields (mesh axis, dimension) of each split."""
        names, used, free = self.axes.get(name, ()), set(), set(range(len(shape)))
        for _, *about in rules:
            axis = about[-1]
            if about == [REPLICATE] or axis in used or sizes[axis] == 1:
                continue
            fitting = [d for d in sorted(free) if shape[d] % sizes[axis] == 0]
            if about == [SPLIT]:
                # A scan reads one layer at a time: if layers were split, a device would gather all of them.
                within = [d for d in fitting if not names or names[d] != LAYERS]
                large = within and math.prod(shape) >= FSDP_MIN_SIZE
                found = max(within, key=lambda d: shape[d]) if large else None
            else:
                found = next((d for d in fitting if names and names[d] == about[0]), None)
            if found is not None:
                used.add(axis)
                free.remove(found)
                yield axis, found


def parameter_name(path: tuple) -> str:
    """Returns a parameter's name from its path in a tree by component."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@contextlib.contextmanager
def tracing_on(sharding: NamedSharding, attention: str) -> Iterator[None]:
    """Context manager for tracing networks whose programs XLA partitions.

    Args:
      sharding: Sharding of the rows of activations.
      attention: Configured kernel (see `attention.kernels`).
    """
    mesh, (rows, *_) = cast(Mesh, sharding.mesh), sharding.spec
    with on_mesh(mesh, rows, attention), _shard_activations(sharding):
        yield


def _shard_activations(sharding: NamedSharding) -> AbstractContextManager[None]:
    """Context manager that shards rows and tokens of the outputs of linear layers and convolutions.

    Rows are split as in `sharding`, the tokens of [b n d] over the axis sequence. XLA chooses the sharding of other
    dimensions. With parameters split over fsdp and tensor, it would otherwise split rows over data only and compute
    with each part of a parameter on its device, which moves activations instead of parameters. Without splits over
    tensor or sequence, it finds the sharding of rows itself.
    """
    mesh, (rows, *_) = cast(Mesh, sharding.mesh), sharding.spec
    if mesh.shape[TENSOR] == mesh.shape[SEQUENCE] == 1:
        return contextlib.nullcontext()

    def intercept(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if not isinstance(context.module, nn.Dense | nn.Conv) or y.shape[0] % parts(mesh, rows):
            return y
        free: list[Any] = [PartitionSpec.UNCONSTRAINED] * (y.ndim - 1)
        if mesh.shape[SEQUENCE] > 1 and isinstance(context.module, nn.Conv):
            # If XLA split pixels like tokens, it would double the kernel's gradient where tensor also splits.
            free = [None] * (y.ndim - 1)
        elif mesh.shape[SEQUENCE] > 1 and y.ndim == 3:
            free[0] = SEQUENCE
        spec = PartitionSpec(rows, *free)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, spec))

    return nn.intercept_methods(intercept)
