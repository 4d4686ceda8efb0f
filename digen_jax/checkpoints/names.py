"""Names and layouts: the tensor of a diffusers or transformers file that holds a flax leaf.

Networks use torch's attribute names, so a path is almost a tensor name: `xs_3` is the torch list entry
`xs.3`, `xs_0to12` a scanned run of such entries, whose leaves are stacked along a leading axis. Each
network declares which names are lists, because `linear_1` is an ordinary attribute in diffusers.
"""

import re

Path = tuple[str, ...]

LEAF_NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
# The logical axis along which the leaves of a scanned run are stacked.
LAYERS = "layers"


def tensor_names(path: Path, lists: tuple[str, ...]) -> list[str]:
    """The tensors that hold a leaf: one, or one for each layer of its scanned run.

    ("blocks_0to1", "to_q", "kernel") -> ["blocks.0.to_q.weight", "blocks.1.to_q.weight"].
    """
    names = [""]
    for part in path[:-1]:
        entries = _entries(part, lists)
        if len(names) > 1 and len(entries) > 1:
            raise ValueError(f"{'/'.join(path)} is scanned twice; a leaf can be stacked only once")
        names = [f"{name}{entry}." for name in names for entry in entries]
    return [name + LEAF_NAMES.get(path[-1], path[-1]) for name in names]


def is_scanned(path: Path, lists: tuple[str, ...]) -> bool:
    """Whether the leaf has a leading layer axis."""
    return any((match := _list_entry(part, lists)) and match["last"] for part in path[:-1])


def file_axes(leaf: str, ndim: int) -> tuple[int, ...]:
    """The permutation of axes that brings one layer's leaf into the file's layout.

    A kernel [..., in, out] is the torch weight [out, in, ...]: Dense, and convolutions of any
    dimension (HWIO <-> OIHW, DHWIO <-> OIDHW). Every other leaf keeps its layout.
    """
    if leaf != "kernel" or ndim < 2:
        return tuple(range(ndim))
    return (ndim - 1, ndim - 2, *range(ndim - 2))


def flax_axes(leaf: str, ndim: int) -> tuple[int, ...]:
    """The permutation of axes that brings a file's tensor into the leaf's layout: the inverse of `file_axes`."""
    if leaf != "kernel" or ndim < 2:
        return tuple(range(ndim))
    return (*range(2, ndim), 1, 0)


def file_shape(path: Path, shape: tuple[int, ...], lists: tuple[str, ...]) -> tuple[int, ...]:
    """Shape of each tensor in the file of a leaf with the given (perhaps stacked) shape."""
    if is_scanned(path, lists):
        layers = len(tensor_names(path, lists))
        if shape[:1] != (layers,):
            raise ValueError(
                f"{'/'.join(path)} has shape {list(shape)}, but should stack {layers} layers"
            )
        shape = shape[1:]
    return tuple(shape[axis] for axis in file_axes(path[-1], len(shape)))


def _list_entry(part: str, lists: tuple[str, ...]) -> re.Match | None:
    match = re.fullmatch(r"(?P<name>.+)_(?P<first>\d+)(to(?P<last>\d+))?", part)
    return match if match and match["name"] in lists else None


def _entries(part: str, lists: tuple[str, ...]) -> list[str]:
    """A part of a path in torch's notation: `xs_3` -> xs.3, `xs_0to1` -> xs.0, xs.1."""
    match = _list_entry(part, lists)
    if match is None:
        return [part]
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"the scanned run {part} ends before it begins")
    return [f"{match['name']}.{layer}" for layer in range(first, last + 1)]
