"""Positions: the state of a run after some steps, to and from its checkpoints, for every process."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.config.recipe import Recipe
from digen_jax.engine.hosts import put
from digen_jax.engine.trainer import TrainState
from digen_jax.errors import ConfigError
from digen_jax.records.checkpoint import Checkpointer, SaveFailed, template_of, was_saved
from digen_jax.records.checkpoint_folder import saved_steps, steps_done
from digen_jax.records.metrics import read_metrics
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.runtime.driver import Begun
from digen_jax.runtime.log import read_log


class Position(NamedTuple):
    """The state of a run after `done` steps."""

    done: int
    state: TrainState
    begun: Begun | None  # work in flight; None before the first step
    host: dict[str, Any]  # other content of a checkpoint: places in the prompts and in the metrics

    def is_whole(self) -> bool:
        """Whether its arrays still exist: an update consumes them."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))


class Positions:
    """The positions in a run's checkpoints. In a run of several processes all save and read together.

    Raises:
      ConfigError: there are checkpoints, and none is whole.
    """

    def __init__(self, workdir: pathlib.Path, recipe: Recipe):
        self._seed, self._layout = recipe.seed, recipe.layout
        self._checkpoints = Checkpointer(
            workdir / "checkpoints", recipe.checkpoint.every, recipe.checkpoint.keep
        )

    def due(self, done: int) -> bool:
        """Whether the position after `done` steps must be saved."""
        return self._checkpoints.due(done)

    def newest(self, state: TrainState) -> Position | None:
        """The newest position, laid out as `state` (the one before the first step); None if there is none."""
        host = self._checkpoints.latest_host()
        if host is None:
            return None
        versions = [int(version) for version in host["kept"]]
        template = self._arrays(state, dict.fromkeys(versions, state.tuned))
        found = self._checkpoints.restore_latest(template_of(template))
        begun = None
        if host["scheduler"] is not None:
            kept = {version: found.arrays["kept"][str(version)] for version in versions}
            begun = Begun(host["scheduler"], kept, host["layout"])
        state = TrainState(**{name: found.arrays.get(name) for name in TrainState._fields})
        return Position(found.step, state, begun, found.host)

    def save(self, position: Position) -> None:
        """Saves a checkpoint of a position, unless it exists; the host's part is the first process's."""
        scheduler, kept, _ = position.begun or (None, {}, "")
        host = position.host | {
            "scheduler": scheduler,
            "kept": sorted(kept),
            "layout": self._layout,
        }
        self._checkpoints.save(position.done, self._arrays(position.state, kept), host)

    def hold_room(self, state: TrainState) -> None:
        """Reserves the space of a checkpoint; raises SaveFailed if there is none."""
        self._checkpoints.hold_room(self._arrays(state, {}))

    def release_room(self) -> None:
        """Frees the reserved space."""
        self._checkpoints.release_room()

    def check(self) -> None:
        """Raises SaveFailed if a save has failed since the last call."""
        self._checkpoints.check()

    def wait(self) -> None:
        """Waits for the present save; raises SaveFailed if it fails."""
        self._checkpoints.wait()

    def steps(self) -> list[int]:
        """The steps whose positions are saved or being saved, the oldest first."""
        return self._checkpoints.steps()

    def oldest(self) -> int | None:
        """The number of steps before which no position is saved any more; None while even the first is."""
        return self._checkpoints.oldest()

    def close(self) -> None:
        """Waits until the last checkpoint is whole."""
        self._checkpoints.close()

    def _arrays(self, state: TrainState, kept: dict[int, Any]) -> dict[str, Any]:
        arrays = {name: tree for name, tree in state._asdict().items() if tree is not None}
        if kept:
            arrays["kept"] = {str(version): tree for version, tree in kept.items()}
        mesh = jax.tree.leaves(state.tuned)[0].sharding.mesh
        everywhere = NamedSharding(mesh, PartitionSpec())
        return arrays | {"root_key": put(jax.random.key(self._seed), everywhere)}


@contextlib.contextmanager
def finishing(positions: Positions) -> Iterator[None]:
    """Waits for the last checkpoint on exit; adds to an error of the disk or of a reward how to continue.

    The block's own exception takes precedence over a save failure.
    """
    try:
        yield
        positions.close()
    except (SaveFailed, RewardMistake) as error:
        with contextlib.suppress(SaveFailed):
            positions.close()
        steps = positions.steps()
        point = f"after step {steps[-1]}, which is saved" if steps else "from the beginning"
        advice = f"the same command continues {point}"
        if isinstance(error, SaveFailed):
            raise SaveFailed(f"{error}: make room, and {advice}") from error
        raise type(error)(f"{error}\n  fix the reward, and {advice}") from error
    except BaseException:
        with contextlib.suppress(SaveFailed):
            positions.close()
        raise


def check_steps(workdir: pathlib.Path, steps: int) -> None:
    """Raises ConfigError if the run in a workdir has done more steps than its config wants."""
    done = steps_done(workdir / "checkpoints")
    if done > steps:
        raise ConfigError(
            f"config.steps = {steps}, but the run in {workdir} has done {done} steps already: give {done} or more"
        )


def check_records(workdir: pathlib.Path) -> None:
    """Checks before anything slow that the files of a run can be continued.

    Raises:
      ConfigError: A file is damaged, or the checkpoints were deleted, without which the run would start at step 0.
    """
    metrics, folder = workdir / "metrics.jsonl", workdir / "checkpoints"
    lines = read_metrics(metrics) if metrics.exists() else []
    if (workdir / "commands.jsonl").exists():
        read_log(workdir / "commands.jsonl")
    if lines and not saved_steps(folder) and (was_saved(folder) or not folder.exists()):
        done = lines[-1]["step"]
        raise ConfigError(
            f"{workdir} has the metrics of {done} steps, but no checkpoint: bring {folder} back to continue, or choose "
            "another workdir to start again"
        )
