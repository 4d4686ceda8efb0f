"""What a network is told of the mesh while it is traced: how activations are split, and what attends."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.engine.axes import SEQUENCE, TENSOR, parts
from digen_jax.target import on_mesh


@contextlib.contextmanager
def traced_on(sharding: NamedSharding, attention: str) -> Iterator[None]:
    """A context for tracing networks whose programs XLA partitions.

    Args:
      sharding: of the rows of activations.
      attention: the kernel that was asked for, see `attention.kernels`.
    """
    rows, *_ = sharding.spec
    with on_mesh(sharding.mesh, rows, TENSOR, SEQUENCE, attention), _split(sharding):
        yield


def _split(sharding: NamedSharding) -> AbstractContextManager[None]:
    """A context in which the outputs of linear layers and convolutions are split: their rows, and tokens.

    Rows are split as in `sharding`, the tokens of [b n d] over the axis sequence. XLA chooses the sharding of other
    dimensions. If parameters are split over fsdp and tensor, it would otherwise split the rows over data only and
    compute with each part of a parameter on its device, which moves activations instead of parameters. If nothing
    is split over tensor or sequence, it finds the sharding of rows itself.
    """
    mesh, (rows, *_) = sharding.mesh, sharding.spec
    if mesh.shape[TENSOR] == mesh.shape[SEQUENCE] == 1:
        return contextlib.nullcontext()

    def intercept(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if not isinstance(context.module, nn.Dense | nn.Conv) or y.shape[0] % parts(mesh, rows):
            return y
        free = [PartitionSpec.UNCONSTRAINED] * (y.ndim - 1)
        if mesh.shape[SEQUENCE] > 1 and isinstance(context.module, nn.Conv):
            # If XLA split pixels like tokens, it would double the gradient of the kernel where tensor splits, too.
            free = [None] * (y.ndim - 1)
        elif mesh.shape[SEQUENCE] > 1 and y.ndim == 3:
            free[0] = SEQUENCE
        spec = PartitionSpec(rows, *free)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, spec))

    return nn.intercept_methods(intercept)
