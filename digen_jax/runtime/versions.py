"""The published weights that may be asked for still, on the trainer mesh."""

import threading
from typing import Any

import jax
import jax.numpy as jnp

from digen_jax.engine.system import rounded
from digen_jax.engine.trainer import State
from digen_jax.runtime.clock import paused
from digen_jax.runtime.link import Link
from digen_jax.scheduling.commands import Publication


class Versions:
    """Published weights by version, which the link offers to the sampling meshes.

    The newest ones may be the trainer's own arrays. With `keep` an update consumes a copy of them, as
    something may still refer to them; without it they end there. `dtype` is that in which they are offered,
    None: their own. May be used by several threads.
    """

    def __init__(self, link: Link, keep: bool, dtype: Any = None):
        self._link, self._keep, self._dtype = link, keep, dtype
        self._trees: dict[Publication, Any] = {}
        self._own: dict[Publication, str] = {}  # which field of the trainer's state they are
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
        # Rounded once, before anything is sent.
        offered = tree if self._dtype is None else rounded(tree, self._dtype)
        self._link.offer(publication, offered)

    def drop(self, publication: Publication) -> None:
        """Frees published weights."""
        with self._lock:
            self._trees.pop(publication, None)
            self._own.pop(publication, None)
        self._link.withdraw(publication)

    def to_consume(self, state: State) -> State:
        """What an update is to consume in place of the trainer's state, whose arrays may be published."""
        with self._lock:
            own, self._own = self._own, {}
        copied = {field for publication, field in own.items() if self._needed(publication)}
        copies = {field: jax.tree.map(jnp.copy, getattr(state, field)) for field in copied}
        return state._replace(**copies)

    def _needed(self, publication: Publication) -> bool:
        """Whether arrays must outlive an update; if not, they are published no more."""
        if self._keep:
            return True
        with paused():  # the trainer: whoever takes them has a deadline of its own
            overwritten = self._link.settle(publication)
        with self._lock:
            self._trees.pop(publication, None)
        return not overwritten
