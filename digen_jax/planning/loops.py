"""How often the body of a loop runs: as the compiler says, or from its condition, start and step."""

import dataclasses
from typing import Any

from digen_jax.planning.hlo import Computation, Instruction, Module

SAME = ("copy", "bitcast", "convert", "reshape", "opt-barrier", "broadcast", "copy-done")
DIRECTIONS = {"LT", "LE", "GT", "GE", "NE"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation as it runs: what its parameters are in the frame that called it.

    Attributes:
      computation: the instructions.
      caller: the frame of the call; None: the program's entry.
      call: the instruction of the call.
    """

    computation: Computation
    caller: "Frame | None" = None
    call: Instruction | None = None

    def enter(self, module: Module, call: Instruction, name: str) -> "Frame":
        """The frame of a computation that an instruction of this one runs."""
        return Frame(module.computations[name], self, call)


def trips(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None: neither the compiler nor constants tell.

    Without the compiler's word the condition must compare a counter with a constant, and the body must add
    a constant to the counter, as `lax.scan` and `lax.fori_loop` do.
    """
    if loop.known_trips is not None:
        return loop.known_trips
    condition = frame.enter(module, loop, _named(loop, "condition"))
    body = frame.enter(module, loop, _named(loop, "body"))
    compared = _comparison(module, condition)
    if compared is None:
        return None
    inner, compare = compared
    direction = compare.attribute("direction")
    left, right = (_trace(module, inner, name) for name in compare.operands)
    if isinstance(left, int):
        left, right = right, left
        direction = direction.translate(str.maketrans("LG", "GL"))
    if not isinstance(left, Counter) or not isinstance(right, int) or direction not in DIRECTIONS:
        return None
    step = _step(module, body, left.index)
    start = _start(module, frame, loop, left.index)
    if step is None or start is None:
        return None
    return _count(start + left.added, right, step, direction)


@dataclasses.dataclass(frozen=True)
class Counter:
    """An element of the loop's state at the begin of an iteration, plus a constant."""

    index: int
    added: int = 0


def _named(loop: Instruction, attribute: str) -> str:
    return loop.attribute(attribute).lstrip("%")


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    """Iterations while the counter compares so with the limit."""
    if direction == "NE":
        whole, rest = divmod(limit - start, step) if step else (0, 1)
        return whole if rest == 0 and whole >= 0 else None
    distance = limit - start if direction in ("LT", "LE") else start - limit
    pace = step if direction in ("LT", "LE") else -step
    if pace <= 0:
        return None
    distance += direction in ("LE", "GE")
    return max(0, -(-distance // pace))


def _comparison(module: Module, frame: Frame) -> tuple[Frame, Instruction] | None:
    """The comparison that is the result of a condition, perhaps inside a fusion."""
    root = frame.computation.root
    while root.opcode in ("fusion", "call", *SAME):
        if root.opcode in ("fusion", "call"):
            frame = frame.enter(module, root, root.called[0])
            root = frame.computation.root
        else:
            root = frame.computation.operands(root)[0]
    return (frame, root) if root.opcode == "compare" else None


def _trace(module: Module, frame: Frame, name: str) -> Any:
    """An integer, or the loop's `Counter`, that an instruction gives; None: something else."""
    instruction = frame.computation.instructions[name]
    match instruction.opcode:
        case "constant":
            return _integer(instruction)
        case "add" | "subtract":
            left, right = (_trace(module, frame, each) for each in instruction.operands)
            return _sum(left, right, -1 if instruction.opcode == "subtract" else 1)
        case "parameter" if frame.call is not None and frame.call.opcode in ("fusion", "call"):
            given = frame.call.operands[int(instruction.operands[0])]
            return _trace(module, frame.caller, given)
        case "get-tuple-element":
            return _element(module, frame, instruction)
        case opcode if opcode in SAME:
            return _trace(module, frame, instruction.operands[0])
    return None


def _integer(instruction: Instruction) -> int | None:
    """The value of a whole-number constant of one element."""
    try:
        return int(instruction.operands[0].strip("{} "))
    except ValueError:
        return None


def _sum(left: Any, right: Any, sign: int) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, Counter) and isinstance(right, int):
        return Counter(left.index, left.added + sign * right)
    if isinstance(left, int) and isinstance(right, Counter) and sign > 0:
        return Counter(right.index, right.added + left)
    return None


def _element(module: Module, frame: Frame, instruction: Instruction) -> Any:
    """An element of a tuple; of a loop's state a constant if no iteration changes it, else the counter."""
    index = int(instruction.attribute("index"))
    whole = frame.computation.instructions[instruction.operands[0]]
    if whole.opcode == "tuple":
        return _trace(module, frame, whole.operands[index])
    if whole.opcode == "while":
        if _constant_of_loop(module, frame.enter(module, whole, _named(whole, "body")), index):
            return _start(module, frame, whole, index)
        return None
    if whole.opcode != "parameter" or frame.call is None or frame.call.opcode != "while":
        return None
    body = frame.caller.enter(module, frame.call, _named(frame.call, "body"))
    if _constant_of_loop(module, body, index):
        return _start(module, frame.caller, frame.call, index)
    return Counter(index)


def _constant_of_loop(module: Module, body: Frame, index: int) -> bool:
    """Whether a body hands an element of its state on as it is."""
    root = body.computation.root
    if root.opcode != "tuple":
        return False
    given = body.computation.instructions[root.operands[index]]
    while given.opcode in SAME:
        given = body.computation.operands(given)[0]
    return (
        given.opcode == "get-tuple-element"
        and int(given.attribute("index")) == index
        and body.computation.instructions[given.operands[0]].opcode == "parameter"
    )


def _start(module: Module, frame: Frame, loop: Instruction, index: int) -> int | None:
    """The value of an element of a loop's state before the first iteration."""
    whole = frame.computation.instructions[loop.operands[0]]
    while whole.opcode in SAME:
        whole = frame.computation.operands(whole)[0]
    if whole.opcode != "tuple":
        return None
    found = _trace(module, frame, whole.operands[index])
    return found if isinstance(found, int) else None


def _step(module: Module, body: Frame, index: int) -> int | None:
    """What an iteration adds to an element of the state."""
    root = body.computation.root
    if root.opcode != "tuple":
        return None
    found = _trace(module, body, root.operands[index])
    if found is None:
        found = _through_fusion(module, body, root.operands[index])
    return found.added if isinstance(found, Counter) and found.index == index else None


def _through_fusion(module: Module, body: Frame, name: str) -> Any:
    """The result of a fusion of one result."""
    instruction = body.computation.instructions[name]
    if instruction.opcode not in ("fusion", "call"):
        return None
    inner = body.enter(module, instruction, instruction.called[0])
    return _trace(module, inner, inner.computation.root.name)
