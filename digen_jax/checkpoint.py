"""What makes a run resumable: checkpoints.

A checkpoint is saved in the background and counts once orbax has renamed its folder, so a run
killed at any moment, in the middle of a save too, finds the newest whole one. Checksums of all its
files are in it before that; one that was damaged later, or has none, is not whole.
"""

import contextlib
import functools
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from digen_jax.checksums import damage, write_checksums
from digen_jax.ending import Stopped
from digen_jax.room import Room
from digen_jax.settings import ConfigError

# Held beyond the bytes of the arrays: for what else is in a checkpoint, and for a step's other files.
SPARE = 1 << 21
STAMPED = "_CHECKPOINT_METADATA"  # of orbax, which writes the time into it last of all
REASON = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Permission denied"
    "|Read-only file system|Input/output error"
)
# It logs the traceback of whatever it raises.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)


class SaveFailed(Stopped):
    """A checkpoint could not be written, or there is no space for the next one."""


class Restored(NamedTuple):
    """A checkpoint read back: the steps done, the arrays, and what the host had to remember."""

    step: int
    arrays: Any
    host: dict[str, Any]


class Checkpointer:
    """Saves every few steps into a folder, keeps the newest, and restores the newest whole one.

    It holds the space of one more checkpoint while none is being saved.

    Args:
      folder: where the checkpoints of one run lie, one folder a step; created if need be. What a
        killed save left there is removed, and damaged checkpoints are put aside, so open it only in
        the process that trains.
      every: a checkpoint is due after this many steps.
      keep: how many stay; older ones are removed once a newer one is whole.

    Raises:
      ConfigError: there are checkpoints, and none is whole.
    """

    def __init__(self, folder: Path | str, every: int, keep: int):
        self.every, self._keep = every, keep
        self._folder = Path(folder).absolute()
        self._newest, damaged = newest_whole(self._folder)
        self._saving: int | None = None  # the step whose save is under way, or was the last
        self._room, self._size = Room(self._folder / "room_for_the_next"), 0
        if jax.process_index() == 0:
            for step in damaged:
                _put_aside(self._folder / str(step))

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Made when it is first needed, which must be at the same time in all processes of a run."""
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                cleanup_tmp_directories=True,
                # Called in the background by the first process, before the folder gets its name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._note_checksums),
            ),
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
          SaveFailed: the checkpoint before this one, or the beginning of this one.
        """
        self.wait()
        if step == self._manager.latest_step():
            return
        self.release_room()
        self._size = _bytes_of(arrays)
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host)
        )
        self._saving = step
        with self._saved():
            self._manager.save(step, args=items, force=True)
        self._newest = step

    def check(self) -> None:
        """Notices a save that has failed in the background, and holds space for the next one once none is on.

        Raises:
          SaveFailed: it failed and was removed, or there is no space for the next one.
        """
        if not self._manager.is_saving_in_progress():
            self.wait()
            self._hold_room()

    def wait(self) -> None:
        """Waits until the checkpoint that is being saved is whole.

        Raises:
          SaveFailed: it failed and was removed.
        """
        with self._saved():
            self._manager.wait_until_finished()

    def hold_room(self, arrays: Any) -> None:
        """Holds the space of a checkpoint of such arrays, before the first one.

        Raises:
          SaveFailed: there is no space.
        """
        self._size = _bytes_of(arrays)
        self._hold_room()

    def release_room(self) -> None:
        """Gives up the space that is held, for a checkpoint or on a full disk."""
        self._room.release()

    def steps(self) -> list[int]:
        """The checkpoints that there are or will be once the present save is done, the oldest first."""
        return sorted(self._manager.all_steps())

    def oldest(self) -> int | None:
        """The step of the oldest checkpoint, once there are as many as stay; None before."""
        steps = self.steps()
        return steps[0] if len(steps) >= self._keep else None

    def latest_host(self) -> dict[str, Any] | None:
        """What the host had to remember at the newest whole checkpoint, or None."""
        manager, step = self._manager, self._newest
        if step is None:
            return None
        items = ocp.args.Composite(host=ocp.args.JsonRestore())
        return manager.restore(step, args=items).host

    def restore_latest(self, template: Any) -> Restored | None:
        """The newest whole checkpoint on the template's devices, or None where there is none.

        Args:
          template: the tree that was saved, with a `jax.ShapeDtypeStruct` for each array whose
            sharding says where it goes; the mesh need not be the one it was saved from.

        Raises:
          ValueError: the template is another tree, or of other shapes, than the checkpoint.
        """
        manager, step = self._manager, self._newest
        if step is None:
            return None
        items = ocp.args.Composite(
            arrays=ocp.args.StandardRestore(template), host=ocp.args.JsonRestore()
        )
        restored = manager.restore(step, args=items)
        return Restored(step, restored.arrays, restored.host)

    def close(self) -> None:
        """Waits until the last checkpoint is whole, and gives up the space that is held.

        Raises:
          SaveFailed: it failed.
        """
        try:
            self.wait()
        finally:
            self.release_room()
            self._manager.close()

    def _note_checksums(self) -> None:
        (unfinished,) = _unfinished(self._folder, self._saving)
        write_checksums(unfinished, without=(STAMPED,))

    def _hold_room(self) -> None:
        if not self._size or jax.process_index():
            return
        try:
            self._room.hold(self._size)
        except OSError as error:
            raise SaveFailed(
                f"there is no space for the next checkpoint in {self._folder}, which takes up to "
                f"{self._size / 1e6:.0f} MB ({error.strerror})"
            ) from error

    @contextlib.contextmanager
    def _saved(self) -> Iterator[None]:
        """Takes away what a failed save leaves, and says in a sentence that it failed."""
        try:
            yield
        except Exception as error:
            for left in _unfinished(self._folder, self._saving):
                shutil.rmtree(left, ignore_errors=True)
            self._manager.reload()
            self._newest = max(self.steps(), default=None)
            known = REASON.search(str(error))
            reason = known[0] if known else repr(error).partition("\n")[0]
            raise SaveFailed(
                f"the checkpoint of step {self._saving} could not be saved in {self._folder}: {reason}"
            ) from error


def read_checkpoint(folder: Path | str, template: Any) -> Restored:
    """Reads a part of the newest whole checkpoint, for other programs than the run itself.

    Args:
      folder: a `Checkpointer`'s folder, which is not changed; the run may still be going on.
      template: the wanted branches of the tree that was saved, as in `Checkpointer.restore_latest`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ConfigError: there are some, and none is whole.
      ValueError: the checkpoint lacks a branch of the template, or has it in another shape.
    """
    folder = Path(folder).absolute()
    step, _ = newest_whole(folder)
    if step is None:
        raise FileNotFoundError(f"{folder} has no checkpoint: give the checkpoints folder of a run")
    newest = folder / str(step)
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
    return Restored(step, arrays, host)


def newest_whole(folder: Path) -> tuple[int | None, list[int]]:
    """(the newest whole checkpoint's step or None, those after it, which are damaged, as a line says).

    Raises:
      ConfigError: there are checkpoints, and none is whole.
    """
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    damaged = {}
    for step in sorted(steps, reverse=True):
        wrong = damage(folder / str(step)) or _unstamped(folder / str(step))
        if wrong is None:
            for other, why in damaged.items():
                print(f"checkpoint {other} is damaged ({why}): {step} is used", file=sys.stderr)
            return step, list(damaged)
        damaged[step] = wrong
    if damaged:
        each = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise ConfigError(
            f"no checkpoint in {folder} is whole ({each}): put a copy in its place, or delete that "
            "folder to begin from the start"
        )
    return None, []


def _unstamped(checkpoint: Path) -> str | None:
    try:
        json.loads((checkpoint / STAMPED).read_bytes())
    except (OSError, ValueError):
        return f"its {STAMPED} cannot be read"
    return None


def _put_aside(checkpoint: Path) -> None:
    """Renames a damaged checkpoint, so that the step can be saved anew."""
    aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def _unfinished(folder: Path, step: int | None) -> list[Path]:
    """The folders in which orbax is writing a step, or has begun to."""
    return list(folder.glob(f"{step}.orbax-checkpoint-tmp*"))


def _bytes_of(arrays: Any) -> int:
    """Bytes of a checkpoint of a tree of arrays, at most."""
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    return whole + whole // 20 + SPARE


def template_of(arrays: Any) -> Any:
    """The shapes, dtypes and shardings of a tree of arrays, to restore it where these lie."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
