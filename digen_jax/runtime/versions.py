"""Published weights that may still be needed, on the trainer mesh."""

import threading
from typing import Any

import jax
import jax.numpy as jnp

from digen_jax.engine.system import rounded
from digen_jax.engine.trainer import TrainState
from digen_jax.runtime.clock import paused
from digen_jax.runtime.link import ExactOf, Link
from digen_jax.scheduling.commands import Publication


class Versions:
    """Published weights by version, which the link offers to the sampling meshes.

    The newest ones may be the trainer's own arrays. With `keep` an update consumes a copy of them, because
    chunks may still refer to them; without it their publication ends at the update. `dtype` is that of
    the offered weights; None: unchanged. `exact`: they are offered unchanged, too. May be used by several threads.
    """

    def __init__(self, link: Link, keep: bool, dtype: Any = None, exact: bool = False):
        self._link, self._keep, self._dtype, self._exact = link, keep, dtype, exact
        self._trees: dict[Publication, Any] = {}
        self._own: dict[Publication, str] = {}  # the field of the trainer's state with these arrays
        self._lock = threading.Lock()

    def __getitem__(self, publication: Publication) -> Any:
        return self._trees[publication]

    def __contains__(self, publication: Publication) -> bool:
        return publication in self._trees

    def add(self, publication: Publication, tree: Any, own: str | None = None) -> None:
        """Publishes weights; `own`: the field of the trainer's state whose next update consumes these arrays."""
        with self._lock:
            self._trees[publication] = tree
            if own is not None:
                self._own[publication] = own
        # Rounded once, before any transfer.
        offered = tree if self._dtype is None else rounded(tree, self._dtype)
        self._link.offer(publication, offered)
        if self._exact:
            self._link.offer(ExactOf(publication), tree)

    def drop(self, publication: Publication) -> None:
        """Frees published weights."""
        with self._lock:
            self._trees.pop(publication, None)
            self._own.pop(publication, None)
        for key in self._keys(publication):
            self._link.withdraw(key)

    def to_consume(self, state: TrainState) -> TrainState:
        """The state that an update may consume: published arrays that must be kept are replaced by copies."""
        with self._lock:
            own, self._own = self._own, {}
        copied = {field for publication, field in own.items() if self._needed(publication)}
        copies = {field: jax.tree.map(jnp.copy, getattr(state, field)) for field in copied}
        return state._replace(**copies)

    def _keys(self, publication: Publication) -> tuple[Publication | ExactOf, ...]:
        """What the link offers of a publication."""
        return (publication, ExactOf(publication)) if self._exact else (publication,)

    def _needed(self, publication: Publication) -> bool:
        """Whether arrays must outlive an update; if not, their publication ends."""
        if self._keep:
            return True
        with paused():  # the trainer's deadline: a taker has its own
            free = all([self._link.settle(key) for key in self._keys(publication)])
        with self._lock:
            self._trees.pop(publication, None)
        return not free
