"""Operations of the matrix products and convolutions in a program, as the compiler's cost analysis counts them."""

import math
import re
from collections.abc import Callable, Iterator

from digen_jax.planning.hlo import Array, Computation, Instruction, Module
from digen_jax.planning.layers import REPEATED
from digen_jax.planning.loops import Frame, trips

Chosen = Callable[[Instruction], bool]


def products(module: Module, chosen: Chosen = lambda instruction: True) -> float:
    """Returns the FLOPs of all matrix products and convolutions on one device, a multiply-add as two.

    A loop's body counts as often as it runs, unlike in `cost_analysis()`. Of a conditional the largest branch
    counts. NVIDIA's libraries count (`library_flops`), Pallas kernels do not.

    Args:
      module: the program.
      chosen: whether a product or convolution counts.

    Raises:
      ValueError: a loop does not tell how often it runs.
    """
    return _of(module, Frame(module.computations[module.entry]), chosen)


def repeated(instruction: Instruction) -> bool:
    """Whether it is of a forward pass that is run again in the backward pass, to save memory."""
    return REPEATED in instruction.op_name


def _of(module: Module, frame: Frame, chosen: Chosen) -> float:
    total = 0.0
    for instruction in frame.computation.instructions.values():
        inner = [_of(module, f, chosen) for f in _entered(module, frame, instruction)]
        match instruction.opcode:
            case "dot" | "convolution" | "custom-call" if not chosen(instruction):
                continue
            case "dot":
                total += _dot(frame.computation, instruction)
            case "convolution":
                inputs, kernel, *_ = _arrays(frame.computation, instruction)
                total += _convolution(instruction, inputs, kernel, instruction.arrays[0])
            case "custom-call":
                total += library_flops(frame.computation, instruction) or 0.0
            case "while":
                count = trips(module, frame, instruction)
                if count is None and sum(inner):
                    raise ValueError(f"the loop {instruction.name} does not tell how often it runs")
                total += (count or 0) * sum(inner)
            case "conditional":
                total += max(inner, default=0.0)
            case _:
                total += sum(inner)
    return total


def _entered(module: Module, frame: Frame, instruction: Instruction) -> Iterator[Frame]:
    """The computations that an instruction runs, without those of single elements."""
    if instruction.opcode in (
        "while",
        "fusion",
        "call",
        "conditional",
        "call-start",
        "async-start",
    ):
        for name in instruction.called:
            yield frame.enter(module, instruction, name)


def library_flops(computation: Computation, call: Instruction) -> float | None:
    """Returns the FLOPs of a call of cuBLAS or cuDNN, or None for any other instruction.

    Attention is two products forward and five backward, which makes the scores again.
    """
    target = call.target
    if not target.startswith(("__cublas$", "__cudnn$")):
        return None
    first, second, *_ = _arrays(computation, call)
    result = call.arrays[0]
    if target.startswith("__cublas$"):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.attributes)
        sizes = (first.shape[d] for d in _numbers(contracted[1].replace('"', "")))
        return 2.0 * result.elements * math.prod(sizes)
    if target.startswith("__cudnn$fmha"):
        scores = re.search(r'"dimensions": ?\[([^\]]*)\]', call.attributes)
        pairs = math.prod(_numbers(scores[1].replace('"', "")))
        return 2.0 * (5 if target.endswith("Backward") else 2) * pairs * first.shape[-1]
    if target == "__cudnn$convBackwardInput":
        return _convolution(call, result, second, first)
    if target == "__cudnn$convBackwardFilter":
        return _convolution(call, first, result, second)
    if target.startswith("__cudnn$conv"):
        return _convolution(call, first, second, result)
    raise ValueError(f"the program has a call of a library whose work is unknown, {target}")


def _arrays(computation: Computation, instruction: Instruction) -> list[Array]:
    return [operand.arrays[0] for operand in computation.operands(instruction)]


def _dot(computation: Computation, dot: Instruction) -> float:
    left = _arrays(computation, dot)[0]
    contracted = _numbers(dot.attribute("lhs_contracting_dims"))
    return 2.0 * dot.arrays[0].elements * math.prod(left.shape[d] for d in contracted)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _convolution(conv: Instruction, inputs: Array, kernel: Array, out: Array) -> float:
    """Only the positions of the kernel that meet the input count, not those in padding or between dilated elements."""
    ins, kernels, outs = re.split(r"_|->", conv.attribute("dim_labels"))
    features = kernel.shape[kernels.index("i")]
    batch = out.shape[outs.index("b")] * out.shape[outs.index("f")]
    windows = _windows(conv, kernel, kernels)
    met = 1
    for label, window in windows.items():
        sizes = inputs.shape[ins.index(label)], out.shape[outs.index(label)]
        met *= _meetings(*sizes, *window)
    # Groups of the batch share the output's features, not their sums.
    return 2.0 * batch * features * met / int(conv.attribute("batch_group_count") or 1)


def _windows(conv: Instruction, kernel: Array, labels: str) -> dict[str, tuple[int, ...]]:
    """By spatial label: (kernel's size, stride, padding in front, dilation of the input, of the kernel)."""
    spatial = sorted(label for label in labels if label.isdigit())
    given = dict(part.split("=") for part in conv.attribute("window").split())
    count = len(spatial)

    def each(name: str, default: str) -> list[str]:
        return given[name].split("x") if name in given else [default] * count

    pads = [int(pad.split("_")[0]) for pad in each("pad", "0_0")]
    strides, inner, outer = (
        [int(number) for number in each(name, "1")]
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    return {
        label: (kernel.shape[labels.index(label)], strides[i], pads[i], inner[i], outer[i])
        for i, label in enumerate(spatial)
    }


def _meetings(
    inputs: int, outputs: int, kernel: int, stride: int, pad: int, inner: int, outer: int
) -> int:
    """Pairs of an output's and a kernel's position that meet an element of the input."""
    spread, found = (inputs - 1) * inner + 1, 0
    for k in range(kernel):
        shift = k * outer - pad
        if inner == 1:
            first = max(0, -(shift // stride))
            last = min(outputs - 1, (spread - 1 - shift) // stride)
            found += max(0, last - first + 1)
            continue
        positions = (o * stride + shift for o in range(outputs))
        found += sum(0 <= p < spread and p % inner == 0 for p in positions)
    return found
