"""Run folder: lock, config, record of starts, and completion marker."""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from digen_jax.config.fields import MOVED
from digen_jax.errors import ConfigError
from digen_jax.files import leaves_of, parse_json, read_json, replace, without_torn_line
from digen_jax.process.shutdown import Stopped

# Layout of the C library's struct flock.
FLOCK, FIELDS = (
    ("hhqqi4x", ("type", "whence", "start", "length", "process"))
    if sys.platform == "linux"
    else ("qqihh", ("start", "length", "process", "type", "whence"))
)
TOKEN = secrets.token_hex(3)  # containers may share host names and process ids
PACKAGES = (
    "digen_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers"
)  # fmt: skip


@contextlib.contextmanager
def claim_workdir(
    workdir: Path | str,
    config: dict[str, Any],
    may_change: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Iterator[list[str]]:
    """Locks a workdir for this process during the block, and writes the config to `workdir`/config.json.

    If an existing run has no metrics yet, its config may differ in any field.

    Args:
      workdir: Folder of the run, created if needed.
      config: Config of the run as a nested dict.
      may_change: Dotted names of fields or sections that a resumed run may change.
      check: Raises ConfigError if the run in the locked workdir cannot resume with this config.

    Yields:
      The changes of the existing run's config, as "field: before -> now".

    Raises:
      ConfigError: The folder is not writable, another process holds the lock, the existing config differs (the message
        names the fields) or is unreadable, or `check` fails. config.json is then unchanged.
      Stopped: The block failed, and the workdir no longer exists.
    """
    workdir = Path(workdir)
    with _lock(workdir):
        changed, wrong = _changes(workdir, config), []
        for name, change in changed.items():
            of_any = re.sub(r"\[\d+\]", "[i]", name)  # matches all sections of a list
            if not any(f"{of_any}.".startswith(f"config.{field}.") for field in may_change):
                wrong.append(change)
        if wrong:
            more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
            raise ConfigError(
                f"the run in {workdir} has another config ({'; '.join(wrong[:6])}{more}): "
                "choose another workdir, or undo these changes"
            )
        check()
        _write(workdir / "config.json", config)
        try:
            yield list(changed.values())
        except Exception:
            check_there(workdir)
            raise


def _lock(workdir: Path) -> IO[str]:
    """Locks the workdir with a POSIX record lock, which forked processes do not inherit."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("a+")
    except OSError as error:
        wrong = "is a file" if workdir.is_file() else f"cannot be written ({error.strerror})"
        raise ConfigError(f"the workdir {workdir} {wrong}: choose another one") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().partition(" (")[0].strip()
        lock.close()
        message = f"{workdir} cannot be locked ({error.strerror}): choose another one"
        if isinstance(error, BlockingIOError):
            message = (
                f"{workdir} is in use by {owner}: wait until it ends, or choose another workdir"
            )
        raise ConfigError(message) from error
    lock.truncate(0)
    lock.write(own_claim())
    lock.flush()
    os.fsync(lock.fileno())  # other hosts read it: see `check_shared`
    return lock


def holder(workdir: Path | str) -> int | None:
    """Returns the process on this host that holds the workdir lock, 0 if in another container, or None.

    Must not be called by that process, since it would release the lock.
    """
    request = struct.pack(FLOCK, *(fcntl.F_WRLCK if name == "type" else 0 for name in FIELDS))
    try:
        with Path(workdir, ".lock").open() as lock:
            found = fcntl.fcntl(lock, fcntl.F_GETLK, request)
    except OSError:
        return None
    fields = dict(zip(FIELDS, struct.unpack(FLOCK, found), strict=True))
    return None if fields["type"] == fcntl.F_UNLCK else fields["process"]


def own_claim() -> str:
    """Describes this process in the format of the lock file."""
    return f"process {os.getpid()} on {socket.gethostname()} ({TOKEN})"


def check_there(workdir: Path | str) -> None:
    """Checks that the locked workdir still exists.

    Raises:
      Stopped: The workdir was moved or deleted, so nothing may be written there.
    """
    if not Path(workdir, ".lock").exists():
        raise Stopped(
            f"the workdir {workdir} was moved or deleted while the run used it: restore it, or pass its new "
            "path as --workdir; then the same command continues from its last checkpoint"
        )


def check_shared(workdir: Path | str, claim: str) -> None:
    """Checks that this process sees the workdir locked by another one; `claim` is the other's `own_claim`.

    Raises:
      ConfigError: This process sees another folder.
    """
    try:
        found = (Path(workdir) / ".lock").read_text()
    except OSError:
        found = "no process"
    if found != claim:
        raise ConfigError(
            f"{workdir} here is not the folder of the first process: it is in use by {found}, there by {claim}; "
            "give all processes that train a --workdir on a shared disk"
        )


def _changes(workdir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the differences of `config` from that of the run in a workdir, by field: "field: before -> now".

    Both are compared as JSON: tuples equal lists. A run without metrics has no differences.

    Raises:
      ConfigError: The run's config cannot be read, or is from an older version with other fields.
    """
    path, metrics = workdir / "config.json", workdir / "metrics.jsonl"
    if not (metrics.exists() and metrics.stat().st_size):
        return {}
    found = _read(path, "restore it, or choose another workdir")
    old, new = leaves_of(found), leaves_of(json.loads(json.dumps(config)))
    if moved := next((name for name in old if name in MOVED and name not in new), None):
        raise ConfigError(
            f"the run in {workdir} is of an older version: {moved} is {MOVED[moved]} now; choose another workdir"
        )

    def shown(leaves: dict[str, Any], name: str) -> str:
        return json.dumps(leaves[name]) if name in leaves else "not there"

    return {
        name: f"{name}: {shown(old, name)} -> {shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if new.get(name, ...) != old.get(name, ...)
    }


def mark_finished(workdir: Path | str, step: int) -> None:
    """Records that the run in a workdir completed all `step` steps and the work after them."""
    _write(Path(workdir) / "finished.json", {"step": step})


def finished_step(workdir: Path | str) -> int | None:
    """Returns the number of steps after which the run in a workdir finished, or None if unfinished.

    Raises:
      ConfigError: The file finished.json cannot be read.
    """
    path, remedy = Path(workdir) / "finished.json", "delete it, and run the same command again"
    if not path.exists():
        return None
    step = _read(path, remedy).get("step")
    if type(step) is not int:
        raise ConfigError(f"{path} has no step: {remedy}")
    return step


def _read(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object. Raises ConfigError if the file is invalid."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}: {remedy}") from error


def _write(path: Path, content: dict[str, Any]) -> None:
    replace(path, (json.dumps(content, indent=2) + "\n").encode())


def record_start(workdir: Path, done: int, changes: list[str]) -> None:
    """Appends a record of this start to `workdir`/starts.jsonl. Initializes the JAX backend.

    Args:
      workdir: Folder of the run.
      done: Number of steps completed before.
      changes: Config differences from the previous start.
    """
    import jax

    devices = jax.devices()
    line = {
        "done": done,
        "changes": changes,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "devices": {"kind": devices[0].device_kind, "count": len(devices)},
        "processes": jax.process_count(),
    }
    with (workdir / "starts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def started_in(workdir: Path) -> Path | None:
    """Returns the working directory of a run's latest start, or None. Relative config paths refer to it."""
    try:
        *_, last = without_torn_line((workdir / "starts.jsonl").read_bytes()).splitlines()
        return Path(parse_json(last)["folder"])
    except (OSError, ValueError, LookupError, TypeError):  # missing, of an older version, or edited
        return None


def switch_profiler(folder: str, worker: str) -> None:
    """Starts a trace of this process by `jax.profiler`, in a subfolder of `folder`; "" ends and writes it."""
    import jax

    if not folder:
        jax.profiler.stop_trace()
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would be an event
    name = f"{worker} {jax.process_index()}".replace(" ", "_")
    jax.profiler.start_trace(Path(folder, name), profiler_options=options)


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Returns the git commit of the code, with "+" if files are modified, or None if unavailable."""

    def git(*arguments: str) -> str:
        command, pipe = ["git", "-C", str(folder), *arguments], subprocess.PIPE
        return subprocess.check_output(command, stderr=pipe, text=True, timeout=10).strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
