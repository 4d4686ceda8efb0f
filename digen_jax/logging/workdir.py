"""A run's folder: it belongs to one process at a time, has one config, and records that the run is finished."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from digen_jax.checkpoints.folder import read_json
from digen_jax.config.fields import MOVED
from digen_jax.errors import ConfigError
from digen_jax.files import replace
from digen_jax.process.shutdown import Stopped

# The C library's struct flock, by which a lock is asked for.
FLOCK, FIELDS = (
    ("hhqqi4x", ("type", "whence", "start", "length", "process"))
    if sys.platform == "linux"
    else ("qqihh", ("start", "length", "process", "type", "whence"))
)
DRAWN = secrets.token_hex(3)


def claim_workdir(
    workdir: Path | str,
    config: dict[str, Any],
    may_change: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> IO[str]:
    """Claims a workdir for this process and writes the run's config into `workdir`/config.json.

    A run that ended before its first line of metrics has computed nothing, so another config may use its workdir.

    Args:
      workdir: Folder of the run, created if needed.
      config: Config of the run as a nested dict.
      may_change: Dotted names of fields, or groups of them, that a resumed run may change.
      check: Raises ConfigError if the run in the workdir, which is claimed, cannot continue with this config.

    Returns:
      An open file: the claim ends when it is closed or the process ends in any way.

    Raises:
      ConfigError: The folder cannot be written, another process has claimed it, or the run there has another config
        (the message names the fields that differ) or an unreadable one; errors of `check`. Then the run's config
        stays as it was.
    """
    workdir = Path(workdir)
    claim = _lock(workdir)
    try:
        wrong = []
        for name, change in changes(workdir, config).items():
            of_any = re.sub(r"\[\d+\]", "[i]", name)  # for all sections in a list
            if not any(f"{of_any}.".startswith(f"config.{free}.") for free in may_change):
                wrong.append(f"{name}: {change}")
        if wrong:
            more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
            raise ConfigError(
                f"the run in {workdir} has another config ({'; '.join(wrong[:6])}{more}): "
                "choose another workdir, or take these changes back"
            )
        check()
    except ConfigError:
        claim.close()
        raise
    _write(workdir / "config.json", config)
    return claim


def _lock(workdir: Path) -> IO[str]:
    """Locks the workdir by a POSIX record lock, which a process forked later does not inherit."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        claim = (workdir / ".lock").open("a+")
    except OSError as error:
        wrong = "is a file" if workdir.is_file() else f"cannot be written ({error.strerror})"
        raise ConfigError(f"the workdir {workdir} {wrong}: choose another one") from error
    try:
        fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        claim.seek(0)
        owner = claim.read().partition(" (")[0].strip()
        claim.close()
        raise ConfigError(
            f"{workdir} is in use by {owner}: wait until that ends, or choose another workdir"
        ) from error
    except OSError as error:
        claim.close()
        raise ConfigError(
            f"{workdir} cannot be locked ({error.strerror}): choose another one"
        ) from error
    claim.truncate(0)
    claim.write(own_claim())
    claim.flush()
    os.fsync(claim.fileno())  # other hosts read it: see `check_shared`
    return claim


def holder(workdir: Path | str) -> int | None:
    """The process on this host that has claimed a workdir, 0 if it is in another container; None: there is none.

    Nothing is claimed. Not for the process that has claimed it, whose claim would end as the file is closed.
    """
    path = Path(workdir, ".lock")
    asked = struct.pack(FLOCK, *(fcntl.F_WRLCK if name == "type" else 0 for name in FIELDS))
    try:
        with path.open() as claim:
            found = fcntl.fcntl(claim, fcntl.F_GETLK, asked)
    except OSError:
        return None
    fields = dict(zip(FIELDS, struct.unpack(FLOCK, found), strict=True))
    return None if fields["type"] == fcntl.F_UNLCK else fields["process"]


def own_claim() -> str:
    """The present process in words, as in a workdir that it has claimed; the claim ends if it closes that file.

    In containers many processes have the same number on hosts of the same name: `DRAWN` tells them apart.
    """
    return f"process {os.getpid()} on {socket.gethostname()} ({DRAWN})"


def check_there(workdir: Path | str) -> None:
    """Checks that the workdir that this process has claimed still exists.

    Raises:
      Stopped: It was moved or deleted. Nothing must be written there any more.
    """
    if not Path(workdir, ".lock").exists():
        raise Stopped(
            f"the workdir {workdir} was moved or deleted while the run used it: put it back, or give its new place by "
            "--workdir, and the same command continues from its last checkpoint"
        )


@contextlib.contextmanager
def usable(workdir: Path | str) -> Iterator[None]:
    """Turns an error in a block into `Stopped` if the claimed workdir no longer exists."""
    try:
        yield
    except Exception:
        check_there(workdir)
        raise


def check_shared(workdir: Path | str, claim: str) -> None:
    """Checks that this process sees the workdir that another one has claimed, whose `own_claim` is `claim`.

    Raises:
      ConfigError: It sees another folder.
    """
    try:
        found = (Path(workdir) / ".lock").read_text()
    except OSError:
        found = "nobody"
    if found != claim:
        raise ConfigError(
            f"{workdir} is another folder here, in use by {found}, than for the first process, where it is in use by "
            f"{claim}: give all processes that train a --workdir on a disk that they share"
        )


def changes(workdir: Path | str, config: dict[str, Any]) -> dict[str, str]:
    """Differences to the config of the run in a workdir: by field, "before -> now".

    They are compared as JSON: a tuple and a list are the same. A run that has computed nothing has no differences.

    Raises:
      ConfigError: The run's config cannot be read, or is of an older version with other fields.
    """
    path, metrics = Path(workdir, "config.json"), Path(workdir, "metrics.jsonl")
    if not (metrics.exists() and metrics.stat().st_size):
        return {}
    found = _read(path, "bring it back, or choose another workdir")
    old, new = _leaves(found), _leaves(json.loads(json.dumps(config)))
    if moved := next((name for name in old if name in MOVED and name not in new), None):
        raise ConfigError(
            f"the run in {workdir} is of an older version: {moved} is {MOVED[moved]} now; choose another workdir"
        )

    def shown(leaves: dict[str, Any], name: str) -> str:
        return json.dumps(leaves[name]) if name in leaves else "not there"

    return {
        name: f"{shown(old, name)} -> {shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if new.get(name, ...) != old.get(name, ...)
    }


def _leaves(config: dict[str, Any], path: str = "config") -> dict[str, Any]:
    """Dotted names and values of a nested dict; an empty group is a value, and so is a list without groups."""
    leaves = {}
    for name, value in config.items():
        groups = {f"{path}.{name}": value}
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            groups = {f"{path}.{name}[{number}]": one for number, one in enumerate(value)}
        for place, one in groups.items():
            leaves |= _leaves(one, place) if isinstance(one, dict) and one else {place: one}
    return leaves


def mark_finished(workdir: Path | str, step: int) -> None:
    """Records that the run in a workdir has done all its `step` steps and the work after them."""
    _write(Path(workdir) / "finished.json", {"step": step})


def finished_step(workdir: Path | str) -> int | None:
    """The number of steps after which the run in a workdir finished, or None if it has not.

    Raises:
      ConfigError: The record of this cannot be read.
    """
    path, remedy = Path(workdir) / "finished.json", "delete it, and run the same command again"
    if not path.exists():
        return None
    step = _read(path, remedy).get("step")
    if type(step) is not int:
        raise ConfigError(f"{path} names no step: {remedy}")
    return step


def _read(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file; raises ConfigError if it has none."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}: {remedy}") from error


def _write(path: Path, content: dict[str, Any]) -> None:
    replace(path, (json.dumps(content, indent=2) + "\n").encode())
