"""Kernels in a program, of Pallas or NVIDIA's libraries, of which the compiler estimates no time."""

import math
import re

from digen_jax.planning.hlo import Array, Computation, Instruction

# The share of the peak, or of that part of it which the width of its products permits, that a kernel reaches.
KERNEL_SHARE = 0.5
# FLOPs of the peak, which is that of bfloat16, that one of a float32 product takes on NVIDIA's GPUs: as TF32, or exact.
TF32, EXACT = 2, 16
# The same of packed attention, by the rows of the matrix unit and the largest width of a head. The compiler's schedule
# takes no longer (tests/attention/test_schedules.py).
PACKED_SHARES = {
    "forward": {(128, 64): 0.63, (128, 128): 0.37, (256, 64): 0.44, (256, 128): 0.28},
    "backward": {(128, 64): 0.72, (128, 128): 0.50, (256, 64): 0.61, (256, 128): 0.41},
}

# Matrix products of a splash attention kernel, by its name; each takes 2 b h s_q s_k d FLOPs. "dkv" makes the gradient
# of the queries, too, where it is fused, which the program does not say; else one product too many is counted.
SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 5}
SPLASH |= {name.replace("mha", "mqa"): products for name, products in SPLASH.items()}


def kernel_name(instruction: Instruction) -> str:
    """The kernel's own name, which the compiler takes for its instruction."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", instruction.name)


def library_share(computation: Computation, call: Instruction) -> float:
    """Returns the share of a GPU's peak at which cuBLAS or cuDNN does its FLOPs."""
    if not any(
        a.dtype == "f32" for operand in computation.operands(call)[:2] for a in operand.arrays
    ):
        return KERNEL_SHARE
    return KERNEL_SHARE / (EXACT if "highest" in call.attributes.lower() else TF32)


def kernel_work(
    computation: Computation, instruction: Instruction, name: str, array: int
) -> tuple[float, float]:
    """(FLOPs of a Pallas kernel, the share of a chip's peak at which it does them); without any statement (0, 1).

    Splash attention does not state its FLOPs. Packed attention does, and has the width of its heads in its name. Any
    other kernel without a cost estimate of its own counts by its bytes alone.

    Args:
      computation: that the kernel is a part of.
      instruction: the call of the kernel.
      name: by `kernel_name`.
      array: rows and columns of the chip's matrix unit.
    """
    stated = re.search(r'"cost_estimate":\{"flops":"?(\d+)', instruction.attributes)
    flops = float(stated[1]) if stated else 0.0
    if packed := re.fullmatch(r"attention_(forward|backward)_(\d+)", name):
        width = int(packed[2])
        share = PACKED_SHARES[packed[1]][128 if array <= 128 else 256, 64 if width <= 64 else 128]
        return flops, share * min(1.0, width / array) / _passes(computation, instruction)
    products = next((n for prefix, n in SPLASH.items() if name.startswith(prefix)), None)
    if products is None:
        return flops, KERNEL_SHARE if stated else 1.0
    # The first three operands with rows and columns of one width are queries, keys and values.
    queries, keys, *_ = (a.shape for a in _factors(computation, instruction))
    needed = 2.0 * products * math.prod(queries[:-1]) * keys[-2] * queries[-1]
    share = KERNEL_SHARE * min(1.0, queries[-1] / array) / _passes(computation, instruction)
    return flops or needed, share


def _passes(computation: Computation, instruction: Instruction) -> int:
    """bfloat16 products that an exact product of the kernel takes: 6 of float32 factors in three parts each."""
    factors = _factors(computation, instruction)
    return 6 if factors and factors[0].dtype == "f32" else 1


def _factors(computation: Computation, instruction: Instruction) -> list[Array]:
    """The operands of attention with rows and columns, in order."""
    return [
        operand.arrays[0] for operand in computation.operands(instruction)
        if operand.arrays and len(operand.arrays[0].shape) >= 3 and operand.arrays[0].dtype in ("bf16", "f32", "f16")
    ]  # fmt: skip
