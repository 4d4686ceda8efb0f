"""Checkpoints, from which a run is resumed.

A checkpoint is saved in the background and is valid as soon as orbax has renamed its folder, so a run
that is killed at any moment, even during a save, finds the newest whole one. Before the renaming,
checksums of all files are written into it; a checkpoint that was damaged later, or has none, is not whole.
"""

import contextlib
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from digen_jax.checkpoints.checkpoint_folder import (
    STAMPED,
    Restored,
    newest_whole,
    put_aside,
    unfinished,
)
from digen_jax.checkpoints.checksums import write_checksums
from digen_jax.checkpoints.room import Room
from digen_jax.process import job
from digen_jax.process.shutdown import Stopped

# Reserved beyond the bytes of the arrays: for a checkpoint's other files and for a step's records.
SPARE = 1 << 21
REASON = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Permission denied"
    "|Read-only file system|Input/output error"
)


class SaveFailed(Stopped):
    """A checkpoint could not be written, or there is no space for the next one."""


class Checkpointer:
    """Saves every few steps into a folder, keeps the newest, and restores the newest whole one.

    It reserves the space of one more checkpoint while none is being saved. Next to its folder it leaves a file that
    says that a checkpoint was saved: see `was_saved`.

    Args:
      folder: for the checkpoints of one run, one folder a step; created if needed. Remains of a
        killed save are removed, and damaged checkpoints are renamed, so open it only in the
        process that trains.
      every: a checkpoint is due after this many steps.
      keep: how many stay; older ones are removed as soon as a newer one is whole.

    Raises:
      ConfigError: there are checkpoints, and none is whole.
    """

    def __init__(self, folder: Path | str, every: int, keep: int):
        self.every, self._keep = every, keep
        self._folder = Path(folder).absolute()
        self._newest, damaged = newest_whole(self._folder)
        self._saving: int | None = None  # the step that is being saved, or was saved last
        self._room, self._size = Room(self._folder / "room_for_the_next"), 0
        if job.is_first():
            for step in damaged:
                put_aside(self._folder / str(step))

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Created at its first use, which must be at the same time in all processes of a run."""
        members = job.members() if job.size() > 1 else None
        if members is not None:  # then orbax does not create it
            self._folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                create=members is None,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes=members and set(members),
                    barrier_sync_key_prefix=members and "trainer",
                ),
                max_to_keep=self._keep,
                cleanup_tmp_directories=True,
                # Called in the background by the first process, before the folder gets its name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._note_checksums),
            ),
        )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return step % self.every == 0

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Copies the arrays and writes them in the background; an already saved step is left as it is.

        Args:
          step: the number of steps done.
          arrays: a tree of arrays, typed PRNG keys included; they may be donated after this returns.
          host: what else the run needs to continue, as JSON: data position, position in the metrics.

        Raises:
          SaveFailed: for the checkpoint before this one, or the beginning of this one.
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
        """Notices a save that has failed in the background, and reserves space for the next one after a save.

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
        if self._newest is not None and job.is_first():
            _note(self._folder).touch()

    def hold_room(self, arrays: Any) -> None:
        """Reserves the space of a checkpoint of such arrays, before the first one.

        Raises:
          SaveFailed: there is no space.
        """
        self._size = _bytes_of(arrays)
        self._hold_room()

    def release_room(self) -> None:
        """Frees the reserved space, for a checkpoint or on a full disk."""
        self._room.release()

    def steps(self) -> list[int]:
        """The steps of all checkpoints, including the one that is being saved, the oldest first."""
        return sorted(self._manager.all_steps())

    def oldest(self) -> int | None:
        """The step of the oldest checkpoint; None while there are fewer than `keep`."""
        steps = self.steps()
        return steps[0] if len(steps) >= self._keep else None

    def latest_host(self) -> dict[str, Any] | None:
        """The host's part of the newest whole checkpoint, or None."""
        manager, step = self._manager, self._newest
        if step is None:
            return None
        items = ocp.args.Composite(host=ocp.args.JsonRestore())
        return manager.restore(step, args=items).host

    def restore_latest(self, template: Any) -> Restored | None:
        """The newest whole checkpoint on the template's devices, or None where there is none.

        Args:
          template: the saved tree with a `jax.ShapeDtypeStruct` for each array, whose sharding says
            where the array goes; the mesh may differ from the one that it was saved from.

        Raises:
          ValueError: the template's tree or shapes differ from the checkpoint's.
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
        """Waits until the last checkpoint is whole, and frees the reserved space.

        Raises:
          SaveFailed: the save failed.
        """
        try:
            self.wait()
        finally:
            self.release_room()
            self._manager.close()

    def _note_checksums(self) -> None:
        (written,) = unfinished(self._folder, self._saving)
        write_checksums(written, without=(STAMPED,))

    def _hold_room(self) -> None:
        if not self._size or not job.is_first():
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
        """Removes the remains of a failed save, and raises one sentence that it failed."""
        try:
            yield
        # Orbax and TensorStore raise various errors after a failed write, ValueError and RuntimeError among them.
        except Exception as error:
            for left in unfinished(self._folder, self._saving):
                shutil.rmtree(left, ignore_errors=True)
            self._manager.reload()
            self._newest = max(self.steps(), default=None)
            known = REASON.search(str(error))
            reason = known[0] if known else repr(error).partition("\n")[0]
            raise SaveFailed(
                f"the checkpoint of step {self._saving} could not be saved in {self._folder}: {reason}"
            ) from error


def was_saved(folder: Path) -> bool:
    """Whether a `Checkpointer` has saved a checkpoint into this folder, even if it was deleted since."""
    return _note(folder).exists()


def _note(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}_saved")


def _bytes_of(arrays: Any) -> int:
    """An upper bound of the bytes of a checkpoint of a tree of arrays."""
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    return whole + whole // 20 + SPARE


def template_of(arrays: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, to restore it onto the same devices."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
