"""Runs the scripts of launch/ as a user does, most in forks that share one import, which takes seconds."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.pipelines import ROOT, environment

# Imports of the scripts before their checks.
IMPORTED = ["digen_jax.train", "digen_jax.planning.plan", "benchmarks.training"]


def run_script(name: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """launch/NAME.py in a process of its own, with two devices."""
    return subprocess.run(
        [sys.executable, ROOT / "launch" / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(2),
    )


def run_forked(name: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """The same in a fork of a process with all imports, which has not used a device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)  # effective at the first call, which starts the server
    command = [str(ROOT / "launch" / name), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, kind) for kind in ("stdout", "stderr")]
        process = context.Process(target=_run, args=(command, files))
        process.start()
        process.join()
        return subprocess.CompletedProcess(
            command, process.exitcode, *(file.read_text() for file in files)
        )


def is_alive(process: int) -> bool:
    """Whether there is such a process, except dead ones that nobody has waited for."""
    try:
        return (
            pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


def ends(process: int) -> bool:
    """Waits for the end of any process, and returns whether it came."""
    deadline = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(process)


def _run(command: list[str], files: list[pathlib.Path]) -> None:
    """Becomes the script, its output in these files."""
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(ROOT)
    os.environ.update(environment(2))
    sys.argv = command
    sys.path[0] = str(ROOT / "launch")
    runpy.run_path(command[0], run_name="__main__")
