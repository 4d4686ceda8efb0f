"""Arrays between the trainer and rollout workers in other processes, through the cluster's object store."""

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from digen_jax.distributed.engine import Actor, Engine, Lost, Ref
from digen_jax.engine.hosts import fetch, put
from digen_jax.runtime.link import (
    ConditioningOf,
    Key,
    LinkError,
    LocalLink,
    SamplesOf,
    Shardings,
    Tree,
)
from digen_jax.scheduling.commands import TRAINER, Publication

PATIENCE = 60.0  # seconds in which the mailbox answers
PIECE = 2**28  # bytes of a stored object, at most


class Slot(NamedTuple):
    """The place of an array in a tree: its number among the arrays that are sent, and its type.

    `dtype` is a name that NumPy may not know, such as bfloat16; "key<impl>" stands for typed PRNG keys.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str


class Packed(NamedTuple):
    """A tree for other processes: its structure with a `Slot` for each array, and the arrays in pieces.

    An array that is larger than a piece is divided. Each piece lists (number of the array, part of it, flat).
    """

    structure: Tree
    pieces: list[list[tuple[int, np.ndarray]]]


def pack(tree: Tree, piece: int = PIECE) -> Packed:
    """Copies a tree of arrays to this host, for other processes; all processes that hold parts of it must call.

    Args:
      tree: of JAX and NumPy arrays, typed PRNG keys included; other leaves stay in the structure.
      piece: bytes of a piece, at most.
    """
    arrays: list[np.ndarray] = []

    def slot(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        dtype = str(leaf.dtype)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            dtype, leaf = f"key<{jax.random.key_impl(leaf)}>", jax.random.key_data(leaf)
        array = fetch(leaf) if isinstance(leaf, jax.Array) else leaf
        arrays.append(np.ascontiguousarray(array).reshape(-1))
        if arrays[-1].dtype.kind == "V":  # bfloat16 and others that pickle would copy
            arrays[-1] = arrays[-1].view(f"u{array.dtype.itemsize}")
        return Slot(len(arrays) - 1, array.shape, dtype)

    structure = jax.tree.map(slot, tree)
    pieces: list[list[tuple[int, np.ndarray]]] = [[]]
    left = piece
    for number, array in enumerate(arrays):
        for part in _parts(array, piece):
            if part.nbytes > left:
                pieces.append([])
                left = piece
            pieces[-1].append((number, part))
            left -= part.nbytes
    return Packed(structure, pieces)


def _parts(array: np.ndarray, piece: int) -> Iterable[np.ndarray]:
    if array.nbytes <= piece:
        return [array]
    length = piece // array.itemsize
    return [array[start : start + length] for start in range(0, len(array), length)]


def unpack(packed: Packed) -> Tree:
    """The tree of `pack`, with NumPy arrays, which may be read-only views of stored objects, and typed PRNG keys."""
    parts: dict[int, list[np.ndarray]] = {}
    for number, part in (entry for piece in packed.pieces for entry in piece):
        parts.setdefault(number, []).append(part)

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, Slot):
            return leaf
        found = parts[leaf.number]
        flat = found[0] if len(found) == 1 else np.concatenate(found)
        if leaf.dtype.startswith("key<"):
            impl = leaf.dtype.removeprefix("key<").removesuffix(">")
            return jax.random.wrap_key_data(flat.reshape(leaf.shape), impl=impl)
        return flat.view(jax.numpy.dtype(leaf.dtype)).reshape(leaf.shape)

    return jax.tree.map(array, packed.structure, is_leaf=lambda leaf: isinstance(leaf, Slot))


def placed(tree: Tree, shardings: Shardings) -> Tree:
    """A tree of this host on a mesh."""
    arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), tree)
    return jax.block_until_ready(jax.tree.map(put, arrays, shardings(arrays)))


class WorkerLink:
    """The link of a rollout worker's process: what has arrived in it, and what it hands to the trainer.

    The methods of `worker_process` receive and return trees; the sampling executor takes and offers them here.
    """

    def __init__(self):
        self._trees: dict[Key, Tree] = {}
        self._lock = threading.Lock()

    def offer(self, key: Key, tree: Tree) -> None:
        """See `runtime.link.Link`."""
        with self._lock:
            self._trees[key] = tree

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `runtime.link.Link`."""
        with self._lock:
            tree = self._trees.get(key)
        return None if tree is None else placed(tree, shardings)

    def withdraw(self, key: Key) -> None:
        """See `runtime.link.Link`."""
        self.pop(key)

    def settle(self, key: Key) -> bool:
        """See `runtime.link.Link`."""
        self.pop(key)
        return True

    def give_up(self, worker: str) -> None:
        """See `runtime.link.Link`: it knows no other worker."""

    def pop(self, key: Key) -> Tree | None:
        """Returns a tree that was offered and forgets it; None if there is none."""
        with self._lock:
            return self._trees.pop(key, None)


class Mailbox:
    """Stored objects that the trainer's first process passes on to its other ones, until each has taken them."""

    def __init__(self):
        self._refs: dict[Key, tuple[list[Ref], set[int]]] = {}

    def hold(self, key: Key, refs: list[Ref], readers: set[int]) -> None:
        """Holds objects for processes by their numbers."""
        self._refs[key] = refs, readers

    def held(self, key: Key, reader: int) -> list[Ref]:
        """The objects of a key, which this process does not ask for again; empty if there are none."""
        refs, readers = self._refs.get(key, ([], set()))
        readers.discard(reader)
        if not readers:
            self._refs.pop(key, None)
        return refs


class Shares(NamedTuple):
    """Which of a trainer's processes this one is, and the actor that has their `Mailbox`."""

    mailbox: Actor
    process: int
    processes: int


class TrainerLink:
    """The trainer's link: weights are stored once for all workers, samples are references until they are taken.

    Of a trainer with several processes the first one takes samples from workers, and the others take them from it.

    Args:
      engine: stores.
      shares: None: the trainer has one process.
    """

    def __init__(self, engine: Engine, shares: Shares | None = None):
        self._engine, self._shares = engine, shares
        self._local = LocalLink()  # between the trainer and its assistant
        self._gathered: dict[Publication, Packed] = {}  # of several processes, not yet stored
        self._refs: dict[Key, Ref] = {}  # of trees on workers
        self._stored: dict[Publication, list[Ref]] = {}
        self._offered: set[Key] = set()
        self._lock, self._storing = threading.Lock(), threading.Lock()

    def stored(self, publication: Publication) -> list[Ref] | None:
        """References to a version's structure and pieces, which the first call stores; None if it was dropped."""
        with self._storing:
            with self._lock:
                if publication in self._stored:
                    return self._stored[publication]
            packed = self._pack(publication)
            if packed is None:
                return None
            refs = [self._engine.put(packed.structure), *map(self._engine.put, packed.pieces)]
            with self._lock:
                if publication in self._offered:  # else it was dropped meanwhile
                    self._stored[publication] = refs
        return refs

    def _pack(self, publication: Publication) -> Packed | None:
        if self._shares is not None:
            with self._lock:
                return self._gathered.pop(publication, None)
        tree = self._local.lend(publication, "store")
        try:
            return None if tree is None else pack(tree)
        finally:
            self._local.returned(publication, "store")

    def hold(self, key: Key, ref: Ref) -> None:
        """Offers a tree that a worker has returned, which stays on its node."""
        with self._lock:
            self._refs[key] = ref

    def offer(self, key: Key, tree: Tree) -> None:
        """See `runtime.link.Link`. All processes of the trainer offer weights in the same order."""
        packed = None
        if self._shares is not None and isinstance(key, Publication):
            packed = pack(tree)
        with self._lock:
            self._offered.add(key)
            if packed is not None and not self._shares.process:
                self._gathered[key] = packed
        self._local.offer(key, tree)

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `runtime.link.Link`.

        Raises:
          LinkError: the worker that has it, or its node, is lost.
        """
        try:
            ref = self._ref(key)
            if ref is None:
                return self._local.take(key, shardings, taker)
            packed = self._engine.get(ref)
            if packed is not None and self._shares is not None and not self._shares.process:
                readers = set(range(1, self._shares.processes))
                self._mail("hold", _shared(key), [ref], readers)
        except Lost as error:
            raise LinkError(f"{key} was lost with its node ({error})") from error
        return None if packed is None else placed(unpack(packed), shardings)

    def _ref(self, key: Key) -> Ref | None:
        """The reference to a tree of another process; None if this one has it."""
        if self._shares is not None and self._shares.process and not _is_own(key):
            return next(iter(self._mail("held", _shared(key), self._shares.process)), None)
        with self._lock:
            return self._refs.get(key)

    def _mail(self, method: str, *arguments: Any) -> Any:
        asked = self._engine.call(self._shares.mailbox, method, *arguments, group="work")
        return asked.result(PATIENCE)

    def withdraw(self, key: Key) -> None:
        """See `runtime.link.Link`."""
        self._forget(key)
        self._local.withdraw(key)
        if self._shares is not None and self._shares.process and isinstance(key, SamplesOf):
            self._ref(key)  # a chunk that was dropped before this process has taken it

    def settle(self, key: Key) -> bool:
        """See `runtime.link.Link`."""
        self._forget(key)
        return self._local.settle(key)

    def give_up(self, worker: str) -> None:
        """See `runtime.link.Link`."""
        self._local.give_up(worker)
        with self._lock:
            for key in [key for key in self._refs if getattr(key, "worker", None) == worker]:
                del self._refs[key]

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._offered.discard(key)
            for trees in (self._refs, self._stored, self._gathered):
                trees.pop(key, None)


def _is_own(key: Key) -> bool:
    return isinstance(key, Publication) or key.worker == TRAINER


def _shared(key: Key) -> Key:
    """The mailbox's key. A step's prompts have one key, because the processes may name different workers."""
    return ConditioningOf(TRAINER, key.step) if isinstance(key, ConditioningOf) else key
