"""How a tree of arrays looks, as JSON: its structure, and the shape and type of every array.

The structure travels with the arrays, and not from the taker's own programs: a fragment's samples depend on the
algorithm, on what is stored and on how many images there are, and a taker need not have the sampler's programs. A node
is a dict, a tuple, a list, None, a text or one of the named tuples that the taker knows by name: nothing else can be
made.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from digen_jax.engine.packing import Endpoints
from digen_jax.engine.sampler import EncodedPrompts
from digen_jax.flow.sampling import Transitions
from digen_jax.rewards import Scores
from digen_jax.rewards.exchanges import Exchange
from digen_jax.runtime.image_statistics import Looks
from digen_jax.runtime.judging import Judged
from digen_jax.runtime.scores import Kept

Tree = Any
Leaf = jax.ShapeDtypeStruct
OWN = (Transitions, Endpoints, EncodedPrompts, Judged, Scores, Exchange, Looks, Kept)
KEYS = ("fry", "rbg", "urbg")  # JAX's own generators, as their types' names have them
TYPES = {
    name: jax.numpy.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}
DEEPEST = 64  # levels


def nodes(tree: Tree, *more: type) -> dict[str, type]:
    """The runtime's named tuples and those in a tree by name, such as a family's conditioning.

    Raises:
      ValueError: two have the same name.
    """
    found: dict[str, type] = {}
    for kind in {*OWN, *_named(tree), *more}:
        if found.setdefault(kind.__name__, kind) is not kind:
            raise ValueError(f"two kinds of nodes are called {kind.__name__}")
    return found


def _named(tree: Tree) -> Iterable[type]:
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        if hasattr(tree, "_fields"):
            yield type(tree)
        for part in tree:
            yield from _named(part)


def write_outline(tree: Tree, known: Mapping[str, type]) -> tuple[str, list[Any]]:
    """(the outline as text, the arrays in its order); typed random keys count as the numbers they are made of.

    Raises:
      ValueError: the tree has a node or a leaf that cannot be sent.
    """
    arrays: list[Any] = []
    return json.dumps(_outlined(tree, known, arrays)), arrays


def _outlined(tree: Tree, known: Mapping[str, type], arrays: list[Any]) -> Any:
    def inside(part: Tree) -> Any:
        return _outlined(part, known, arrays)

    if tree is None:
        return None
    if isinstance(tree, dict):
        if not all(isinstance(name, str) for name in tree):
            raise ValueError("a dict with keys that are no strings cannot be sent")
        # In the order in which JAX goes through it.
        return {"dict": {name: inside(tree[name]) for name in sorted(tree)}}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        name = type(tree).__name__
        if known.get(name) is not type(tree):
            raise ValueError(f"a {name} cannot be sent: it is none of {', '.join(sorted(known))}")
        return {"named": name, "parts": [inside(part) for part in tree]}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [inside(part) for part in tree]}
    if type(tree) in (bool, int, float):
        return {"number": repr(tree), "type": type(tree).__name__}
    if type(tree) is str:
        return {"text": tree}
    return _leaf(tree, arrays)


def _leaf(leaf: Any, arrays: list[Any]) -> dict[str, Any]:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"a {type(leaf).__name__} cannot be sent")
    described: dict[str, Any] = {}
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        described["key"] = leaf.dtype.name.removeprefix("key<").removesuffix(">")
        leaf = jax.random.key_data(leaf)
    if leaf.dtype.name not in TYPES or described.get("key", KEYS[0]) not in KEYS:
        raise ValueError(f"an array of {leaf.dtype.name} cannot be sent")
    arrays.append(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf)
    return {"array": list(leaf.shape), "type": leaf.dtype.name} | described


class Outline:
    """A tree that another process offers, before its arrays are here.

    Attributes:
      raw: the shape and type of every array that is sent.
      tree: the tree with shapes in place of its arrays.
      plain: whether its leaves are those of `raw`, with no keys and no numbers among them.
    """

    def __init__(self, text: str, known: Mapping[str, type]):
        """Reads what `write_outline` wrote.

        Raises:
          ValueError: the text is none, or names a node that is not known.
        """
        self.raw: list[Leaf] = []
        self._keys: list[str | None] = []
        self._known = known
        try:
            self._described = json.loads(text)
            self.tree = self._made(self._described, iter(self._shapes(self._described, 0)))
            self.plain = jax.tree.leaves(self.tree) == self.raw
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"an outline that cannot be read: {error!r}") from error

    def filled(self, arrays: Sequence[Any]) -> Tree:
        """The tree with these arrays, which may be those of `raw` anywhere."""
        typed = [
            array if name is None else jax.random.wrap_key_data(array, impl=_IMPLEMENTATIONS[name])
            for array, name in zip(arrays, self._keys, strict=True)
        ]
        return self._made(self._described, iter(typed))

    def of_arrays(self, tree: Tree) -> list[Any]:
        """Those leaves of a tree of this structure, such as its shardings, that belong to arrays and not to numbers."""
        described, arrays = self._described, iter([True] * len(self.raw))
        is_array = jax.tree.leaves(self._made(described, arrays, number=False))
        pairs = zip(jax.tree.leaves(tree), is_array, strict=True)
        return [leaf for leaf, yes in pairs if yes]

    def _shapes(self, described: Any, depth: int) -> list[Leaf]:
        """The shapes of a part's arrays, which are added to `raw`."""
        if depth > DEEPEST:
            raise ValueError(f"an outline of more than {DEEPEST} levels")
        if described is None or "number" in described:
            return []
        if "text" in described:
            if not isinstance(described["text"], str):
                raise ValueError("a text that is none")
            return []
        if "array" not in described:
            found = described.get("dict")
            parts = found.values() if found is not None else _parts(described)
            return [leaf for part in parts for leaf in self._shapes(part, depth + 1)]
        shape, kind = tuple(map(int, described["array"])), TYPES[described["type"]]
        if min(shape, default=0) < 0:
            raise ValueError(f"an array of shape {shape}")
        self.raw.append(Leaf(shape, kind))
        self._keys.append(name := described.get("key"))
        if name is None:
            return [self.raw[-1]]
        made = jax.eval_shape(
            lambda data: jax.random.wrap_key_data(data, impl=_IMPLEMENTATIONS[name]), self.raw[-1]
        )
        return [made]

    def _made(self, described: Any, leaves: Any, number: Any = None) -> Tree:
        """The tree with these leaves at its arrays; `number`, if given, in place of every number."""
        if described is None:
            return None
        if "array" in described:
            return next(leaves)
        if "number" in described:
            kinds = {"bool": lambda text: text == "True", "int": int, "float": float}
            return kinds[described["type"]](described["number"]) if number is None else number
        if "text" in described:
            return described["text"]
        if "dict" in described:
            return {k: self._made(v, leaves, number) for k, v in described["dict"].items()}
        parts = [self._made(part, leaves, number) for part in _parts(described)]
        if "named" in described:
            return self._known[described["named"]](*parts)
        return parts if "list" in described else tuple(parts)


_IMPLEMENTATIONS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


def _parts(described: dict[str, Any]) -> list[Any]:
    return described[next((name for name in ("parts", "tuple", "list") if name in described), "")]
