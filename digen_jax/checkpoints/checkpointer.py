"""Asynchronous orbax checkpoints, verified by checksums, with reserved disk space for the next one.

Orbax commits a checkpoint by renaming its folder, so a run that is killed at any time, even during a save, resumes from
the newest complete one. Orbax does not detect all corrupted files, so the checksums of all files are written into the
folder before the rename. A checkpoint with wrong or missing checksums is damaged.

The checksums are CRC-32, which detects corruption but not tampering. They take about 1 s per GB and core.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from digen_jax.errors import ConfigError
from digen_jax.files import parse_json
from digen_jax.process import job
from digen_jax.process.shutdown import Stopped

STAMPED = "_CHECKPOINT_METADATA"  # orbax's file, finalized with a timestamp at the very end
CHECKSUMS = "checksums.json"
CHUNK = 1 << 22  # bytes per read for a checksum
THREADS = 4
FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk or an exceeded quota
# Bytes reserved in addition to the arrays, for other checkpoint files and a step's records.
SPARE = 1 << 21
REASON = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Permission denied"
    "|Read-only file system|Input/output error"
)

# Orbax logs a traceback for every error that it raises.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
# Orbax awaits only the first error of a failed save; asyncio logs all others, hundreds on a full disk.
LATE = re.compile(r"exception was never retrieved[\s\S]*(orbax|OCDBT|tensorstore)")
logging.getLogger("asyncio").addFilter(lambda record: not LATE.search(record.getMessage()))


def _print_unraisable(error: Any) -> None:
    """Suppresses exceptions of TensorStore's threads after a failed save, whose event loop is closed."""
    if not (error.exc_type is RuntimeError and str(error.exc_value) == "Event loop is closed"):
        _printing(error)


_printing, sys.unraisablehook = sys.unraisablehook, _print_unraisable


class SaveFailed(Stopped):
    """Raised if a checkpoint cannot be written, or there is no space for the next one."""


class Restored(NamedTuple):
    """A restored checkpoint: step, arrays, and host state."""

    step: int
    arrays: Any
    host: dict[str, Any]


class Checkpointer:
    """Saves checkpoints to a folder, keeps the newest ones, and restores the newest complete one.

    Disk space for one more checkpoint is reserved while no save is in progress. A file next to the folder records that
    a checkpoint was saved: see `was_saved`.

    Args:
      folder: Checkpoint folder of one run, with a subfolder per step; created if needed. Partial saves are removed and
        damaged checkpoints are renamed, so only the training process may open it.
      every: Number of steps between checkpoints.
      keep: Number of checkpoints to keep; older ones are removed when a newer one is complete.

    Raises:
      ConfigError: There are checkpoints, but none is complete.
    """

    def __init__(self, folder: Path | str, every: int, keep: int):
        self.every, self._keep = every, keep
        self._folder = Path(folder).absolute()
        self._newest, damaged = newest_complete(self._folder)
        self._saving: int | None = None  # step of the save in progress, or of the last save
        self._reserved = self._folder / "room_for_the_next"  # a file that occupies the space
        self._size = 0
        if job.is_first():
            for step in damaged:  # so that the step can be saved again
                aside = self._folder / f"damaged_{step}"
                shutil.rmtree(aside, ignore_errors=True)
                (self._folder / str(step)).rename(aside)

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax manager, created on first use, which must be simultaneous in all processes of a run."""
        members = job.members() if job.size() > 1 else None
        if members is not None:  # orbax does not create it in this case
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
                # Called in the background by the first process, before the rename.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._add_checksums),
            ),
        )

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step` steps."""
        return step % self.every == 0

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Copies the arrays of a step and writes them in the background. No-op for a step that is already saved.

        The arrays, including typed PRNG keys, may be donated after this returns. `host` is the remaining state of the
        run as JSON: positions in the data and in the metrics.

        Raises:
          SaveFailed: The previous save failed, or this one could not start.
        """
        self.wait()
        if step == self._manager.latest_step():
            return
        self.release_space()
        self._size = _bytes_of(arrays)
        items = dict(arrays=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(host))
        self._saving = step
        with self._report_failure():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._newest = step

    def check(self) -> None:
        """Detects a failed background save. After a successful one, reserves space for the next.

        Raises:
          SaveFailed: The save failed and was removed, or there is no space for the next one.
        """
        if not self._manager.is_saving_in_progress():
            self.wait()
            self._reserve()

    def wait(self) -> None:
        """Waits until the save in progress is complete. Raises SaveFailed if it failed and was removed."""
        with self._report_failure():
            self._manager.wait_until_finished()
        if self._newest is not None and job.is_first():
            _note(self._folder).touch()

    def reserve_space(self, arrays: Any) -> None:
        """Reserves disk space for the first checkpoint of such arrays. Raises SaveFailed if there is none."""
        self._size = _bytes_of(arrays)
        self._reserve()

    def release_space(self) -> None:
        """Frees the reserved disk space, for a checkpoint or on a full disk."""
        self._reserved.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, including the save in progress, in ascending order."""
        return sorted(self._manager.all_steps())

    def oldest(self) -> int | None:
        """Returns the step of the oldest checkpoint, or None if there are fewer than `keep`."""
        steps = self.steps()
        return steps[0] if len(steps) >= self._keep else None

    def latest_host(self) -> dict[str, Any] | None:
        """Returns the host state of the newest complete checkpoint, or None if there is none."""
        manager, step = self._manager, self._newest  # all processes must create the manager
        items = ocp.args.Composite(host=ocp.args.JsonRestore())
        return None if step is None else manager.restore(step, args=items).host

    def restore_latest(self, template: Any) -> Restored | None:
        """Restores the newest complete checkpoint onto the template's devices. Returns None if there is none.

        The template is the saved tree as `jax.ShapeDtypeStruct` with shardings of any mesh.

        Raises:
          ValueError: The template's tree or shapes differ from the checkpoint's.
        """
        manager, step = self._manager, self._newest
        if step is None:
            return None
        items = dict(arrays=ocp.args.StandardRestore(template), host=ocp.args.JsonRestore())
        restored = manager.restore(step, args=ocp.args.Composite(**items))
        return Restored(step, restored.arrays, restored.host)

    def close(self) -> None:
        """Waits until the last save is complete, and frees the reserved space. Raises SaveFailed if the save failed."""
        try:
            self.wait()
        finally:
            self.release_space()
            self._manager.close()

    def _add_checksums(self) -> None:
        (written,) = _unfinished(self._folder, self._saving)
        write_checksums(written, without=(STAMPED,))

    def _reserve(self) -> None:
        """Reserves space, unless the file system does not support it or a file size limit forbids it."""
        if not self._size or not job.is_first():
            return
        if self._reserved.exists() and self._reserved.stat().st_size == self._size:
            return
        try:
            with self._reserved.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError as error:
            self.release_space()
            if error.errno in FULL:
                size = f"{self._size / 1e6:.0f} MB ({error.strerror})"
                what = f"there is no space for the next checkpoint in {self._folder}"
                raise SaveFailed(f"{what}, which takes up to {size}") from error

    @contextlib.contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Converts errors of a save to SaveFailed, after removing its partial files."""
        try:
            yield
        # Orbax and TensorStore raise various errors after a failed write, including ValueError and RuntimeError.
        except Exception as error:
            for left in _unfinished(self._folder, self._saving):
                shutil.rmtree(left, ignore_errors=True)
            self._manager.reload()
            self._newest = max(self.steps(), default=None)
            known = REASON.search(str(error))
            reason = known[0] if known else repr(error).partition("\n")[0]
            what = f"the checkpoint of step {self._saving} could not be saved in {self._folder}"
            raise SaveFailed(f"{what}: {reason}") from error


def read_checkpoint(folder: Path | str, template: Any) -> Restored:
    """Restores part of the newest complete checkpoint, for use outside of the run, which may be in progress.

    `template` has the requested branches of the saved tree; see `Checkpointer.restore_latest`.

    Raises:
      FileNotFoundError: There is no checkpoint.
      ConfigError: There are checkpoints, but none is complete.
      ValueError: A branch of the template is missing in the checkpoint, or has another shape.
    """
    folder = Path(folder).absolute()
    step, _ = newest_complete(folder)
    if step is None:
        raise FileNotFoundError(f"{folder} has no checkpoint: give the checkpoints folder of a run")
    newest = folder / str(step)
    targets = ocp.checkpoint_utils.construct_restore_args(template)
    wanted = ocp.args.PyTreeRestore(item=template, restore_args=targets, partial_restore=True)
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(newest / "arrays", args=wanted)
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        host = reader.restore(newest / "host")
    for path, leaf in jax.tree.leaves_with_path(arrays):
        if isinstance(leaf, jax.ShapeDtypeStruct):  # was not read
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"checkpoint {newest} has no {name}: it belongs to another kind of run"
            )
    return Restored(step, arrays, host)


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints in a folder in ascending order, including damaged ones."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def steps_done(folder: Path) -> int:
    """Returns the step of the newest committed checkpoint in a folder, or 0 if there is none."""
    ended = (step for step in saved_steps(folder) if not _missing_stamp(folder / str(step)))
    return max(ended, default=0)


def was_saved(folder: Path) -> bool:
    """Returns whether a checkpoint was ever saved to this folder, even if it was deleted since."""
    return _note(folder).exists()


def newest_complete(folder: Path) -> tuple[int | None, list[int]]:
    """Returns (step of the newest complete checkpoint or None, steps of newer damaged ones).

    Prints a line for each damaged one.

    Raises:
      ConfigError: There are checkpoints, but none is complete.
    """
    damaged: dict[int, str] = {}
    for step in reversed(saved_steps(folder)):
        checkpoint = folder / str(step)
        wrong = find_damage(checkpoint) or _missing_stamp(checkpoint)
        if wrong is None:
            for other, why in damaged.items():
                print(f"checkpoint {other} is damaged ({why}): {step} is used", file=sys.stderr)
            return step, list(damaged)
        damaged[step] = wrong
    if damaged:
        each = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        none = f"no checkpoint in {folder} is complete ({each})"
        raise ConfigError(f"{none}: restore a copy, or choose another workdir")
    return None, []


def template_of(arrays: Any) -> Any:
    """Returns the `jax.ShapeDtypeStruct` tree of arrays, to restore onto the same devices."""
    shape = jax.ShapeDtypeStruct
    return jax.tree.map(lambda x: shape(x.shape, x.dtype, sharding=x.sharding), arrays)


def _missing_stamp(checkpoint: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        parse_json((checkpoint / STAMPED).read_bytes())
        return None
    return f"its {STAMPED} cannot be read"


def _note(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}_saved")


def _unfinished(folder: Path, step: int | None) -> list[Path]:
    """Returns the temporary folders of an incomplete save of a step."""
    return list(folder.glob(f"{step}.orbax-checkpoint-tmp*"))


def _bytes_of(arrays: Any) -> int:
    """Returns an upper bound of the checkpoint size of a pytree of arrays, in bytes."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    return size + size // 20 + SPARE


def write_checksums(folder: Path, without: Collection[str] = ()) -> None:
    """Writes size and CRC-32 of a folder's files, except `without`, to CHECKSUMS, and syncs to disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in without)
    names = [path.relative_to(folder).as_posix() for path in files]
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(names, threads.map(_size_and_crc, files), strict=True))
    with (folder / CHECKSUMS).open("w") as file:
        json.dump(found, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def find_damage(folder: Path) -> str | None:
    """Returns the first mismatch between a folder and its checksums, or None. Later files are not checked."""
    try:
        stored = parse_json((folder / CHECKSUMS).read_bytes())
        expected = {str(name): (int(size), int(crc)) for name, (size, crc) in stored.items()}
    except FileNotFoundError:
        return f"it has no {CHECKSUMS}"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"its {CHECKSUMS} cannot be read"
    with ThreadPoolExecutor(THREADS) as threads:
        wrong = threads.map(lambda item: _difference(folder, *item), expected.items())
        return next(filter(None, wrong), None)


def _difference(folder: Path, name: str, expected: tuple[int, int]) -> str | None:
    path = folder / name
    try:
        if path.stat().st_size != expected[0]:
            return f"{name} has {path.stat().st_size} bytes, not {expected[0]}"
        return None if _size_and_crc(path) == expected else f"{name} has another checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _size_and_crc(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
