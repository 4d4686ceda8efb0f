"""Reports the TPU compiler's cycles in the programs of a config, for tuning the programs.

python tools/tpu_cycles.py --config configs/sd35_medium.py:geneval,4 --topology v5p:2x2x1

It reads the text of the compiled programs, which launch/plan.py also caches. Fusions and copies contain the compiler's
estimate, which is counted once per iteration of their loops. The rest is costed here, conservatively: as if nothing ran
at the same time as anything else.

- A Pallas kernel takes its FLOPs over a share of the peak (`KERNEL_SHARE`, `PACKED_SHARES`), or its bytes over the
  memory bandwidth, whichever is longer. The FLOPs are those that the kernel states; splash attention states none, so
  the FLOPs of its matrix products without any mask are used.
- A collective is a ring over one link in one direction, at `LINK_SHARE` of its bandwidth: an all-gather moves (n - 1)/n
  of its result, a reduce-scatter (n - 1)/n of its input, an all-reduce twice that. All chips of a slice are linked
  directly, also over several hosts; a ring may need more hops than links on a mesh without wrap-around.
- A transfer between memories, and any other operation without an estimate, takes its bytes over `MEMORY_SHARE` of the
  memory bandwidth. For a slice or an update, only that part counts.
"""

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from digen_jax.planning.hardware import GB, Chip
from digen_jax.planning.report import aligned

LINK_SHARE, MEMORY_SHARE, KERNEL_SHARE = 0.8, 0.8, 0.5
# Share of the peak that packed attention reaches, by the rows of the matrix unit and the maximum width of a head.
# The compiler's schedule takes no longer (tests/attention/test_schedules.py).
PACKED_SHARES = {
    "forward": {(128, 64): 0.63, (128, 128): 0.37, (256, 64): 0.44, (256, 128): 0.28},
    "backward": {(128, 64): 0.72, (128, 128): 0.50, (256, 64): 0.61, (256, 128): 0.41},
}
# Matrix products of a splash attention kernel, by its name; each takes 2 b h s_q s_k d FLOPs. "dkv" also computes the
# queries' gradient if it is fused, which the program does not state; otherwise one product too many is counted.
SPLASH = {f"splash_{kind}_{part}": products for kind in ("mha", "mqa")
          for part, products in (("fwd", 2), ("dq", 3), ("dkv", 5))}  # fmt: skip


class Core(NamedTuple):
    """Clock in Hz, and rows and columns of a matrix unit; narrower products do not fill it."""

    clock: float
    array: int


CORES = {
    "v4": Core(1.05e9, 128), "v5e": Core(1.5e9, 128), "v5p": Core(1.75e9, 128), "v6e": Core(1.75e9, 256),
    "tpu7x": Core(2.2e9, 256),
}  # fmt: skip

COMPILER, KERNELS, COLLECTIVES, TRANSFERS, OTHERS = KINDS = (
    "estimated by the compiler", "kernels", "collectives", "transfers between memories", "without an estimate"
)  # fmt: skip
COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-(permute|broadcast))(-start)?$"
)
# Operations that take no time, or whose time is counted for another operation.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "domain", "async-update",
}  # fmt: skip
FREE_CALLS = {
    "AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"
}  # fmt: skip
SLICES, UPDATE = ("dynamic-slice", "slice", "gather"), "dynamic-update-slice"
SAME = ("copy", "bitcast", "convert", "reshape", "opt-barrier", "broadcast", "copy-done")


# -------------------------------------------------------------------------------- the program's text

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_END = re.compile(r"\}(, execution_thread=.*)?$")
_BEGIN = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)


class Array(NamedTuple):
    """Type of one array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes without the padding of its layout."""
        bits = {"pred": 8, "token": 0, "opaque": 0}.get(self.dtype)
        if bits is None:
            bits = int(re.findall(r"\d+", self.dtype)[0])
        return -(-math.prod(self.shape) * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line `name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]  # names; for a constant or a parameter, its number
    attributes: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Array types of the results, with a tuple's elements separately."""
        found = re.findall(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]", self.type)
        return tuple(
            Array(dtype, tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n))
            for dtype, dims in found
        )

    @property
    def bytes(self) -> int:
        """Number of bytes of all results."""
        return sum(array.bytes for array in self.arrays)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, in order."""
        names = []
        for one, several in _CALLED.findall(self.attributes):
            names += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
        return tuple(names)

    def find(self, pattern: str) -> str:
        """Returns the match of a pattern's group in the attributes; "" means no match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> str:
        """Compiler's estimate; "" means that there is none."""
        return self.find(r'"estimated_cycles":"?(-?\d+)')

    @property
    def op_name(self) -> str:
        """Origin in the source, such as jit(f)/while/body/block/dot_general; "" means unknown."""
        return self.find(r'metadata=\{[^{}]*op_name="([^"]*)"')

    @property
    def target(self) -> str:
        """Target of a custom call; "" means that there is none."""
        return self.find(r'custom_call_target="([^"]*)"')

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute without braces or "%"; "" means that there is none."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|%?([^,\s]+))", self.attributes)
        return (found[1] or found[2] or "") if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, one of which is the result."""

    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """Instruction of the result."""
        return next(i for i in reversed(self.instructions.values()) if i.root)

    def source(self, name: str) -> Instruction:
        """Returns the instruction that computes a name's value, skipping copies."""
        found = self.instructions[name]
        while found.opcode in SAME:
            found = self.instructions[found.operands[0]]
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction reads."""
        return [self.instructions[n] for n in instruction.operands if n in self.instructions]


Computations = dict[str, Computation]


def parse(text: str) -> tuple[Computations, str]:
    """Returns the computations of a program by name, and the name of the first one.

    The text is the result of `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: the text has no entry, or a line that is not an instruction.
    """
    computations, entry, name, lines = {}, None, None, list[str]()
    for line in text.splitlines():
        if name is None:
            if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
                name = head[2]
                entry = name if head[1] else entry
        elif _END.match(line):
            instructions = [_instruction(one) for one in lines]
            computations[name] = Computation({i.name: i for i in instructions})
            name, lines = None, []
        elif _BEGIN.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line  # a kernel's metadata can span several lines
    if entry is None:
        raise ValueError("the text holds no program: it has no ENTRY")
    return computations, entry


def _instruction(line: str) -> Instruction:
    begin: Any = _BEGIN.match(line)
    rest = line[begin.end() :]
    kind = next(_split(rest, " "))
    rest = rest[len(kind) :].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if not opcode or not bracket:
        raise ValueError(f"the program has a line that is no instruction: {line.strip()[:200]}")
    rest = rest[len(opcode) :]
    given = next(_split(rest, ","))
    attributes = rest[len(given) :]
    given = re.sub(r"/\*.*?\*/", "", given.strip()[1:-1])
    if opcode in ("constant", "parameter"):
        operands: tuple[str, ...] = (given.strip(),)
    else:
        # The last word of each, because some versions print the type before it.
        parts = (part.split() for part in _split(given, ","))
        operands = tuple(words[-1].lstrip("%") for words in parts if words)
    return Instruction(begin[2], opcode, kind, operands, attributes, bool(begin[1]))


def _split(text: str, separator: str) -> Iterator[str]:
    """Yields the parts between separators outside all brackets."""
    depth = begin = 0
    for found in re.finditer(rf"[()\[\]{{}}{separator}]", text):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
        elif depth == 0:
            yield text[begin : found.start()]
            begin = found.end()
    yield text[begin:]


# ------------------------------------------------------------------------------------------ loops


def trips(computations: Computations, caller: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a `while`. None means that it is unknown.

    The TPU compiler does not state it. JAX's scans count from 0 by 1 while the counter is less than a constant.
    """
    if known := loop.find(r'"known_trip_count":\{"n":"?(\d+)'):
        return int(known)
    condition, body = (computations[loop.attribute(name)] for name in ("condition", "body"))
    start, compare = caller.source(loop.operands[0]), condition.root
    if start.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    if compare.attribute("direction") != "LT":
        return None
    counter, limit = map(condition.source, compare.operands)
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
        return None
    index = int(counter.attribute("index"))
    first, step = caller.source(start.operands[index]), body.source(body.root.operands[index])
    counts = first.operands == ("0",) and step.opcode == "add"
    counts = counts and body.source(step.operands[1]).operands == ("1",)
    return int(limit.operands[0]) if counts else None


# ----------------------------------------------------------------------------------------- layers

# Parts of an operation's name that describe how a layer is run, not which layer it is.
HOW = re.compile(
    r"|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|core_call|custom_(jvp|vjp)_call.*|"
    r"shard_map|scan|(jit|pjit|jvp|vmap|transpose|remat|shmap|checkpoint|custom_vjp|custom_jvp)\(.*\)|\w+\.\w+"
)
# End of a block's name in a list of blocks, or of several blocks that are scanned.
BLOCK = re.compile(r"_\d+(to\d+)?$")


def layer_of(op_name: str) -> str:
    """Returns the modules and the operation in a name, with the direction of the pass.

    jit(f)/transpose(jvp(Net))/while/body/blocks/attn/to_q/dot_general -> blocks/attn/to_q/dot_general (backward)
    """
    parts = _split(op_name.partition(";")[0], "/")
    name = "/".join(part for part in parts if not HOW.fullmatch(part))
    if "rematted_computation" in op_name:
        return f"{name} (forward again)"
    return f"{name} (backward)" if "transpose(" in op_name else name


def module_of(layer: str) -> str:
    """Returns the module of a block that a layer belongs to, without the operation: its first two names.

    blocks_0to12/attn/to_q/dot_general (backward) -> attn/to_q
    """
    parts = layer.partition(" (")[0].split("/")
    inside = next((i + 1 for i, part in enumerate(parts) if BLOCK.search(part)), None)
    if inside is None:
        return "outside of blocks"
    return "/".join(parts[inside:-1][:2]) or "a block itself"


# ------------------------------------------------------------------------------------------ costs


@dataclasses.dataclass(frozen=True)
class Item:
    """Instruction of a program, number of runs, and estimated seconds per run.

    `bytes` are moved by a collective or a transfer, and read and written by another operation.
    """

    kind: str
    what: str  # opcode, or the kernel's name
    name: str
    layer: str
    times: int
    seconds: float
    bytes: int = 0

    @property
    def total(self) -> float:
        """Total seconds of all runs."""
        return self.times * self.seconds


class Cycles:
    """Estimated seconds of a program on one device, as if nothing ran at the same time as anything else.

    Attributes:
      items: All instructions that take time.
      unknown_loops: Names of loops with unknown trip count; their bodies count once.
    """

    def __init__(self, text: str, chip: Chip):
        # Programs for GPUs have no cycles, so that only their collectives are of use.
        self.chip, self.core = chip, CORES.get(chip.name, Core(math.nan, 1))
        self.unknown_loops: set[str] = set()
        self.computations, entry = parse(text)
        self.items = list(self._items(self.computations[entry]))

    def seconds(self, kind: str | None = None) -> float:
        """Returns the seconds of one kind. None means all kinds."""
        return sum(item.total for item in self.items if kind in (None, item.kind))

    def by_what(self, kind: str) -> dict[str, tuple[int, float, float]]:
        """Returns (runs, bytes, seconds) of the items of a kind, by opcode or kernel, the slowest first."""
        found: dict[str, tuple[int, float, float]] = {}
        for item in (one for one in self.items if one.kind == kind):
            runs, moved, seconds = found.get(item.what, (0, 0, 0.0))
            moved += item.times * item.bytes
            found[item.what] = runs + item.times, moved, seconds + item.total
        return dict(sorted(found.items(), key=lambda entry: -entry[1][2]))

    def _items(self, computation: Computation) -> Iterator[Item]:
        for one in computation.instructions.values():
            if one.opcode in FREE or one.opcode.endswith("-done") or one.target in FREE_CALLS:
                continue
            if one.opcode not in ("while", "conditional", "call", "call-start", "async-start"):
                yield from self._leaf(computation, one)
                continue
            inner = [list(self._items(self.computations[name])) for name in one.called]
            if one.opcode == "conditional":
                inner = [max(inner, key=lambda items: sum(item.total for item in items))]
            count: int | None = 1
            if one.opcode == "while":
                count = trips(self.computations, computation, one)
            if count is None:
                self.unknown_loops.add(one.name)
            for item in itertools.chain.from_iterable(inner):
                yield dataclasses.replace(item, times=item.times * (1 if count is None else count))

    def _leaf(self, computation: Computation, one: Instruction) -> Iterator[Item]:
        """Yields the items of an operation; a fusion may be estimated by the compiler and contain collectives."""
        inner = self._fused(one)
        source = next((i for i in inner if i.opcode in ("convolution", "dot")), one)
        layer = layer_of(source.op_name or one.op_name)
        collectives = [i for i in (one, *inner) if COLLECTIVE.match(i.opcode)]
        in_memory = MEMORY_SHARE * self.chip.bandwidth

        def item(kind: str, what: str, seconds: float, size: int = 0, of: str = layer) -> Item:
            return Item(kind, what, one.name, of, 1, seconds, size)

        for each in collectives:
            size, seconds = self._collective(computation, each)
            what = each.opcode.removesuffix("-start")
            yield item(COLLECTIVES, what, seconds, size, layer_of(each.op_name) or layer)
        if one.cycles:
            yield item(COMPILER, one.opcode, int(one.cycles) / self.core.clock)
        elif one.target == "tpu_custom_call":
            name = re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", one.name)
            flops, share = self._kernel(computation, one, name)
            size = int(one.find(r'"bytes_accessed":"?(\d+)') or 0) or _touched(computation, one)
            yield item(KERNELS, name, max(flops / (share * self.chip.flops), size / in_memory))
        elif one.opcode in ("copy-start", "slice-start"):
            # The results are the operand, the copy, and a flag; memory space 1 is a core's fast memory.
            given = sum(operand.bytes for operand in computation.operands(one))
            size = one.bytes - given - one.arrays[-1].bytes
            size *= 1 if "S(1)" in one.type else 2
            yield item(TRANSFERS, one.opcode, size / in_memory, size)
        elif not collectives:
            size = _touched(computation, one)
            yield item(OTHERS, f"{one.opcode} {one.target}".strip(), size / in_memory, size)

    def _fused(self, one: Instruction) -> list[Instruction]:
        """Returns the instructions inside a fusion and its nested fusions."""
        if one.opcode != "fusion":
            return []
        bodies = (self.computations[name].instructions.values() for name in one.called)
        return [each for body in bodies for i in body for each in (i, *self._fused(i))]

    def _collective(self, computation: Computation, one: Instruction) -> tuple[int, float]:
        """Returns (bytes of the full buffer, seconds) of a collective."""
        if one.name not in computation.instructions:  # it is inside a fusion
            every = self.computations.values()
            computation = next(other for other in every if one.name in other.instructions)
        given, made = sum(operand.bytes for operand in computation.operands(one)), one.bytes
        # The results of a start repeat its operands.
        size = max(given, made - given if one.opcode.endswith("-start") else made)
        members = group_size(one.attributes)
        moved = (members - 1) / members * size
        match one.opcode.removesuffix("-start"):
            case "all-reduce":
                moved *= 2
            case "all-to-all" | "ragged-all-to-all":
                moved *= max(1, members / 4)  # the mean distance on a ring
            case "collective-permute" | "collective-broadcast":
                moved = size
        return size, moved / (LINK_SHARE * self.chip.link)

    def _kernel(self, computation: Computation, one: Instruction, name: str) -> tuple[float, float]:
        """Returns (FLOPs of a Pallas kernel, the share of the peak that it reaches); (0, 1) if FLOPs are not stated."""
        array = self.core.array
        arrays = (operand.arrays[0] for operand in computation.operands(one) if operand.arrays)
        factors = [a for a in arrays if len(a.shape) >= 3 and a.dtype in ("bf16", "f32", "f16")]
        # An exact float32 product takes six bfloat16 products.
        passes = 6 if factors and factors[0].dtype == "f32" else 1
        flops = float(one.find(r'"cost_estimate":\{"flops":"?(\d+)') or 0)
        if packed := re.fullmatch(r"attention_(forward|backward)_(\d+)", name):
            width = int(packed[2])
            shares = PACKED_SHARES[packed[1]]
            share = shares[128 if array <= 128 else 256, 64 if width <= 64 else 128]
            return flops, share * min(1.0, width / array) / passes
        products = next((n for prefix, n in SPLASH.items() if name.startswith(prefix)), None)
        if products is None:
            return flops, KERNEL_SHARE if flops else 1.0
        # The first three operands with rows and columns of one width are queries, keys and values.
        queries, keys = factors[0].shape, factors[1].shape
        needed = 2.0 * products * math.prod(queries) * keys[-2]
        return flops or needed, KERNEL_SHARE * min(1.0, queries[-1] / array) / passes


def _touched(computation: Computation, one: Instruction) -> int:
    """Returns the bytes that an instruction reads and writes; for a slice or an update, only that part."""
    operands = computation.operands(one)
    if one.opcode in SLICES:
        return 2 * one.bytes
    if one.opcode == UPDATE:
        return 2 * operands[1].bytes
    return sum(operand.bytes for operand in operands) + one.bytes


def group_size(attributes: str) -> int:
    """Returns the number of devices of a collective; 2 for one between pairs."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        sizes = dict(part.split("=") for part in found[1].replace("'", "").split(","))
        return math.prod(int(sizes[axis.strip(" '")]) for axis in found[2].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(found[1].split(","))
    return 2


# ----------------------------------------------------------------------------------------- report


def report(name: str, found: Cycles, count: int = 10) -> str:
    """Returns the seconds of a program by kind, its collectives, slowest operations and modules of its blocks."""
    everything = found.seconds()
    lines = [f"{name}: {everything:.4g} s, {everything * found.core.clock / 1e9:.4g} G cycles"]
    rows = [["seconds by kind", "runs", "GB", "s"]]
    for kind in KINDS:
        rows.append([kind, "", "", f"{found.seconds(kind):.3g}"])
        for what, (runs, moved, seconds) in found.by_what(kind).items():
            if kind != COMPILER and (seconds >= 1e-3 * everything or kind == COLLECTIVES):
                rows.append([f"  {what}", str(runs), f"{moved / GB:.4g}", f"{seconds:.3g}"])
    lines += [aligned(rows), ""]
    rows = [["slowest operations", "runs", "s", "share", "from"]]
    for item in sorted(found.items, key=lambda item: -item.total)[:count]:
        share = f"{item.total / everything:.1%}"
        rows.append([item.name, str(item.times), f"{item.total:.4g}", share, item.layer])
    lines += [aligned(rows), ""]
    modules: Any = Counter()
    for item in found.items:
        modules[module_of(item.layer)] += item.total
    rows = [["modules of all blocks, all passes", "s", "share"]]
    for module, seconds in modules.most_common(2 * count):
        rows.append([module, f"{seconds:.4g}", f"{seconds / everything:.1%}"])
    unknown = "does not tell how often it runs, and counts once"
    lines += [aligned(rows), *(f"the loop {one} {unknown}" for one in sorted(found.unknown_loops))]
    return "\n".join(lines) + "\n"


def main(config: Any, topology: str) -> None:
    """Compiles the programs of a config for a TPU slice, and prints their cycles."""
    from digen_jax.config.load import load_config
    from digen_jax.errors import ConfigError
    from digen_jax.planning.estimate import open_target, with_published_folder

    loaded = with_published_folder(load_config(config))
    note = functools.partial(print, file=sys.stderr, flush=True)
    target = open_target(topology, loaded.placement.cpu_devices, note)
    if target.chip is None or target.chip.name not in CORES:
        raise ConfigError(f"--topology={topology} is no TPU slice: give one such as v5p:2x2x1")
    for one in target.assess(loaded):
        if one.fits:
            print(report(one.program.name, Cycles(one.compiled.text, target.chip)))


if __name__ == "__main__":
    from absl import flags
    from ml_collections import config_flags

    from digen_jax.config.command_line import run_main

    config_file = functools.partial(config_flags.DEFINE_config_file, lock_config=True)
    CONFIG = config_file("config", None, "A configs/*.py file.")
    TOPOLOGY = flags.DEFINE_string("topology", None, "A TPU slice, such as v5p:2x2x1.")
    flags.mark_flags_as_required(["config", "topology"])
    run_main(lambda: main(CONFIG.value, str(TOPOLOGY.value)))
