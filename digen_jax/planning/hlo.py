"""The text of a compiled program as computations of instructions, in the form that XLA prints."""

import dataclasses
import functools
import math
import re

# Bits of an element; an unknown type is an error, because its bytes would be wrong.
BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16} | {
    f"{kind}{bits}": bits
    for kind, sizes in {"s": (1, 2, 4, 8, 16, 32, 64), "f": (16, 32, 64)}.items()
    for bits in sizes
}
BITS |= {f"u{bits}": bits for bits in (1, 2, 4, 8, 16, 32, 64)} | {"c64": 64, "c128": 128}

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_END = re.compile(r"\}(, execution_thread=.*)?$")
_BEGIN = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_CYCLES = re.compile(r'"estimated_cycles":"?(-?\d+)')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_OP_NAME = re.compile(r'metadata=\{[^{}]*op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Their number."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Without the padding of its layout.

        Raises:
          ValueError: the type of its elements is unknown.
        """
        return -(-self.elements * element_bits(self.dtype) // 8)


def element_bits(dtype: str) -> int:
    """Bits of an element; ValueError for an unknown type."""
    if dtype.startswith("f8"):
        return 8
    if dtype.startswith("f4"):
        return 4
    if dtype not in BITS:
        raise ValueError(f"the program has elements of an unknown type, {dtype}")
    return BITS[dtype]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line `name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]  # names; of a constant or a parameter, its number
    attributes: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The results, a tuple's one by one."""
        found = _SHAPE.findall(self.type)
        return tuple(
            Array(dtype, tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n))
            for dtype, dims in found
        )

    @property
    def bytes(self) -> int:
        """Of all results."""
        return sum(array.bytes for array in self.arrays)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, in their order."""
        names = []
        for one, several in _CALLED.findall(self.attributes):
            names += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
        return tuple(names)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate; None: it gives none."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def known_trips(self) -> int | None:
        """How often a loop's body runs, if the compiler says so."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """Where it comes from, such as jit(f)/while/body/block/dot_general; empty: unknown."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """The text of an attribute without braces or with one pair of them; empty: there is none."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|([^,\s]+))", self.attributes)
        return (found[1] or found[2] or "") if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, one of which is its result."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """Its result."""
        return next(i for i in reversed(self.instructions.values()) if i.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By their numbers."""
        return {
            int(i.operands[0]): i for i in self.instructions.values() if i.opcode == "parameter"
        }

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results an instruction reads."""
        return [
            self.instructions[name] for name in instruction.operands if name in self.instructions
        ]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and the one that it begins with."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Reads the text of a module, as `jax.stages.Compiled.as_text()` gives it.

    Raises:
      ValueError: it has no entry, or a line that is no instruction.
    """
    computations, entry, name, lines = {}, None, None, []
    for line in text.splitlines():
        if name is None:
            if head := _head(line):
                name, first = head
                entry = name if first else entry
        elif _END.match(line):
            instructions = [_instruction(one) for one in lines]
            computations[name] = Computation(name, {i.name: i for i in instructions})
            name, lines = None, []
        elif _BEGIN.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line  # a kernel's metadata spans several lines
    if entry is None:
        raise ValueError("the text holds no program: it has no ENTRY")
    return Module(computations, entry)


def _head(line: str) -> tuple[str, bool] | None:
    """(name, whether it is the entry) of the first line of a computation."""
    found = None if line.startswith("HloModule") else _HEAD.match(line)
    return (found[2], bool(found[1])) if found else None


def _instruction(line: str) -> Instruction:
    begin = _BEGIN.match(line)
    rest = line[begin.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 1:
        raise ValueError(f"the program has a line that is no instruction: {line.strip()[:200]}")
    closing = _closing(rest, opening)
    given = re.sub(r"/\*.*?\*/", "", rest[opening + 1 : closing])
    opcode = rest[:opening]
    if opcode in ("constant", "parameter"):
        operands = (given.strip(),)
    else:
        # The last word of each, because some versions print its type in front of it.
        operands = tuple(part.split()[-1].lstrip("%") for part in _split(given))
    return Instruction(begin[2], opcode, kind, operands, rest[closing + 1 :], bool(begin[1]))


def _closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` is closed."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"the program has a line whose brackets do not close: {text[:200]}")


def _split(text: str) -> list[str]:
    """The parts between commas outside all brackets."""
    parts, depth, begin = [], 0, 0
    for found in re.finditer(r"[()\[\]{},]", text):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[begin : found.start()])
            begin = found.end()
    parts.append(text[begin:])
    return [part for part in parts if part.strip()]
