"""Transfer of arrays between meshes: their owner offers them, the other mesh takes them; weight sync by versions."""

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
# Seconds in which the loss of a process becomes known. Its connections break at once, which may be noticed before.
DISCONNECT_TIMEOUT = 2.0
# How XLA's errors begin where a program of several processes cannot go on.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): "
)
BROKEN = re.compile("UNAVAILABLE|Connection (reset|closed|refused)|Socket closed|Broken pipe")


@dataclasses.dataclass(frozen=True)
class SamplesKey:
    """The key of a chunk's samples for training, on a worker that has them."""

    worker: str
    chunk: Chunk


@dataclasses.dataclass(frozen=True)
class ConditioningKey:
    """The key of a step's encoded prompts, on a worker that has them."""

    worker: str
    step: int


@dataclasses.dataclass(frozen=True)
class ExactWeightsKey:
    """The key of published weights as the trainer has them, in their own type: for other training workers."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class TrainedWeightsKey:
    """The key of (the parameters that are trained, the slow copy or None), until the next update."""

    weights_version: WeightsVersion


@dataclasses.dataclass(frozen=True)
class SumsKey:
    """The key of a training worker's sums of an update, maybe with those of others added."""

    worker: str


Key = WeightsVersion | ExactWeightsKey | TrainedWeightsKey | SamplesKey | ConditioningKey | SumsKey


class TransferError(RuntimeError):
    """A tree did not arrive from another process; its command may be repeated."""


class MissingSums(RuntimeError):
    """An update cannot be made, because a worker, the argument, is lost that has trained a part of it."""


def may_be_disconnect(error: BaseException) -> bool:
    """Whether work has perhaps failed because another process is lost that takes part in it.

    A collective that fails while NumPy reads its result raises a ValueError with XLA's status (jaxlib 0.10.2).
    """
    known = isinstance(error, TransferError | jax.errors.JaxRuntimeError)
    return known or (isinstance(error, ValueError) and STATUS.match(str(error)) is not None)


def is_connection_error(error: BaseException) -> bool:
    """Whether work has failed because a connection to another process broke, which is no failure of the work."""
    return may_be_disconnect(error) and BROKEN.search(str(error)) is not None


class ArrayTransfer:
    """Moves trees of arrays between meshes of one process: they are copied between devices, or stay in place.

    `distributed.transfer` has links with the same methods for workers in other processes. Any thread may call.
    """

    def __init__(self):
        self._offered: dict[Key, Tree] = {}
        self._taking: list[tuple[Key, str]] = []
        self._hung: set[Key] = set()  # keys of transfers that may never end
        self._changed = threading.Condition()

    def put(self, key: Key, tree: Tree) -> None:
        """Makes a tree available to receivers."""
        for leaf in jax.tree.leaves(tree):
            # JAX (0.10.2) lists the shards at their first use, and lists each twice for two threads that come at once.
            # Of an array with parts in other processes only copies leave.
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                _ = leaf.addressable_shards
        with self._changed:
            self._offered[key] = tree

    def get(self, key: Key, shardings: Shardings, receiver: str) -> Tree | None:
        """The tree on the receiver's devices, after the transfer; None if it is no longer offered.

        If the tree already has these shardings, the offered tree itself is returned.
        """
        tree = self.start_read(key, receiver)
        if tree is None:
            return None
        try:
            return jax.block_until_ready(resharded(tree, shardings(tree)))
        finally:
            self.end_read(key, receiver)

    def start_read(self, key: Key, receiver: str) -> Tree | None:
        """The offered tree, or None; `drain` then waits until `end_read` was called."""
        with self._changed:
            if key in self._offered:
                self._taking.append((key, receiver))
            return self._offered.get(key)

    def end_read(self, key: Key, receiver: str) -> None:
        """A tree's transfer has ended."""
        with self._changed:
            if (key, receiver) in self._taking:  # else it was given up
                self._taking.remove((key, receiver))
            self._changed.notify_all()

    def delete(self, key: Key) -> None:
        """Ends the offer of a tree; a transfer in progress is completed."""
        with self._changed:
            self._offered.pop(key, None)

    def drain(self, key: Key) -> bool:
        """The same, after all transfers of the tree; returns whether its arrays may be overwritten.

        They may not if a receiver was given up during its transfer.
        """
        with self._changed:
            self._offered.pop(key, None)
            self._changed.wait_for(lambda: all(taken != key for taken, _ in self._taking))
            return key not in self._hung

    def end_step(self, step: int) -> None:
        """Ends the offers of samples of a step that has ended, and of those before it."""
        for key in list(self._offered):
            if isinstance(key, SamplesKey) and key.chunk.step <= step:
                self.delete(key)

    def drop_peer(self, worker: str) -> None:
        """Ends a worker's offers; `drain` no longer waits for it, and trees that it may be taking stay as they are."""
        with self._changed:
            self._hung |= {key for key, receiver in self._taking if receiver == worker}
            # Other workers generate the chunks of a lost one again.
            for key in [key for key in self._offered if getattr(key, "worker", None) == worker]:
                del self._offered[key]
            self._taking = [taking for taking in self._taking if taking[1] != worker]
            self._changed.notify_all()


class Versions:
    """Published weights that may still be needed, on the trainer mesh; the transfer offers them to the workers.

    The newest ones may be the trainer's own arrays. May be used by several threads.

    Args:
      transfer: The transfer to the workers.
      keep: Whether an update consumes a copy of them, because chunks may still refer to them. Otherwise the
        transfer offers them until the update.
      dtype: Type of the offered weights. None means unchanged.
      exact: Whether they are offered unchanged, too.
    """

    def __init__(self, transfer: ArrayTransfer, keep: bool, dtype: Any = None, exact: bool = False):
        self._transfer, self._keep, self._dtype, self._exact = transfer, keep, dtype, exact
        self._trees: dict[WeightsVersion, Tree] = {}
        self._own: dict[
            WeightsVersion, str
        ] = {}  # the field of the trainer's state with these arrays
        self._lock = threading.Lock()

    def __getitem__(self, weights_version: WeightsVersion) -> Tree:
        return self._trees[weights_version]

    def __contains__(self, weights_version: WeightsVersion) -> bool:
        return weights_version in self._trees

    def add(self, weights_version: WeightsVersion, tree: Tree, own: str | None = None) -> None:
        """Publishes weights; `own`: the field of the trainer's state whose next update consumes these arrays."""
        with self._lock:
            self._trees[weights_version] = tree
            if own is not None:
                self._own[weights_version] = own
        # Rounded once, before any transfer.
        offered = tree if self._dtype is None else cast(tree, self._dtype)
        self._transfer.put(weights_version, offered)
        if self._exact:
            self._transfer.put(ExactWeightsKey(weights_version), tree)

    def drop(self, weights_version: WeightsVersion) -> None:
        """Frees published weights."""
        with self._lock:
            self._trees.pop(weights_version, None)
            self._own.pop(weights_version, None)
        for key in self._keys(weights_version):
            self._transfer.delete(key)

    def to_consume(self, state: TrainState) -> TrainState:
        """The state that an update may consume: published arrays that must be kept are replaced by copies."""
        with self._lock:
            own, self._own = self._own, {}
        copied = {field for weights_version, field in own.items() if self._needed(weights_version)}
        copies = {field: jax.tree.map(jnp.copy, getattr(state, field)) for field in copied}
        return state._replace(**copies)

    def _keys(
        self, weights_version: WeightsVersion
    ) -> tuple[WeightsVersion | ExactWeightsKey, ...]:
        """What the transfer offers of a version."""
        return (
            (weights_version, ExactWeightsKey(weights_version))
            if self._exact
            else (weights_version,)
        )

    def _needed(self, weights_version: WeightsVersion) -> bool:
        """Whether arrays must outlive an update; if not, they are no longer offered."""
        if self._keep:
            return True
        with paused():  # the trainer's deadline: a receiver has its own
            free = all([self._transfer.drain(key) for key in self._keys(weights_version)])
        with self._lock:
            self._trees.pop(weights_version, None)
        return not free
