"""Training checkpoints, saved and restored collectively by all processes."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.checkpoints.checkpointer import (
    Checkpointer,
    SaveFailed,
    saved_steps,
    steps_done,
    template_of,
    was_saved,
)
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError, DivergedError
from digen_jax.logging.command_log import read_log
from digen_jax.logging.metrics import read_metrics
from digen_jax.parallel.trainer import TrainState
from digen_jax.rewards.errors import RewardError


class InFlight(NamedTuple):
    """Work in flight at the end of a step, saved in addition to the trainer's state."""

    scheduler: dict[str, Any] | None = None  # Scheduler.save(); None before the first step
    # By version (not the newest): weights that started chunks need.
    kept: Mapping[int, Any] = MappingProxyType({})
    layout: str = ""  # config.layout in which the costs were measured


class TrainCheckpoint(NamedTuple):
    """State of a run after `done` steps."""

    done: int
    state: TrainState
    in_flight: InFlight = InFlight()
    # Stream of prompts, position in the metrics.
    host: Mapping[str, Any] = MappingProxyType({})

    def is_intact(self) -> bool:
        """Returns whether no update has consumed its arrays."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))


class CheckpointStore(Checkpointer):
    """Saves and restores the checkpoints of a run. `store` and `newest` are collective calls of all processes.

    Raises:
      ConfigError: Checkpoints exist, but none is complete.
    """

    def __init__(self, workdir: pathlib.Path, config: TrainConfig):
        super().__init__(workdir / "checkpoints", config.checkpoint.every, config.checkpoint.keep)
        self._layout = config.layout

    def newest(self, state: TrainState) -> TrainCheckpoint:
        """Returns the newest checkpoint with the shapes and shardings of the initial state, or that state."""
        host = self.latest_host()
        if host is None:
            return TrainCheckpoint(0, state)
        versions = [int(version) for version in host["kept"]]
        template = template_of(_arrays(state, dict.fromkeys(versions, state.tuned)))
        try:
            found: Any = self.restore_latest(template)
        except ValueError:  # older versions also saved a key, which nothing reads
            mesh = jax.tree.leaves(state.tuned)[0].sharding.mesh
            replicated = NamedSharding(mesh, PartitionSpec())
            key = jax.eval_shape(jax.random.key, 0).update(sharding=replicated)
            found = self.restore_latest(template | {"root_key": key})
        kept = {version: found.arrays["kept"][str(version)] for version in versions}
        in_flight = InFlight(host["scheduler"], kept, host["layout"])
        state = TrainState(**{name: found.arrays.get(name) for name in TrainState._fields})
        return TrainCheckpoint(found.step, state, in_flight, found.host)

    def store(self, checkpoint: TrainCheckpoint) -> None:
        """Saves a checkpoint, unless it exists. Host data is that of the coordinator."""
        scheduler, kept, _ = checkpoint.in_flight
        own = {"scheduler": scheduler, "kept": sorted(kept), "layout": self._layout}
        self.save(checkpoint.done, _arrays(checkpoint.state, kept), {**checkpoint.host, **own})

    def reserve(self, state: TrainState) -> None:
        """Reserves disk space for a checkpoint. Raises SaveFailed if the disk is full."""
        self.reserve_space(_arrays(state, {}))


def _arrays(state: TrainState, kept: Mapping[int, Any]) -> dict[str, Any]:
    arrays = {name: tree for name, tree in state._asdict().items() if tree is not None}
    if kept:
        arrays["kept"] = {str(version): tree for version, tree in kept.items()}
    return arrays


@contextlib.contextmanager
def finishing(checkpoints: CheckpointStore) -> Iterator[None]:
    """Waits for the last checkpoint on exit; adds advice on how to continue to a SaveFailed or a RewardError.

    The block's own exception takes precedence over a save failure.
    """
    try:
        yield
        checkpoints.close()
    except BaseException as error:
        with contextlib.suppress(SaveFailed):
            checkpoints.close()
        if not isinstance(error, SaveFailed | RewardError):
            raise
        steps = checkpoints.steps()
        point = f"after step {steps[-1]}, which is saved" if steps else "from the start"
        advice = f"the same command continues {point}"
        if isinstance(error, SaveFailed):
            raise SaveFailed(f"{error}: free some space, and {advice}") from error
        raise type(error)(f"{error}\n  fix the reward, and {advice}") from error


@contextlib.contextmanager
def divergence_reported(
    checkpoint: TrainCheckpoint, checkpoints: CheckpointStore, config: TrainConfig
) -> Iterator[None]:
    """Converts a DivergedError in the step after a checkpoint to a ConfigError with advice."""
    try:
        yield
    except DivergedError as error:
        done, trainer = checkpoint.done, config.trainer
        # This state is saved on exit unless an update has consumed it.
        saved = [done] if checkpoint.is_intact() else checkpoints.steps()[-1:]
        newest = f"the newest checkpoint is of step {saved[0]}" if saved else "nothing is saved"
        raise ConfigError(
            f"{error} in step {done + 1}: training has diverged; the last good step is {done}, and {newest}. Lower "
            f"config.trainer.learning_rate = {trainer.learning_rate} or config.trainer.clip_norm = "
            f"{trainer.clip_norm}, and start in another workdir"
        ) from error


def check_steps(workdir: pathlib.Path, steps: int) -> None:
    """Raises ConfigError if a workdir's run has already done more than `steps` steps."""
    done = steps_done(workdir / "checkpoints")
    if done > steps:
        raise ConfigError(
            f"config.steps = {steps}, but the run in {workdir} has done {done} steps already: give {done} or more"
        )


def check_records(workdir: pathlib.Path) -> None:
    """Checks that the files of a run can be continued, before any slow work.

    Raises:
      ConfigError: A file is corrupt, or the checkpoints were deleted.
    """
    metrics, folder = workdir / "metrics.jsonl", workdir / "checkpoints"
    lines = read_metrics(metrics) if metrics.exists() else []
    if (workdir / "commands.jsonl").exists():
        read_log(workdir / "commands.jsonl")
    if lines and not saved_steps(folder) and (was_saved(folder) or not folder.exists()):
        done = lines[-1]["step"]
        raise ConfigError(
            f"{workdir} has the metrics of {done} steps, but no checkpoint: restore {folder} to continue, or "
            "choose another workdir to start again"
        )
