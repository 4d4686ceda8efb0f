"""How arrays get from one mesh to another: who has them offers them, who needs them takes them."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from digen_jax.engine.system import resharded
from digen_jax.scheduling.commands import Fragment, Publication

Tree = Any
Shardings = Callable[[Tree], Tree]  # of a tree: where each of its arrays is to lie


@dataclasses.dataclass(frozen=True)
class SamplesOf:
    """The key of what is trained of a fragment, on the worker that made it."""

    worker: str
    fragment: Fragment


@dataclasses.dataclass(frozen=True)
class ConditioningOf:
    """The key of a step's encoded prompts, on a worker that encoded them."""

    worker: str
    step: int


Key = Publication | SamplesOf | ConditioningOf


@runtime_checkable
class Link(Protocol):
    """Moves trees of arrays between meshes. Any thread may call."""

    def offer(self, key: Key, tree: Tree) -> None:
        """From now on the tree may be taken."""

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """The tree on the taker's devices, once it is there; None where it is not offered any more."""

    def withdraw(self, key: Key) -> None:
        """Offers a tree no more; whoever is taking it gets it still."""

    def settle(self, key: Key) -> bool:
        """The same, once nobody is taking it; whether its arrays may be overwritten.

        They may not where a taker was given up while it was taking them.
        """

    def give_up(self, taker: str) -> None:
        """Nobody waits for a taker any more; what it is taking may not be overwritten."""


class LocalLink:
    """The link within one process: arrays are copied from device to device, or stay where they lie."""

    def __init__(self):
        self._offered: dict[Key, Tree] = {}
        self._taking: list[tuple[Key, str]] = []
        self._hung: set[Key] = set()  # keys that somebody may be taking for ever
        self._changed = threading.Condition()

    def offer(self, key: Key, tree: Tree) -> None:
        """See `Link`."""
        with self._changed:
            self._offered[key] = tree

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `Link`. Where the tree lies as it should already, it is the one that was offered."""
        with self._changed:
            if key not in self._offered:
                return None
            tree = self._offered[key]
            taking = (key, taker)
            self._taking.append(taking)
        try:
            return jax.block_until_ready(resharded(tree, shardings(tree)))
        finally:
            with self._changed:
                if taking in self._taking:  # else it was given up
                    self._taking.remove(taking)
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

    def give_up(self, taker: str) -> None:
        """See `Link`."""
        with self._changed:
            self._hung |= {key for key, who in self._taking if who == taker}
            self._taking = [taking for taking in self._taking if taking[1] != taker]
            self._changed.notify_all()
