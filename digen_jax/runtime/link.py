"""Transfer of arrays between meshes: their owner offers them, the other mesh takes them."""

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from digen_jax.engine.system import resharded
from digen_jax.scheduling.commands import Chunk, Publication

Tree = Any
Shardings = Callable[[Tree], Tree]  # of a tree: the sharding of each of its arrays
# Seconds in which the loss of a process becomes known. Its connections break at once, which may be noticed before.
LOSS = 2.0
# How XLA's errors begin where a program of several processes cannot go on.
STATUS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): "
)

BROKEN = re.compile("UNAVAILABLE|Connection (reset|closed|refused)|Socket closed|Broken pipe")


@dataclasses.dataclass(frozen=True)
class SamplesOf:
    """The key of a chunk's samples for training, on the worker that generated it."""

    worker: str
    chunk: Chunk


@dataclasses.dataclass(frozen=True)
class ConditioningOf:
    """The key of a step's encoded prompts, on a worker that encoded them."""

    worker: str
    step: int


@dataclasses.dataclass(frozen=True)
class ExactOf:
    """The key of published weights as the trainer has them, in their own type: for other training workers."""

    publication: Publication


@dataclasses.dataclass(frozen=True)
class TrainedOf:
    """The key of (the parameters that are trained, the slow copy or None), until the next update."""

    publication: Publication


Key = Publication | ExactOf | TrainedOf | SamplesOf | ConditioningOf


class LinkError(RuntimeError):
    """A tree has not come from another process; its command may be repeated."""


def may_be_a_loss(error: BaseException) -> bool:
    """Whether work has perhaps failed because another process is lost that takes part in it.

    A collective that fails while NumPy reads its result raises a ValueError with XLA's status (jaxlib 0.10.2).
    """
    known = isinstance(error, LinkError | jax.errors.JaxRuntimeError)
    return known or (isinstance(error, ValueError) and STATUS.match(str(error)) is not None)


def connection_broke(error: BaseException) -> bool:
    """Whether work has failed because a connection to another process broke, which says nothing about the work."""
    return may_be_a_loss(error) and BROKEN.search(str(error)) is not None


@runtime_checkable
class Link(Protocol):
    """Moves trees of arrays between meshes. Any thread may call."""

    def offer(self, key: Key, tree: Tree) -> None:
        """Makes a tree available to takers."""

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """The tree on the taker's devices, after the transfer; None if it is no longer offered."""

    def withdraw(self, key: Key) -> None:
        """Ends the offer of a tree; a transfer in progress is completed."""

    def settle(self, key: Key) -> bool:
        """The same, after all transfers of the tree; returns whether its arrays may be overwritten.

        They may not if a taker was given up during its transfer.
        """

    def give_up(self, worker: str) -> None:
        """Nobody waits for this worker any longer: its offers end, arrays that it may be taking are not overwritten."""


class LocalLink:
    """The link within one process: arrays are copied between devices, or stay in place."""

    def __init__(self):
        self._offered: dict[Key, Tree] = {}
        self._taking: list[tuple[Key, str]] = []
        self._hung: set[Key] = set()  # keys of transfers that may never end
        self._changed = threading.Condition()

    def offer(self, key: Key, tree: Tree) -> None:
        """See `Link`."""
        for leaf in jax.tree.leaves(tree):
            # JAX (0.10.2) lists the shards at their first use, and lists each twice for two threads that come at once.
            # Of an array with parts in other processes only copies leave.
            if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                _ = leaf.addressable_shards
        with self._changed:
            self._offered[key] = tree

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `Link`. If the tree already has these shardings, the offered tree itself is returned."""
        tree = self.lend(key, taker)
        if tree is None:
            return None
        try:
            return jax.block_until_ready(resharded(tree, shardings(tree)))
        finally:
            self.returned(key, taker)

    def lend(self, key: Key, taker: str) -> Tree | None:
        """The offered tree, None: it is none; `settle` waits until `returned` was called."""
        with self._changed:
            if key in self._offered:
                self._taking.append((key, taker))
            return self._offered.get(key)

    def returned(self, key: Key, taker: str, hung: bool = False) -> None:
        """A tree's transfer has ended; `hung`: nobody knows whether it has, so that its arrays are not overwritten."""
        with self._changed:
            if (key, taker) in self._taking:  # else it was given up
                self._taking.remove((key, taker))
                self._hung |= {key} if hung else set()
            self._changed.notify_all()

    def withdraw(self, key: Key) -> None:
        """See `Link`."""
        with self._changed:
            self._offered.pop(key, None)

    def settle(self, key: Key) -> bool:
        """See `Link`."""
        with self._changed:
            self._offered.pop(key, None)
            self._changed.wait_for(lambda: all(taken != key for taken, _ in self._taking))
            return key not in self._hung

    def give_up(self, worker: str) -> None:
        """See `Link`."""
        with self._changed:
            self._hung |= {key for key, who in self._taking if who == worker}
            # What a lost mesh has made is made again by another one.
            own = [key for key in self._offered if getattr(key, "worker", None) == worker]
            for key in own:
                del self._offered[key]
            self._taking = [taking for taking in self._taking if taking[1] != worker]
            self._changed.notify_all()
