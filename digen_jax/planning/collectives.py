"""Collectives in a program: the devices that they join, and the bytes that they move over a link."""

import math
import re

from digen_jax.planning.hlo import Instruction

OPCODES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
         "ragged-all-to-all", "collective-broadcast")  # fmt: skip


def is_collective(opcode: str) -> bool:
    """Whether it is one, or begins one."""
    return kind_of(opcode) in OPCODES


def kind_of(opcode: str) -> str:
    """Its name without what says that it only begins."""
    return opcode.removesuffix("-start")


def moved_bytes(opcode: str, members: int, size: int) -> float:
    """Bytes that a device sends over one link of a ring.

    Args:
      opcode: what it does.
      members: devices that it joins.
      size: bytes of the larger one of a device's input and result.
    """
    share = (members - 1) / members
    match kind_of(opcode):
        case "all-reduce":
            return 2 * share * size
        case "all-to-all" | "ragged-all-to-all":
            return share * size * max(1, members / 4)  # the mean distance on a ring
        case "collective-permute" | "collective-broadcast":
            return size
    return share * size


def group_size(instruction: Instruction) -> int:
    """How many devices a collective joins; 2 for one between pairs."""
    text = instruction.attributes
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        sizes = dict(part.split("=") for part in found[1].replace("'", "").split(","))
        axes = [axis.strip(" '") for axis in found[2].split(",")]
        return math.prod(int(sizes[axis]) for axis in axes)
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
        return int(found[2])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return len(found[1].split(","))
    return 2
