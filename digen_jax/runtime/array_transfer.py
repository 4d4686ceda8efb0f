"""Transfer of arrays between meshes: a worker makes them available under a key, others get them; weights by version."""

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from digen_jax.parallel.system import cast, resharded
from digen_jax.parallel.trainer import TrainState
from digen_jax.runtime.clock import paused
from digen_jax.scheduling.commands import Chunk, WeightsVersion

Tree = Any
Shardings = Callable[[Tree], Tree]  # of a tree: the sharding of each of its arrays
# Maximum seconds to detect a disconnected process; a broken connection is usually noticed sooner.
DISCONNECT_TIMEOUT = 2.0
# Start of XLA's errors when a program of several processes cannot continue.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): "
)
BROKEN = re.compile("UNAVAILABLE|Connection (reset|closed|refused)|Socket closed|Broken pipe")


@dataclasses.dataclass(frozen=True)
class SamplesKey:
    """A chunk's samples for training, on a worker that has them."""

    worker: str
    chunk: Chunk


@dataclasses.dataclass(frozen=True)
class ConditioningKey:
    """A step's encoded prompts, on a worker that has them."""

    worker: str
    step: int


@dataclasses.dataclass(frozen=True)
class ExactWeightsKey:
    """The weights of a version in the trainer's own type, for other training workers."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class TrainedWeightsKey:
    """(the parameters that are trained, the slow copy or None), until the next update."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class SumsKey:
    """A training worker's sums of an update, possibly with those of others added."""

    worker: str


Key = WeightsVersion | ExactWeightsKey | TrainedWeightsKey | SamplesKey | ConditioningKey | SumsKey


class TransferError(RuntimeError):
    """Arrays did not arrive from another process; the command may be repeated."""


class MissingSums(RuntimeError):
    """An update lacks the sums of a worker that disconnected; the argument is its name."""


def may_be_disconnect(error: BaseException) -> bool:
    """Whether work may have failed because another process that takes part in it disconnected.

    A collective that fails while NumPy reads its result raises a ValueError with XLA's status (jaxlib 0.10.2).
    """
    known = isinstance(error, TransferError | jax.errors.JaxRuntimeError)
    return known or (isinstance(error, ValueError) and STATUS.match(str(error)) is not None)


def is_connection_error(error: BaseException) -> bool:
    """Whether work failed because a connection to another process broke."""
    return may_be_disconnect(error) and BROKEN.search(str(error)) is not None


class ArrayTransfer:
    """Moves trees of arrays between meshes of one process: copies them between devices, or returns them as they are.

    `distributed.transfer` has subclasses for workers in other processes. Any thread may call.
    """

    def __init__(self):
        self._trees: dict[Key, Tree] = {}
        self._reads: list[tuple[Key, str]] = []  # in progress: (key, receiver)
        self._unsafe: set[Key] = set()  # keys whose arrays a removed worker may still read
        self._changed = threading.Condition()

    def put(self, key: Key, tree: Tree) -> None:
        """Makes a tree available to receivers."""
        for leaf in jax.tree.leaves(tree):
            # JAX (0.10.2) lists the shards at their first use, and lists each twice for two threads at the same time.
            # Of an array with parts in other processes only copies are sent.
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                _ = leaf.addressable_shards
        with self._changed:
            self._trees[key] = tree

    def get(self, key: Key, shardings: Shardings, receiver: str) -> Tree | None:
        """Returns the tree on the receiver's devices, or None if it is not available any more.

        If the tree already has these shardings, it is returned itself.
        """
        tree = self.start_read(key, receiver)
        if tree is None:
            return None
        try:
            return jax.block_until_ready(resharded(tree, shardings(tree)))
        finally:
            self.end_read(key, receiver)

    def start_read(self, key: Key, receiver: str) -> Tree | None:
        """Returns the tree itself, or None; `drain` then waits until `end_read` is called."""
        with self._changed:
            if key in self._trees:
                self._reads.append((key, receiver))
            return self._trees.get(key)

    def end_read(self, key: Key, receiver: str) -> None:
        """Ends what `start_read` started."""
        with self._changed:
            if (key, receiver) in self._reads:  # otherwise the receiver was dropped
                self._reads.remove((key, receiver))
            self._changed.notify_all()

    def delete(self, key: Key) -> None:
        """Makes a tree unavailable; a transfer in progress is completed."""
        with self._changed:
            self._trees.pop(key, None)

    def drain(self, key: Key) -> bool:
        """Makes a tree unavailable, and waits for the transfers in progress.

        Returns:
          Whether its arrays may be overwritten; not if a receiver was dropped during its transfer.
        """
        with self._changed:
            self._trees.pop(key, None)
            self._changed.wait_for(lambda: all(read != key for read, _ in self._reads))
            return key not in self._unsafe

    def end_step(self, step: int) -> None:
        """Deletes the samples of a step that has ended, and of those before it."""
        for key in list(self._trees):
            if isinstance(key, SamplesKey) and key.chunk.step <= step:
                self.delete(key)

    def drop_peer(self, worker: str) -> None:
        """Deletes a worker's trees; `drain` no longer waits for its transfers."""
        with self._changed:
            self._unsafe |= {key for key, receiver in self._reads if receiver == worker}
            # Other workers generate its chunks again.
            for key in [key for key in self._trees if getattr(key, "worker", None) == worker]:
                del self._trees[key]
            self._reads = [read for read in self._reads if read[1] != worker]
            self._changed.notify_all()


class SyncedWeights:
    """Weights versions that may still be needed, on the trainer's mesh; available to the workers.

    The newest ones may be the trainer's own arrays. Any thread may call.

    Args:
      transfer: Makes them available.
      keep: Whether an update consumes a copy of them, because chunks may still refer to them. Otherwise they are
        available until the update.
      dtype: Type in which workers get them. None means unchanged.
      exact: Whether they are also available unchanged.
    """

    def __init__(self, transfer: ArrayTransfer, keep: bool, dtype: Any = None, exact: bool = False):
        self._transfer, self._keep, self._dtype, self._exact = transfer, keep, dtype, exact
        self._trees: dict[WeightsVersion, Tree] = {}
        # The field of the trainer's state that has the arrays of a version.
        self._fields: dict[WeightsVersion, str] = {}
        self._lock = threading.Lock()

    def __getitem__(self, weights_version: WeightsVersion) -> Tree:
        return self._trees[weights_version]

    def __contains__(self, weights_version: WeightsVersion) -> bool:
        return weights_version in self._trees

    def add(self, weights_version: WeightsVersion, tree: Tree, field: str | None = None) -> None:
        """Makes weights available. `field` of the trainer's state has the same arrays, which an update consumes."""
        with self._lock:
            self._trees[weights_version] = tree
            if field is not None:
                self._fields[weights_version] = field
        # Rounded once, before any transfer.
        self._transfer.put(
            weights_version, tree if self._dtype is None else cast(tree, self._dtype)
        )
        if self._exact:
            self._transfer.put(ExactWeightsKey(weights_version), tree)

    def drop(self, weights_version: WeightsVersion) -> None:
        """Frees weights."""
        with self._lock:
            self._trees.pop(weights_version, None)
            self._fields.pop(weights_version, None)
        for key in self._keys(weights_version):
            self._transfer.delete(key)

    def to_consume(self, state: TrainState) -> TrainState:
        """Returns a state that an update may consume, with copies of arrays that must outlive it."""
        with self._lock:
            fields, self._fields = self._fields, {}
        copied = {field for version, field in fields.items() if self._outlives_update(version)}
        copies = {field: jax.tree.map(jnp.copy, getattr(state, field)) for field in copied}
        return state._replace(**copies)

    def _keys(self, weights_version: WeightsVersion) -> list[Key]:
        exact = [ExactWeightsKey(weights_version)] if self._exact else []
        return [weights_version, *exact]

    def _outlives_update(self, weights_version: WeightsVersion) -> bool:
        """Whether a version's arrays must outlive an update; if not, they are deleted."""
        if self._keep:
            return True
        with paused():  # the trainer's deadline: a receiver has its own
            free = all([self._transfer.drain(key) for key in self._keys(weights_version)])
        with self._lock:
            self._trees.pop(weights_version, None)
        return not free
