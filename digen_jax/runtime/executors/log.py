"""The ordered log of a run's commands, on disk: what happened when, and what `replay` repeats."""

import json
import pathlib
from collections.abc import Iterable

from digen_jax.runtime.scheduler.commands import Command
from digen_jax.runtime.scheduler.saving import pack, unpack


class CommandLog:
    """Appends commands to a file, one a line, each process's behind a line that says where it began."""

    def __init__(self, path: pathlib.Path, first: int):
        """`first`: the steps done before this process."""
        self._path = path
        self._write([{"steps_done": first}])

    def extend(self, commands: Iterable[Command]) -> None:
        """Some more."""
        self._write(map(pack, commands))

    def _write(self, values: Iterable[dict]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)


def read_log(path: pathlib.Path) -> tuple[int, list[Command]]:
    """(steps done before the last process, its commands); a last line that a kill cut off is left out."""
    first, commands = 0, []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        value = json.loads(line)
        if "steps_done" in value:
            first, commands = value["steps_done"], []
        else:
            commands.append(unpack(value))
    return first, commands
