"""Sharding of a network's activations on a mesh that splits its parameters over several axes."""

import contextlib
from contextlib import AbstractContextManager

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.engine.axes import TENSOR, parts


def rows_split(sharding: NamedSharding) -> AbstractContextManager[None]:
    """A context in which the rows of every linear layer's and convolution's output are split as in `sharding`.

    XLA chooses the sharding of their other dimensions. If parameters are split over fsdp and tensor, it would
    otherwise split the rows over data only and compute with each part of a parameter on its device, which moves
    activations instead of parameters. If nothing is split over tensor, it finds the sharding of rows itself.

    It acts while a module is traced, so enter it inside the jitted function.
    """
    mesh, (rows, *_) = sharding.mesh, sharding.spec
    if mesh.shape[TENSOR] == 1:
        return contextlib.nullcontext()

    def intercept(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if not isinstance(context.module, nn.Dense | nn.Conv) or y.shape[0] % parts(mesh, rows):
            return y
        free = (PartitionSpec.UNCONSTRAINED,) * (y.ndim - 1)
        spec = PartitionSpec(rows, *free)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, spec))

    return nn.intercept_methods(intercept)
