"""Array transfer between the trainer and workers in other processes, through the cluster's object store."""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from digen_jax.distributed.engine import Actor, ProcessDied, RayEngine, Ref
from digen_jax.parallel.mesh import fetch, put
from digen_jax.runtime.array_transfer import (
    ArrayTransfer,
    ConditioningKey,
    Key,
    SamplesKey,
    Shardings,
    TransferError,
    Tree,
)
from digen_jax.scheduling.commands import TRAINER, WeightsVersion

MAILBOX_TIMEOUT = 60.0  # seconds for the mailbox to reply
PIECE = 2**28  # maximum bytes of a stored object


class Slot(NamedTuple):
    """Placeholder of an array in a tree: the concatenation of the next `parts` of the sent arrays.

    `dtype` may be unknown to NumPy, such as bfloat16. `impl` is the implementation of typed PRNG keys, otherwise None.
    """

    shape: tuple[int, ...]
    dtype: str
    impl: str | None
    parts: int


# A tree with a `Slot` per array, followed by pieces (lists of flat arrays).
Packed = list[Any]


def pack(tree: Tree, piece: int = PIECE) -> Packed:
    """Copies a pytree to this host, in a form for other processes. All processes that hold shards must call it.

    Arrays of JAX (including typed PRNG keys) and NumPy are sent in pieces of at most `piece` bytes, and other leaves
    with the structure.
    """
    pieces: list[list[np.ndarray]] = [[]]
    left = piece

    def slot(leaf: Any) -> Any:
        nonlocal left
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        dtype, impl = str(leaf.dtype), None
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            impl, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        array = fetch(leaf) if isinstance(leaf, jax.Array) else leaf
        flat = np.ascontiguousarray(array).reshape(-1)
        if flat.dtype.kind == "V":  # such as bfloat16, which pickle would copy
            flat = flat.view(f"u{flat.itemsize}")
        length = max(1, piece // flat.itemsize)
        parts = [flat[i : i + length] for i in range(0, max(1, flat.size), length)]
        for part in parts:
            if part.nbytes > left:
                pieces.append([])
                left = piece
            pieces[-1].append(part)
            left -= part.nbytes
        return Slot(array.shape, dtype, impl, len(parts))

    return [jax.tree.map(slot, tree), *pieces]


def unpack(packed: Iterable[Any]) -> Tree:
    """Inverse of `pack`, with NumPy arrays (possibly read-only views of stored objects) and typed PRNG keys."""
    structure, *pieces = packed
    arrays = itertools.chain.from_iterable(pieces)

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, Slot):
            return leaf
        parts = list(itertools.islice(arrays, leaf.parts))
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if leaf.impl is not None:
            return jax.random.wrap_key_data(cast(Any, flat.reshape(leaf.shape)), impl=leaf.impl)
        return flat.view(jax.numpy.dtype(leaf.dtype)).reshape(leaf.shape)

    return jax.tree.map(array, structure, is_leaf=lambda leaf: isinstance(leaf, Slot))


def received(stored: Sequence[Any]) -> Tree | None:
    """Unpacks the objects of `TrainerTransfer.stored`: a single `Packed` or None, or the parts of a `Packed`."""
    packed = stored[0] if len(stored) == 1 else stored
    return unpack(packed) if packed else None


def _placed(tree: Tree, shardings: Shardings) -> Tree:
    """Places a host tree on a mesh."""
    arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), tree)
    return jax.block_until_ready(jax.tree.map(put, arrays, shardings(arrays)))


class TreeMissing(RuntimeError):
    """Raised if a call needs a tree of another worker, or embeddings; the argument is the key."""


class WorkerTransfer(ArrayTransfer):
    """Transfer in a worker's process, between its executors and the calls that receive and return trees."""

    def received(self, key: Key) -> Tree | None:
        """Returns a tree on the host that the current call was sent with. Raises TreeMissing if it was not."""
        if key not in self._trees:
            raise TreeMissing(key)
        return self._trees.get(key)

    def get(self, key: Key, shardings: Shardings, receiver: str) -> Tree | None:
        """See `ArrayTransfer`. Raises TreeMissing."""
        tree = self.received(key)
        return None if tree is None else _placed(tree, shardings)

    def packed(self, key: Key) -> Packed | None:
        """Returns a tree in a form for other processes, or None."""
        tree = self._trees.get(key)
        return None if tree is None else pack(tree)


class Mailbox:
    """Object references that the trainer's first process passes to its other ones, until each has fetched them."""

    def __init__(self):
        self._refs: dict[Key, tuple[list[Ref], set[int]]] = {}

    def store(self, key: Key, refs: list[Ref], readers: set[int]) -> None:
        """Stores references for the given process indices; in a list, because Ray would resolve bare arguments."""
        self._refs[key] = refs, readers

    def fetch(self, key: Key, reader: int) -> list[Ref]:
        """Returns the references of a key, once per reader; empty if there are none."""
        refs, readers = self._refs.get(key, ([], set()))
        readers.discard(reader)
        if not readers:
            self._refs.pop(key, None)
        return refs


class Shares(NamedTuple):
    """Index of this process in a multi-process trainer, and the actor with its `Mailbox`."""

    mailbox: Actor
    process: int
    processes: int


class TrainerTransfer(ArrayTransfer):
    """The trainer's transfer: stores weights once for all workers, and fetches samples when they are needed.

    In a multi-process trainer (with `shares`), the first process gets samples from workers and passes them to the
    others.

    Attributes:
      sources: By remote training worker, and of the embedding cache: a function that stores one of its trees.
    """

    def __init__(self, engine: RayEngine, shares: Shares | None = None):
        super().__init__()
        self._engine, self._shares = engine, shares
        self.sources: dict[str, Callable[[Key], Ref]] = {}
        self._refs: dict[Key, Ref] = {}  # trees on workers
        self._gathered: dict[Key, Packed] = {}  # weights of a multi-process trainer
        self._stored: dict[Key, list[Ref]] = {}
        self._lock, self._storing = threading.Lock(), threading.Lock()

    def stored(self, key: Key) -> list[Ref] | None:
        """Returns references to a tree for other workers (see `received`), or None if it is no longer available.

        The first call for a local tree stores it, in parts.
        """
        if (ref := self._ref(key)) is not None:
            return [ref]
        with self._storing:
            if (refs := self._stored.get(key)) is not None:
                return refs
            if self._shares is not None:
                packed = self._gathered.pop(key, None)
            else:
                tree = self.start_read(key, "store")
                try:
                    packed = None if tree is None else pack(tree)
                finally:
                    self.end_read(key, "store")
            if packed is None:
                return None
            refs = [self._engine.put(part) for part in packed]
            with self._lock:
                if key in self._trees:  # else it was dropped meanwhile
                    self._stored[key] = refs
            return refs

    def put_ref(self, key: Key, ref: Ref) -> None:
        """Offers a tree that a worker returned; it stays on the worker's node."""
        with self._lock:
            self._refs[key] = ref

    def put(self, key: Key, tree: Tree) -> None:
        """See `ArrayTransfer`. All trainer processes must put weights in the same order."""
        if self._shares is not None and isinstance(key, WeightsVersion):
            packed = pack(tree)
            if not self._shares.process:
                self._gathered[key] = packed
        super().put(key, tree)

    def get(self, key: Key, shardings: Shardings, receiver: str) -> Tree | None:
        """See `ArrayTransfer`. Raises TransferError if the tree's worker or its node failed."""
        shares = self._shares
        try:
            ref = self._ref(key)
            if ref is None:
                return super().get(key, shardings, receiver)
            packed = self._engine.get(ref)
            if packed is not None and shares is not None and not shares.process:
                others = set(range(1, shares.processes))
                self._mail(shares, "store", _shared(key), [ref], others)
        except ProcessDied as error:
            raise TransferError(f"{key} was lost with its node ({error})") from error
        return None if packed is None else _placed(unpack(packed), shardings)

    def _ref(self, key: Key) -> Ref | None:
        """Returns the reference to a tree of another process, or None if it is local."""
        own = getattr(key, "worker", TRAINER) == TRAINER
        if (shares := self._shares) is not None and shares.process and not own:
            return next(iter(self._mail(shares, "fetch", _shared(key), shares.process)), None)
        found, source = self._refs.get(key), self.sources.get(getattr(key, "worker", TRAINER))
        return source(key) if found is None and source is not None else found

    def _mail(self, shares: Shares, method: str, *arguments: Any) -> Any:
        future = self._engine.call(shares.mailbox, method, *arguments, group="work")
        return future.result(MAILBOX_TIMEOUT)

    def delete(self, key: Key) -> None:
        """See `ArrayTransfer`."""
        super().delete(key)
        self._forget(key)
        if self._shares is not None and self._shares.process and isinstance(key, SamplesKey):
            self._ref(key)  # clears the mailbox if the chunk was dropped before `get`

    def drain(self, key: Key) -> bool:
        """See `ArrayTransfer`."""
        settled = super().drain(key)
        self._forget(key)
        return settled

    def drop_peer(self, worker: str) -> None:
        """See `ArrayTransfer`."""
        super().drop_peer(worker)
        self.sources.pop(worker, None)
        with self._lock:
            for key in [key for key in self._refs if getattr(key, "worker", None) == worker]:
                del self._refs[key]

    def _forget(self, key: Key) -> None:
        with self._lock:
            for trees in (self._refs, self._stored, self._gathered):
                trees.pop(key, None)


def _shared(key: Key) -> Key:
    """Returns the mailbox key. Prompts have one per step: processes may request them from different workers."""
    return ConditioningKey(TRAINER, key.step) if isinstance(key, ConditioningKey) else key
