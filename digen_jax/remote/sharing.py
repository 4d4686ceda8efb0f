"""The links of meshes that several processes share: the first one sends for all, and takes for the trainer's others.

Arrays of such a mesh lie in parts on several hosts. What leaves it is gathered on its first process's host, for which
all its processes must call `offer` in the same order as their other work.
"""

from typing import Any

import jax
import numpy as np

from digen_jax.engine.hosts import fetch, put
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.messages import write_key
from digen_jax.runtime.link import ConditioningOf, Key, LocalLink, Shardings, SharedOf, Tree
from digen_jax.scheduling.commands import TRAINER, Publication


class RolloutLink:
    """A sampling mesh's `Link`: every process takes for itself, the first one offers what was gathered.

    Args:
      link: of this process.
      first: whether this is the mesh's first process.
    """

    def __init__(self, link: RemoteLink, first: bool):
        self._link, self._first = link, first

    def offer(self, key: Key, tree: Tree) -> None:
        """See `Link`."""
        found = gathered(tree)
        if self._first:
            self._link.offer(key, found)

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `Link`; raises LinkError as `RemoteLink.take`."""
        return placed(self._link.fetch(key, taker), shardings)

    def withdraw(self, key: Key) -> None:
        """See `Link`."""
        if self._first:
            self._link.withdraw(key)

    def settle(self, key: Key) -> bool:
        """See `Link`: what is offered are copies."""
        self.withdraw(key)
        return True

    def give_up(self, worker: str) -> None:
        """See `Link`."""
        self._link.give_up(worker)


class TrainerLink:
    """The trainer's `Link`: its first process takes from sampling meshes, and the others from that one.

    Args:
      link: of this process; those of the others know only the first one.
      process: of this one within the mesh.
      processes: of the mesh.
    """

    def __init__(self, link: RemoteLink, process: int, processes: int):
        self._link, self._process = link, process
        self._others = range(1, processes)
        self._here = LocalLink()  # between the trainer and its assistant

    def offer(self, key: Key, tree: Tree) -> None:
        """See `Link`. Published weights leave the mesh, and nothing else does."""
        self._here.offer(key, tree)
        if isinstance(key, Publication):
            found = gathered(tree)
            if not self._process:
                self._link.offer(key, found)

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `Link`; raises LinkError as `RemoteLink.take`.

        What the first process has taken, the others can take next; they must not before.
        """
        if _is_own(key):
            return self._here.take(key, shardings, taker)
        if self._process:
            shared = _shared(key, self._process)
            found = self._link.fetch(shared, f"{TRAINER} {self._process}")
            self._link.withdraw(shared)
            return placed(found, shardings)
        found = self._link.fetch(key, taker)
        if found is not None:
            for other in self._others:
                self._link.offer(_shared(key, other), found)
        return placed(found, shardings)

    def withdraw(self, key: Key) -> None:
        """See `Link`."""
        self._here.withdraw(key)
        if not self._process:
            self._link.withdraw(key)
        elif not _is_own(key):
            self._link.withdraw(_shared(key, self._process))
        if isinstance(key, ConditioningOf) and not self._process:
            for other in self._others:
                self._link.withdraw(_shared(key, other))

    def settle(self, key: Key) -> bool:
        """See `Link`: what has left the mesh are copies."""
        self.withdraw(key)
        return self._here.settle(key)

    def give_up(self, worker: str) -> None:
        """See `Link`."""
        self._here.give_up(worker)
        self._link.give_up(worker)


def _is_own(key: Key) -> bool:
    return isinstance(key, Publication) or key.worker == TRAINER


def _shared(key: Key, process: int) -> SharedOf:
    """What the first process has for another one. Of a step's prompts there is one, whichever mesh encoded them."""
    if isinstance(key, ConditioningOf):
        key = ConditioningOf(TRAINER, key.step)
    return SharedOf(TRAINER, write_key(key), process)


def gathered(tree: Tree) -> Tree:
    """A tree with its arrays whole on this host; all processes that have parts of them must call it."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                fetch(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        return fetch(leaf)

    return jax.tree.map(whole, tree)


def placed(tree: Tree | None, shardings: Shardings) -> Tree | None:
    """A tree of this host on a mesh, of which this process has a part; None stays None."""
    if tree is None:
        return None
    arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), tree)
    return jax.block_until_ready(jax.tree.map(put, arrays, shardings(arrays)))
