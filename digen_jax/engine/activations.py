"""Where a network's activations lie on a mesh that splits its parameters over several axes."""

import contextlib
from contextlib import AbstractContextManager

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.engine.axes import TENSOR, parts


def rows_split(sharding: NamedSharding) -> AbstractContextManager[None]:
    """A context in which the output of every linear layer and convolution has its rows split as `sharding` says.

    How their other dimensions lie is XLA's to find. Where parameters are split over fsdp and tensor, it would
    else split the rows over data only and compute with each part of a parameter where that lies, which moves
    activations instead of parameters. Where nothing is split over tensor it finds the rows by itself.

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
