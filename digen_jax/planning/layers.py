"""The layer of the network that an operation comes from, by the name that JAX gives it."""

import re

# Parts of a name that say how a layer is run, not which one it is.
HOW = re.compile(
    r"|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|core_call|custom_(jvp|vjp)_call.*|"
    r"shard_map|scan|(jit|pjit|jvp|vmap|transpose|remat|shmap|checkpoint|custom_vjp|custom_jvp)\(.*\)|\w+\.\w+"
)

# The name of a block in a list of blocks, or of several that are scanned.
BLOCK = re.compile(r"_\d+(to\d+)?$")
# What JAX writes into the names of operations that remat runs again.
REPEATED = "rematted_computation"
AGAIN = "(forward again)"


def layer_of(op_name: str) -> str:
    """The modules and the operation in a name, with what the pass does; empty: the name is.

    jit(f)/transpose(jvp(Net))/while/body/blocks/attn/to_q/dot_general -> blocks/attn/to_q/dot_general (backward)
    """
    parts = [part for part in _parts(op_name.partition(";")[0]) if not HOW.fullmatch(part)]
    name = "/".join(parts)
    if REPEATED in op_name:
        return f"{name} {AGAIN}"
    return f"{name} (backward)" if "transpose(" in op_name else name


def module_of(layer: str) -> str:
    """The module of a block that a layer belongs to, without the operation: its first two names.

    blocks_0to12/attn/to_q/dot_general (backward) -> attn/to_q
    """
    parts = layer.partition(" (")[0].split("/")
    inside = next((i + 1 for i, part in enumerate(parts) if BLOCK.search(part)), None)
    if inside is None:
        return "outside of blocks"
    return "/".join(parts[inside:-1][:2]) or "a block itself"


def _parts(op_name: str) -> list[str]:
    """The parts between slashes outside brackets."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(op_name):
        depth += (letter in "([") - (letter in ")]")
        if letter == "/" and depth == 0:
            parts.append(op_name[begin:place])
            begin = place + 1
    return [*parts, op_name[begin:]]
