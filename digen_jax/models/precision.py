"""How exactly float32 matrices are multiplied on accelerators."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# TF32 on NVIDIA (10 bits of mantissa), three bfloat16 passes on TPUs, whose default is a single one with 7 bits:
# rounding of that size moves an importance ratio by more than the clip ranges in use.
FLOAT32_PRODUCTS = "high"


def exact_products(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Traces `method` so that its float32 products, and those of its gradient, have at least that precision.

    A precision that the user has chosen (`JAX_DEFAULT_MATMUL_PRECISION`, `jax.default_matmul_precision`) stands.
    Products of bfloat16 are not concerned.
    """

    @functools.wraps(method)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        chosen = jax.config.jax_default_matmul_precision
        with jax.default_matmul_precision(chosen or FLOAT32_PRODUCTS):
            return method(*args, **kwargs)

    return traced
