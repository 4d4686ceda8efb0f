"""How the programs are compiled whose log-probabilities are compared with one another."""

from collections.abc import Callable
from typing import Any

import jax

# Else XLA drops a rounding to bfloat16 wherever a fusion has the exact number at hand. Each program then rounds
# at other places: sampler and trainer, and in one program the pass with a backward pass and the one without.
AS_WRITTEN = {"xla_allow_excess_precision": False}


def jit_as_written(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` with every rounding to bfloat16 where the model has it, so that equal weights give equal ratios.

    Programs in float32 are not changed by it. The result cannot be called inside of another program.

    Args:
      function: to be compiled.
      options: further ones of `jax.jit`, other than compiler_options.
    """
    return jax.jit(function, compiler_options=AS_WRITTEN, **options)
