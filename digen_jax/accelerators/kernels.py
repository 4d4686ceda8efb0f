"""Pallas kernels in a program, whose operations the compiler does not count."""

import math
import re

from digen_jax.accelerators.hlo import Computation, Instruction

# Matrix products of a splash attention kernel, by its name; each takes 2 b h s_q s_k d FLOPs.
SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
SPLASH |= {name.replace("mha", "mqa"): products for name, products in SPLASH.items()}


def kernel_name(instruction: Instruction) -> str:
    """The kernel's own name, which the compiler takes for its instruction."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", instruction.name)


def kernel_flops(
    computation: Computation, instruction: Instruction, name: str
) -> tuple[float, float]:
    """(FLOPs of a Pallas kernel, columns of its narrowest product); without any statement (0, inf).

    A kernel without a cost estimate of its own that is no splash attention counts by its bytes alone.
    """
    stated = re.search(r'"cost_estimate":\{"flops":"?(\d+)', instruction.attributes)
    found = next((n for prefix, n in SPLASH.items() if name.startswith(prefix)), None)
    if found is None:
        return (float(stated[1]) if stated else 0.0), math.inf
    # The first three operands with rows and columns of one width are queries, keys and values.
    wide = [
        operand.arrays[0] for operand in computation.operands(instruction)
        if operand.arrays and len(operand.arrays[0].shape) >= 3 and operand.arrays[0].dtype in ("bf16", "f32", "f16")
    ]  # fmt: skip
    queries, keys = wide[0].shape, wide[1].shape
    if (
        found == SPLASH["splash_mha_dkv"]
        and r"use_fused_bwd_kernel\": true" in instruction.attributes
    ):
        found += 1  # it makes the gradient of the queries, too
    flops = 2.0 * found * math.prod(queries[:-1]) * keys[-2] * queries[-1]
    return (float(stated[1]) if stated else flops), queries[-1]
