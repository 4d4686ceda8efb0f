"""Compilation of the programs whose log-probabilities are compared with one another."""

from collections.abc import Callable
from typing import Any

import jax

# Otherwise XLA omits a rounding to bfloat16 wherever a fusion has the exact number. Each program then rounds at
# other places: sampler and trainer, and within one program the pass with a backward pass and the one without.
AS_WRITTEN = {"xla_allow_excess_precision": False}


def jit_as_written(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` that keeps every rounding to bfloat16 of the model, so that equal weights give equal ratios.

    It does not change programs in float32. The result cannot be called inside another program.

    Args:
      function: to be compiled.
      options: further options of `jax.jit`, except compiler_options.
    """
    return jax.jit(function, compiler_options=AS_WRITTEN, **options)
