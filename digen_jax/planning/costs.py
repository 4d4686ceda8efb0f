"""The estimated seconds of a compiled program on a chip, by what they are spent on.

What the TPU compiler estimates are fusions and copies; the CUDA compiler estimates nothing. The rest is costed here,
conservatively: as if nothing ran at the same time as anything else.

- A kernel takes its FLOPs over the share of the peak that `kernels` states, or its bytes over the memory's bandwidth,
  whichever is longer. The FLOPs are those that the kernel states; of splash attention, which states none, those of its
  matrix products without any mask. Calls of cuBLAS and cuDNN are such kernels, whose FLOPs follow from their shapes.
- A collective is a ring over one link in one direction, at `LINK_SHARE` of its bandwidth: an all-gather moves (n - 1)/n
  of its result, a reduce-scatter (n - 1)/n of its input, an all-reduce twice that. All of a slice's chips are linked
  directly, over several hosts, too; a ring may need more hops than links on a mesh without wrap-around. Of GPUs on
  several hosts every collective counts as one over the network.
- A transfer between memories, and any other operation without an estimate, takes its bytes over `MEMORY_SHARE` of the
  memory's bandwidth. Of what a fusion slices only the slice counts.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from digen_jax.planning.answers import Answer, answer_of
from digen_jax.planning.chips import Chip
from digen_jax.planning.collectives import group_size, is_collective, kind_of, moved_bytes
from digen_jax.planning.counting import library_flops, products, repeated
from digen_jax.planning.hlo import Computation, Instruction, Module, parse
from digen_jax.planning.kernels import kernel_name, kernel_work, library_share
from digen_jax.planning.layers import AGAIN, layer_of
from digen_jax.planning.loops import Frame, trips

LINK_SHARE, MEMORY_SHARE = 0.8, 0.8

# Rows of a program's seconds.
COMPILER, KERNELS, COLLECTIVES, TRANSFERS, OTHERS = (
    "estimated by the compiler",
    "kernels",
    "collectives",
    "transfers between memories",
    "without an estimate",
)
KINDS = COMPILER, KERNELS, COLLECTIVES, TRANSFERS, OTHERS
# Operations that take no time, or whose time is that of another one.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "domain",
}  # fmt: skip
FREE_CALLS = {
    "AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"
}  # fmt: skip

SLICES, UPDATE = ("dynamic-slice", "slice", "gather"), "dynamic-update-slice"


@dataclasses.dataclass(frozen=True)
class Item:
    """An instruction of a program, and what it costs.

    Attributes:
      kind: one of `KINDS`.
      what: its opcode, or the kernel's name.
      name: its name in the program.
      layer: where it comes from.
      times: how often it runs.
      seconds: of one run, estimated.
      flops: of a Pallas kernel, in one run.
      bytes: that a collective or a transfer moves, or an operation without an estimate reads and writes, in one run.
    """

    kind: str
    what: str
    name: str
    layer: str
    times: int
    seconds: float
    bytes: int = 0
    flops: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all runs."""
        return self.times * self.seconds


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated seconds of a program on one device.

    Attributes:
      items: all that takes time.
      unknown_loops: loops whose number of iterations is unknown; their bodies count once.
      flops: of all matrix products, convolutions and kernels; nan: a loop of unknown length has some.
      repeated: those of them that remat runs again.
      peak_bytes: of memory, as the compiler reports it.
    """

    items: tuple[Item, ...]
    unknown_loops: tuple[str, ...] = ()
    flops: float = 0.0
    repeated: float = 0.0
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Of the whole program, as if nothing ran at the same time as anything else."""
        return sum(item.total for item in self.items)

    def of(self, kind: str) -> float:
        """Seconds of one kind."""
        return sum(item.total for item in self.items if item.kind == kind)

    def slowest(self, count: int, *kinds: str) -> list[Item]:
        """Returns the items of some kinds that take longest."""
        found = [item for item in self.items if item.kind in kinds]
        return sorted(found, key=lambda item: -item.total)[:count]

    def by_what(self, kind: str) -> dict[str, tuple[int, float, float]]:
        """(runs, bytes, seconds) of the items of a kind, by what they are, the slowest first."""
        runs, moved, seconds = Counter(), Counter(), Counter()
        for item in self.items:
            if item.kind == kind:
                runs[item.what] += item.times
                moved[item.what] += item.times * item.bytes
                seconds[item.what] += item.total
        return {what: (runs[what], moved[what], took) for what, took in seconds.most_common()}

    def cycles(self, chip: Chip) -> float:
        """The seconds in cycles of the chip's clock."""
        return self.seconds * chip.clock


def estimate(compiled: jax.stages.Compiled, chip: Chip) -> Estimate:
    """The estimate of a program that was compiled for that chip."""
    return estimate_answer(answer_of(compiled), chip)


def estimate_answer(answer: Answer, chip: Chip) -> Estimate:
    """The estimate from what the compiler said of a program."""
    return dataclasses.replace(estimate_text(answer.text, chip), peak_bytes=answer.peak)


def estimate_text(text: str, chip: Chip) -> Estimate:
    """The estimate of a program's text, without its memory."""
    module = parse(text)
    walk = _Walk(module, chip)
    items = tuple(walk.items(Frame(module.computations[module.entry]), 1))
    unknown = tuple(sorted(walk.unknown))
    kernels = [item for item in items if item.kind == KERNELS]
    again = [item for item in kernels if item.layer.endswith(AGAIN)]
    return Estimate(
        items,
        unknown,
        _products(module) + sum(item.times * item.flops for item in kernels),
        _products(module, repeated) + sum(item.times * item.flops for item in again),
    )


def flops_of(text: str) -> tuple[float, float]:
    """(FLOPs of all products and convolutions in a program, those that remat runs again); nan as in `Estimate`."""
    module = parse(text)
    return _products(module), _products(module, repeated)


def _products(module: Module, *chosen: Any) -> float:
    try:
        return products(module, *chosen)
    except ValueError:  # a loop does not tell how often it runs
        return math.nan


class _Walk:
    """Goes through a program, each body of a loop as often as it runs."""

    def __init__(self, module: Module, chip: Chip):
        self.module, self.chip = module, chip
        self.unknown: set[str] = set()

    def items(self, frame: Frame, times: int) -> Iterator[Item]:
        """All items of a computation that runs so often."""
        for instruction in frame.computation.instructions.values():
            yield from self._of(frame, instruction, times)

    def _of(self, frame: Frame, instruction: Instruction, times: int) -> Iterator[Item]:
        opcode = instruction.opcode
        if (
            opcode in FREE
            or opcode.endswith(("-done", "async-update"))
            or instruction.target in FREE_CALLS
        ):
            return
        if opcode == "while":
            count = trips(self.module, frame, instruction)
            if count is None:
                self.unknown.add(instruction.name)
                count = 1
            for attribute in ("condition", "body"):
                yield from self._inside(
                    frame, instruction, [_name(instruction, attribute)], times * count
                )
        elif opcode == "conditional":
            branches = (
                list(self._inside(frame, instruction, [name], times)) for name in instruction.called
            )
            yield from max(branches, key=lambda items: sum(item.total for item in items))
        elif opcode in ("call", "call-start", "async-start"):
            yield from self._inside(frame, instruction, instruction.called, times)
        else:
            yield from self._leaf(frame.computation, instruction, times)

    def _inside(
        self, frame: Frame, instruction: Instruction, names: Iterable[str], times: int
    ) -> Iterator[Item]:
        for name in names:
            yield from self.items(frame.enter(self.module, instruction, name), times)

    def _leaf(
        self, computation: Computation, instruction: Instruction, times: int
    ) -> Iterator[Item]:
        """An operation of the compiler's estimate, or one that is costed here; a fusion may be both."""
        inner = self._fused(instruction)
        source = next((i for i in inner if i.opcode in ("convolution", "dot")), instruction)
        layer = layer_of(source.op_name or instruction.op_name)
        common = dict(name=instruction.name, times=times)
        moved = [i for i in (instruction, *inner) if is_collective(i.opcode)]
        for one in moved:
            size, seconds = self._collective(computation, one)
            yield Item(COLLECTIVES, kind_of(one.opcode), layer=layer_of(one.op_name) or layer,
                       seconds=seconds, bytes=size, **common)  # fmt: skip
        if instruction.cycles is not None:
            seconds = instruction.cycles / self.chip.clock
            yield Item(COMPILER, instruction.opcode, layer=layer, seconds=seconds, **common)
        elif instruction.target == "tpu_custom_call":
            name = kernel_name(instruction)
            flops, seconds = self._kernel(computation, instruction, name)
            yield Item(KERNELS, name, layer=layer, seconds=seconds, flops=flops, **common)
        elif (flops := library_flops(computation, instruction)) is not None:
            needed = flops / (library_share(computation, instruction) * self.chip.flops)
            # Further results are room for work.
            size = sum(one.bytes for one in computation.operands(instruction))
            size += instruction.arrays[0].bytes
            seconds = max(needed, size / (MEMORY_SHARE * self.chip.bandwidth))
            yield Item(KERNELS, instruction.target, layer=layer, seconds=seconds, **common)
        elif not moved:
            kind = TRANSFERS if instruction.opcode in ("copy-start", "slice-start") else OTHERS
            touched = _transferred if kind == TRANSFERS else self._touched
            size = touched(computation, instruction)
            what = instruction.opcode + (f" {instruction.target}" if instruction.target else "")
            seconds = size / (MEMORY_SHARE * self.chip.bandwidth)
            yield Item(kind, what, layer=layer, seconds=seconds, bytes=size, **common)

    def _fused(self, instruction: Instruction) -> list[Instruction]:
        """The instructions inside a fusion, and inside those in it."""
        if instruction.opcode != "fusion":
            return []
        found = []
        for name in instruction.called:
            for one in self.module.computations[name].instructions.values():
                found += [one, *self._fused(one)]
        return found

    def _collective(self, computation: Computation, instruction: Instruction) -> tuple[int, float]:
        """(bytes of its full buffer, seconds)."""
        members = group_size(instruction)
        operands = [self._operand(computation, name) for name in instruction.operands]
        given = sum(operand.bytes for operand in operands if operand is not None)
        made = instruction.bytes
        if instruction.opcode.endswith("-start"):
            made = max(0, made - given)  # its results repeat its operands
        size = max(given, made)
        return size, moved_bytes(instruction.opcode, members, size) / (LINK_SHARE * self.chip.link)

    def _operand(self, computation: Computation, name: str) -> Instruction | None:
        """An operand, which inside a fusion is in another computation."""
        if name in computation.instructions:
            return computation.instructions[name]
        for other in self.module.computations.values():
            if name in other.instructions:
                return other.instructions[name]
        return None

    def _kernel(
        self, computation: Computation, instruction: Instruction, name: str
    ) -> tuple[float, float]:
        """(FLOPs, seconds)."""
        flops, share = kernel_work(computation, instruction, name, self.chip.array)
        stated = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        size = int(stated[1]) if stated else self._touched(computation, instruction)
        in_memory = size / (MEMORY_SHARE * self.chip.bandwidth)
        return flops, max(flops / (share * self.chip.flops), in_memory)

    def _touched(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes that an instruction reads and writes."""
        if instruction.opcode != "fusion":
            return _moved(computation, instruction)
        inner = self.module.computations[instruction.called[0]]
        updates = [one for one in inner.instructions.values() if one.opcode == UPDATE]
        read = sum(_read(inner, parameter) for parameter in inner.parameters.values())
        written = sum(inner.operands(one)[1].bytes for one in updates)
        whole = sum(one.bytes for one in updates)
        return read + written + max(0, instruction.bytes - whole)


def _name(instruction: Instruction, attribute: str) -> str:
    return instruction.attribute(attribute).lstrip("%")


def _transferred(computation: Computation, instruction: Instruction) -> int:
    """Bytes that a copy reads from the main memory and writes to it; memory space 1 is a core's own, fast memory.

    The results of an instruction that begins one are its operand, what is copied, and a flag.
    """
    given = sum(operand.bytes for operand in computation.operands(instruction))
    size = instruction.bytes - given - instruction.arrays[-1].bytes
    return size if "S(1)" in instruction.type else 2 * size


def _moved(computation: Computation, instruction: Instruction) -> int:
    """Bytes that an operation reads and writes: of a slice or an update only that part."""
    operands = computation.operands(instruction)
    if instruction.opcode in SLICES:
        return 2 * instruction.bytes
    if instruction.opcode == UPDATE:
        return 2 * operands[1].bytes
    return sum(operand.bytes for operand in operands) + instruction.bytes


def _read(computation: Computation, parameter: Instruction) -> int:
    """Bytes of a parameter that a fusion reads: all, or those of slices, and nothing of what it updates in place."""
    read = 0
    for one in computation.instructions.values():
        if parameter.name not in one.operands:
            continue
        if one.opcode == "bitcast":
            read += _read(computation, one)
        elif one.opcode in SLICES and one.operands[0] == parameter.name:
            read += one.bytes
        elif one.opcode != UPDATE or one.operands[0] != parameter.name:
            return parameter.bytes
    return min(read, parameter.bytes)
