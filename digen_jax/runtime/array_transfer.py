"""Array transfer between meshes: a worker offers a pytree under a key, others get it. Weights are keyed by version."""

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from digen_jax.parallel.system import cast, resharded
from digen_jax.parallel.trainer import TrainState
from digen_jax.runtime.clock import paused
from digen_jax.scheduling.commands import Chunk, WeightsVersion

Tree = Any
Shardings = Callable[[Tree], Tree]  # maps a tree to the sharding of each of its arrays
# Maximum seconds to detect a disconnected process; a broken connection is usually noticed sooner.
DISCONNECT_TIMEOUT = 2.0
# Prefix of XLA's errors when a multi-process program cannot continue.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): "
)
BROKEN = re.compile("UNAVAILABLE|Connection (reset|closed|refused)|Socket closed|Broken pipe")


@dataclasses.dataclass(frozen=True)
class SamplesKey:
    """Key of a chunk's training samples on a worker."""

    worker: str
    chunk: Chunk


@dataclasses.dataclass(frozen=True)
class ConditioningKey:
    """Key of a step's encoded prompts on a worker."""

    worker: str
    step: int


@dataclasses.dataclass(frozen=True)
class ExactWeightsKey:
    """Key of a version's weights in the trainer's dtype, for other training workers."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class TrainedWeightsKey:
    """Key of (trained parameters, `TrainState.copy` or None), offered until the next update."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class SumsKey:
    """Key of a training worker's gradient sums, possibly reduced with those of others."""

    worker: str


@dataclasses.dataclass(frozen=True)
class EmbeddingsKey:
    """Key of precomputed prompt embeddings, which the driver's process reads from their cache for other workers."""

    prompts: tuple[str, ...]  # `encoding.prompt_key` or `null_prompt_key` of each
    worker: ClassVar[str] = "embedding cache"


WorkersKey = SamplesKey | ConditioningKey | SumsKey
Key = WeightsVersion | ExactWeightsKey | TrainedWeightsKey | WorkersKey | EmbeddingsKey


class TransferError(RuntimeError):
    """Raised if arrays did not arrive from another process; the command can be retried."""


class MissingSums(RuntimeError):
    """Raised if an update lacks the sums of a disconnected worker; the argument is its name."""


def may_be_disconnect(error: BaseException) -> bool:
    """Returns whether work may have failed because another participating process disconnected.

    A collective that fails while NumPy reads its result raises a ValueError with XLA's status (jaxlib 0.10.2).
    """
    known = isinstance(error, TransferError | jax.errors.JaxRuntimeError)
    return known or (isinstance(error, ValueError) and STATUS.match(str(error)) is not None)


def is_connection_error(error: BaseException) -> bool:
    """Returns whether work failed because of a broken connection to another process."""
    return may_be_disconnect(error) and BROKEN.search(str(error)) is not None


class ArrayTransfer:
    """Moves pytrees of arrays between meshes of one process. Copies only if devices or shardings differ.

    `distributed.transfer` has subclasses for workers in other processes. Thread-safe.
    """

    def __init__(self):
        self._trees: dict[Key, Tree] = {}
        self._reads: list[tuple[Key, str]] = []  # (key, receiver) of transfers in progress
        self._unsafe: set[Key] = set()  # keys whose arrays a removed worker may still read
        self._changed = threading.Condition()

    def put(self, key: Key, tree: Tree) -> None:
        """Makes a tree available to receivers."""
        for leaf in jax.tree.leaves(tree):
            # JAX (0.10.2) lists the shards on first use, and lists each twice if two threads race.
            # Arrays that other processes hold shards of are sent as copies.
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                _ = leaf.addressable_shards
        with self._changed:
            self._trees[key] = tree

    def get(self, key: Key, shardings: Shardings, receiver: str) -> Tree | None:
        """Returns the tree with the given shardings, or None if it is no longer available.

        Returns the stored arrays if they already have these shardings.
        """
        tree = self.start_read(key, receiver)
        if tree is None:
            return None
        try:
            return jax.block_until_ready(resharded(tree, shardings(tree)))
        finally:
            self.end_read(key, receiver)

    def start_read(self, key: Key, receiver: str) -> Tree | None:
        """Returns the stored tree, or None. `drain` blocks until `end_read` is called."""
        with self._changed:
            if key in self._trees:
                self._reads.append((key, receiver))
            return self._trees.get(key)

    def end_read(self, key: Key, receiver: str) -> None:
        """Ends a read started by `start_read`."""
        with self._changed:
            if (key, receiver) in self._reads:  # else the receiver was dropped
                self._reads.remove((key, receiver))
            self._changed.notify_all()

    def delete(self, key: Key) -> None:
        """Makes a tree unavailable. Transfers in progress complete."""
        with self._changed:
            self._trees.pop(key, None)

    def drain(self, key: Key) -> bool:
        """Makes a tree unavailable, and waits for transfers in progress.

        Returns:
          Whether its arrays may be overwritten. False if a receiver was dropped during its transfer.
        """
        with self._changed:
            self._trees.pop(key, None)
            self._changed.wait_for(lambda: all(read != key for read, _ in self._reads))
            return key not in self._unsafe

    def end_step(self, step: int) -> None:
        """Deletes the samples of an ended step and of all earlier ones."""
        for key in list(self._trees):
            if isinstance(key, SamplesKey) and key.chunk.step <= step:
                self.delete(key)

    def drop_peer(self, worker: str) -> None:
        """Deletes a worker's trees; `drain` no longer waits for its transfers."""
        with self._changed:
            self._unsafe |= {key for key, receiver in self._reads if receiver == worker}
            # Its chunks are reassigned.
            for key in [key for key in self._trees if getattr(key, "worker", None) == worker]:
                del self._trees[key]
            self._reads = [read for read in self._reads if read[1] != worker]
            self._changed.notify_all()


class SyncedWeights:
    """Weights versions that may still be needed, stored on the trainer's mesh and offered to workers. Thread-safe.

    The newest ones may alias the trainer's state.

    Args:
      transfer: Offers the weights.
      keep: Whether weights outlive the next update, because chunks may still need them. If so, the update consumes a
        copy.
      dtype: Dtype in which workers get them. None means unchanged.
      exact: Whether to also offer them unchanged.
    """

    def __init__(self, transfer: ArrayTransfer, keep: bool, dtype: Any = None, exact: bool = False):
        self._transfer, self._keep, self._dtype, self._exact = transfer, keep, dtype, exact
        self._trees: dict[WeightsVersion, Tree] = {}
        # By version: the field of the trainer's state with the same arrays.
        self._fields: dict[WeightsVersion, str] = {}
        self._lock = threading.Lock()

    def __getitem__(self, weights_version: WeightsVersion) -> Tree:
        return self._trees[weights_version]

    def __contains__(self, weights_version: WeightsVersion) -> bool:
        return weights_version in self._trees

    def add(self, weights_version: WeightsVersion, tree: Tree, field: str | None = None) -> None:
        """Offers weights. `field` names the field of the trainer's state that shares their arrays."""
        with self._lock:
            self._trees[weights_version] = tree
            if field is not None:
                self._fields[weights_version] = field
        # Cast once, before any transfer.
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
        """Returns a state that an update may consume, with copies of the arrays that must outlive it."""
        with self._lock:
            fields, self._fields = self._fields, {}
        copied = {field for version, field in fields.items() if self._outlives_update(version)}
        copies = {field: jax.tree.map(jnp.copy, getattr(state, field)) for field in copied}
        return state._replace(**copies)

    def _keys(self, weights_version: WeightsVersion) -> list[Key]:
        exact = [ExactWeightsKey(weights_version)] if self._exact else []
        return [weights_version, *exact]

    def _outlives_update(self, weights_version: WeightsVersion) -> bool:
        """Returns whether a version's arrays must outlive an update. Deletes them if not."""
        if self._keep:
            return True
        with paused():  # not part of the trainer's deadline: a receiver has its own
            free = all([self._transfer.drain(key) for key in self._keys(weights_version)])
        with self._lock:
            self._trees.pop(weights_version, None)
        return not free
