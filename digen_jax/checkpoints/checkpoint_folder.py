"""The checkpoints in a folder: which are whole, and the content of the newest, even of a run in progress."""

import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from digen_jax.checkpoints.checksums import damage
from digen_jax.errors import ConfigError
from digen_jax.files import parse_json

STAMPED = "_CHECKPOINT_METADATA"  # orbax's file, into which it writes the time last of all
# It logs a traceback for every error that it raises.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
# Of a save that fails it awaits the first error; asyncio logs each of the others, hundreds on a full disk.
LATE = re.compile(r"exception was never retrieved[\s\S]*(orbax|OCDBT|tensorstore)")
logging.getLogger("asyncio").addFilter(lambda record: not LATE.search(record.getMessage()))


def _print_unraisable(error: Any) -> None:
    """Leaves out what TensorStore's threads raise after a failed save, whose event loop has ended."""
    if not (error.exc_type is RuntimeError and str(error.exc_value) == "Event loop is closed"):
        _printing(error)


_printing, sys.unraisablehook = sys.unraisablehook, _print_unraisable


class Restored(NamedTuple):
    """A checkpoint that was read: the steps done, the arrays, and the host's part."""

    step: int
    arrays: Any
    host: dict[str, Any]


def read_checkpoint(folder: Path | str, template: Any) -> Restored:
    """Reads a part of the newest whole checkpoint, for programs other than the run itself.

    Args:
      folder: a `Checkpointer`'s folder, which is not changed; the run may be in progress.
      template: the wanted branches of the saved tree, as in `Checkpointer.restore_latest`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ConfigError: there are checkpoints, and none is whole.
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


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, the oldest first, damaged or not."""
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def steps_done(folder: Path) -> int:
    """Returns the steps of the newest checkpoint in a folder whose saving has ended; 0 if there is none."""
    ended = (step for step in saved_steps(folder) if not _unstamped(folder / str(step)))
    return max(ended, default=0)


def newest_whole(folder: Path) -> tuple[int | None, list[int]]:
    """(the newest whole checkpoint's step or None, the damaged ones after it); prints a line about damaged ones.

    Raises:
      ConfigError: there are checkpoints, and none is whole.
    """
    damaged = {}
    for step in reversed(saved_steps(folder)):
        wrong = damage(folder / str(step)) or _unstamped(folder / str(step))
        if wrong is None:
            for other, why in damaged.items():
                print(f"checkpoint {other} is damaged ({why}): {step} is used", file=sys.stderr)
            return step, list(damaged)
        damaged[step] = wrong
    if damaged:
        each = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise ConfigError(
            f"no checkpoint in {folder} is whole ({each}): put a copy in its place, or choose "
            "another workdir"
        )
    return None, []


def _unstamped(checkpoint: Path) -> str | None:
    try:
        parse_json((checkpoint / STAMPED).read_bytes())
    except (OSError, ValueError):
        return f"its {STAMPED} cannot be read"
    return None


def put_aside(checkpoint: Path) -> None:
    """Renames a damaged checkpoint, so that its step can be saved again."""
    aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def unfinished(folder: Path, step: int | None) -> list[Path]:
    """The folders in which orbax writes a step, or has begun to."""
    return list(folder.glob(f"{step}.orbax-checkpoint-tmp*"))
