"""What computed a run: versions, commit, devices and command, a line for each start."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from digen_jax.files import parse_json, without_torn_line

PACKAGES = (
    "digen_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "transformers",
)


def note_start(workdir: pathlib.Path, done: int, changes: list[str]) -> None:
    """Appends a line to `workdir`/starts.jsonl.

    Args:
      workdir: the run's.
      done: steps that were done before.
      changes: differences to the config of the start before, as sentences.
    """
    line = {"done": done, "changes": changes, **environment()}
    with (workdir / "starts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def started_in(workdir: pathlib.Path) -> pathlib.Path | None:
    """The working folder of a run's newest start, to which paths in its config are relative; None if unknown."""
    try:
        *_, last = without_torn_line((workdir / "starts.jsonl").read_bytes()).splitlines()
        return pathlib.Path(parse_json(last)["folder"])
    except (OSError, ValueError, LookupError, TypeError):  # none, of an older version, or edited
        return None


def environment() -> dict[str, Any]:
    """Everything that may change results or speed. It starts JAX's devices."""
    devices = jax.devices()
    return {
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


def commit(folder: pathlib.Path = pathlib.Path(__file__).parent) -> str | None:
    """The commit of the code, followed by "+" if files were changed since; None where git does not know."""
    found = _git(folder, "rev-parse", "HEAD")
    if found is None:
        return None
    return found + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
