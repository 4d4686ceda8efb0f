"""Where a run stands after some steps, to and from its checkpoints; every process has its share of them."""

import pathlib
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from digen_jax.checkpoint import Checkpointer, template_of
from digen_jax.runtime.executors.driver import Begun
from digen_jax.runtime.hosts import put
from digen_jax.runtime.trainer import State, Trainer


class Position(NamedTuple):
    """Where a run stands after `done` steps."""

    done: int
    state: State
    begun: Begun | None  # what is in flight; None before the first step
    host: dict[str, Any]  # what else a checkpoint needs: places in the prompts and in the metrics


class Positions:
    """The positions that a run's checkpoints hold. In a run of several processes all save and read together."""

    def __init__(self, workdir: pathlib.Path, config: ConfigDict, trainer: Trainer):
        self._seed, self._trainer = config.seed, trainer
        self._checkpoints = Checkpointer(
            workdir / "checkpoints", config.checkpoint.every, config.checkpoint.keep
        )

    def due(self, done: int) -> bool:
        """Whether a position is to be saved after `done` steps."""
        return self._checkpoints.due(done)

    def newest(self, state: State) -> Position | None:
        """The newest one, laid out as `state`, the one before the first step; None where there is none."""
        host = self._checkpoints.latest_host()
        if host is None:
            return None
        versions = [int(version) for version in host["kept"]]
        template = self._arrays(state, dict.fromkeys(versions, state.tuned))
        found = self._checkpoints.restore_latest(template_of(template))
        begun = None
        if host["scheduler"] is not None:
            kept = {version: found.arrays["kept"][str(version)] for version in versions}
            begun = Begun(host["scheduler"], kept)
        state = State(**{name: found.arrays.get(name) for name in State._fields})
        return Position(found.step, state, begun, found.host)

    def save(self, position: Position) -> None:
        """A checkpoint of a position, unless there is one; what the host remembers is the first process's."""
        scheduler, kept = position.begun or (None, {})
        host = position.host | {"scheduler": scheduler, "kept": sorted(kept)}
        self._checkpoints.save(position.done, self._arrays(position.state, kept), host)

    def close(self) -> None:
        """Waits until the last checkpoint is whole."""
        self._checkpoints.close()

    def _arrays(self, state: State, kept: dict[int, Any]) -> dict[str, Any]:
        arrays = {name: tree for name, tree in state._asdict().items() if tree is not None}
        if kept:
            arrays["kept"] = {str(version): tree for version, tree in kept.items()}
        return arrays | {
            "root_key": put(jax.random.key(self._seed), self._trainer.group.replicated)
        }
