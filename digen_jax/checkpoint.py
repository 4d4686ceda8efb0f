"""What makes a run resumable: checkpoints, and a workdir that has one config and one process.

A checkpoint is saved in the background and counts once orbax has renamed its folder, so a run
killed at any moment, in the middle of a save too, finds the newest whole one.
"""

import fcntl
import json
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from digen_jax.settings import ConfigError


class Restored(NamedTuple):
    """A checkpoint read back: the steps done, the arrays, and what the host had to remember."""

    step: int
    arrays: Any
    host: dict[str, Any]


class Checkpointer:
    """Saves every few steps into a folder, keeps the newest, and restores the last.

    Args:
      folder: where the checkpoints of one run lie, one folder a step; created if need be. What a
        killed save left there is removed, so open it only in the process that trains.
      every: a checkpoint is due after this many steps.
      keep: how many stay; older ones are removed once a newer one is whole.
    """

    def __init__(self, folder: Path | str, every: int, keep: int):
        self.every = every
        self._manager = ocp.CheckpointManager(
            Path(folder).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved once `step` steps are done."""
        return step % self.every == 0

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Copies the arrays and writes them in the background; a step already saved stays as it is.

        Args:
          step: the number of steps done.
          arrays: a tree of arrays, typed PRNG keys too; they may be donated once this returns.
          host: what else the run needs to go on, as JSON: data position, position in the metrics.

        Raises:
          Exception: what went wrong in writing the checkpoint before this one.
        """
        if step == self._manager.latest_step():
            return
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host)
        )
        self._manager.save(step, args=items, force=True)

    def latest_host(self) -> dict[str, Any] | None:
        """What the host had to remember at the newest whole checkpoint, or None."""
        step = self._manager.latest_step()
        if step is None:
            return None
        return self._manager.restore(
            step, args=ocp.args.Composite(host=ocp.args.JsonRestore())
        ).host

    def restore_latest(self, template: Any) -> Restored | None:
        """The newest whole checkpoint on the template's devices, or None where there is none.

        Args:
          template: the tree that was saved, with a `jax.ShapeDtypeStruct` for each array whose
            sharding says where it goes; the mesh need not be the one it was saved from.

        Raises:
          ValueError: the template is another tree, or of other shapes, than the checkpoint.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        items = ocp.args.Composite(
            arrays=ocp.args.StandardRestore(template), host=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=items)
        return Restored(step, restored.arrays, restored.host)

    def close(self) -> None:
        """Waits until the last checkpoint is whole."""
        self._manager.close()


def read_checkpoint(folder: Path | str, template: Any) -> Restored:
    """Reads a part of the newest whole checkpoint, for other programs than the run itself.

    Args:
      folder: a `Checkpointer`'s folder, which is not changed; the run may still be going on.
      template: the wanted branches of the tree that was saved, as in `Checkpointer.restore_latest`.

    Raises:
      FileNotFoundError: there is no whole checkpoint.
      ValueError: the checkpoint lacks a branch of the template, or has it in another shape.
    """
    folder = Path(folder).absolute()
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    if not steps:
        raise FileNotFoundError(f"{folder} has no checkpoint: give the checkpoints folder of a run")
    newest = folder / str(max(steps))
    wanted = ocp.args.PyTreeRestore(
        item=template,
        restore_args=ocp.checkpoint_utils.construct_restore_args(template),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(newest / "arrays", args=wanted)
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        host = reader.restore(newest / "host")
    unread = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree.leaves_with_path(arrays)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if unread:
        raise ValueError(f"checkpoint {newest} has no {unread[0]}: it is of another kind of run")
    return Restored(max(steps), arrays, host)


def template_of(arrays: Any) -> Any:
    """The shapes, dtypes and shardings of a tree of arrays, to restore it where these lie."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def claim_workdir(
    workdir: Path | str, config: dict[str, Any], may_change: Collection[str] = ()
) -> IO[str]:
    """Makes a workdir this process's own and its config the run's, in `workdir`/config.json.

    A run that ended before its first line of metrics has computed nothing, so that another config
    may take its workdir: a mistake that showed late does not need another folder.

    Args:
      workdir: the run's folder, created if need be.
      config: the run's config as a nested dict.
      may_change: dotted names of fields, or groups of them, that a resumed run may have otherwise.

    Returns:
      An open file: the claim ends when it is closed or the process ends, however that comes.

    Raises:
      ConfigError: another process has the workdir, or the run there has another config (the
        sentence names the fields that differ).
    """
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    claim = _lock(workdir)
    try:
        _check_same_config(workdir, config, may_change)
    except ConfigError:
        claim.close()
        raise
    _write_whole(workdir / "config.json", config)
    return claim


def _lock(workdir: Path) -> IO[str]:
    """Locks the workdir by a POSIX record lock, which a process forked later does not inherit."""
    claim = (workdir / ".lock").open("a+")
    try:
        fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        claim.seek(0)
        owner = claim.read().strip()
        claim.close()
        raise ConfigError(
            f"{workdir} is in use by {owner}: wait until that ends, or choose another workdir"
        ) from error
    claim.truncate(0)
    claim.write(f"process {os.getpid()} on {socket.gethostname()}")
    claim.flush()
    return claim


def _check_same_config(workdir: Path, config: dict[str, Any], may_change: Collection[str]) -> None:
    """Compares with the workdir's config.json as JSON sees it: a tuple and a list are the same."""
    path, metrics = workdir / "config.json", workdir / "metrics.jsonl"
    begun = metrics.exists() and metrics.stat().st_size > 0
    if not path.exists() or not begun:
        return
    old, new = _leaves(json.loads(path.read_text())), _leaves(json.loads(json.dumps(config)))
    changes = [
        f"{name}: {_shown(old, name)} -> {_shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, ...) != new.get(name, ...)
        and not any(f"{name}.".startswith(f"config.{free}.") for free in may_change)
    ]
    if changes:
        more = f" and {len(changes) - 6} more" if len(changes) > 6 else ""
        raise ConfigError(
            f"the run in {workdir} has another config ({'; '.join(changes[:6])}{more}): "
            "choose another workdir, or take these changes back"
        )


def _shown(leaves: dict[str, Any], name: str) -> str:
    return json.dumps(leaves[name]) if name in leaves else "not there"


def _leaves(config: dict[str, Any], path: str = "config") -> dict[str, Any]:
    """Dotted names and values of a nested dict; an empty group is a value."""
    leaves = {}
    for name, value in config.items():
        inner = isinstance(value, dict) and value
        leaves |= _leaves(value, f"{path}.{name}") if inner else {f"{path}.{name}": value}
    return leaves


def mark_finished(workdir: Path | str, step: int) -> None:
    """Notes that the run in a workdir has done all its `step` steps and what follows them."""
    _write_whole(Path(workdir) / "finished.json", {"step": step})


def finished_step(workdir: Path | str) -> int | None:
    """The steps after which the run in a workdir finished, or None where it has not."""
    path = Path(workdir) / "finished.json"
    return json.loads(path.read_text())["step"] if path.exists() else None


def _write_whole(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a kill leaves the old file or the new one, never a part."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, path)
