"""Precision of float32 matrix products on accelerators."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# TF32 on NVIDIA (10 bits of mantissa), three bfloat16 passes on TPUs, whose default is a single one with 7 bits:
# such rounding moves an importance ratio by more than the usual clip ranges.
FLOAT32_PRODUCTS = "high"
FLOAT32_NAMES = {"gpu": "TF32", "tpu": "three bfloat16 passes"}  # by platform


def exact_products(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Traces `method` with a precision of at least FLOAT32_PRODUCTS for float32 products, also in its gradient.

    A precision that the user has chosen (`JAX_DEFAULT_MATMUL_PRECISION`, `jax.default_matmul_precision`) has priority.
    Products of bfloat16 are not affected.
    """

    @functools.wraps(method)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        chosen = jax.config.jax_default_matmul_precision
        with jax.default_matmul_precision(chosen or FLOAT32_PRODUCTS):
            return method(*args, **kwargs)

    return traced
