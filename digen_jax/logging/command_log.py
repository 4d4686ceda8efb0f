"""The ordered log of a run's commands, on disk, for reading and for `replay`."""

import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable

from digen_jax.errors import ConfigError
from digen_jax.files import append, parse_json, replace, without_torn_line
from digen_jax.scheduling.commands import (
    Command,
    DropChunks,
    Encode,
    Generate,
    SyncWeights,
    Update,
)
from digen_jax.scheduling.state import pack, unpack


class CommandLog:
    """Appends commands to a file, one a line; each process begins with a line with the number of steps done.

    An incomplete last line, left by a kill, is removed first. May be used by several threads.
    """

    def __init__(self, path: pathlib.Path, first: int):
        """`first`: the steps done before this process."""
        self._path, self._lock = path, threading.Lock()
        if path.exists():
            os.truncate(path, len(without_torn_line(path.read_bytes())))
        self._waiting = _text([{"steps_done": first}])
        self.flush()

    def extend(self, commands: Iterable[Command]) -> None:
        """Appends commands. If writing fails, they wait for `flush`, since the run continues to the end of its step."""
        with self._lock:
            self._waiting += _text(map(pack, commands))
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Writes the commands that could not be written before.

        Raises:
          OSError: they still cannot be written.
        """
        with self._lock:
            append(self._path, self._waiting.encode())
            self._waiting = ""

    def cut_back(self, done: int) -> None:
        """Removes the commands of the first `done` steps, except those that later steps' commands depend on.

        The rest can be replayed from the checkpoint after `done` steps.

        Raises:
          OSError: the disk is full; the file is unchanged.
        """
        with self._lock:
            parts = _parts(self._path)
            last = max((i for i, (first, _) in enumerate(parts) if first <= done), default=None)
            if last is None:
                return
            kept = [(done, since(parts[last][1], done)), *parts[last + 1 :]]
            lines = ([{"steps_done": first}, *map(pack, commands)] for first, commands in kept)
            replace(self._path, "".join(map(_text, lines)).encode())


def read_log(path: pathlib.Path) -> tuple[int, list[Command]]:
    """(steps done before the last process, its commands), without an incomplete last line left by a kill.

    Raises:
      ConfigError: names the line that is not a command.
    """
    return (_parts(path) or [(0, [])])[-1]


def since(commands: list[Command], done: int) -> list[Command]:
    """A process's commands after the step that was `done`, and the earlier ones that they depend on.

    The latter are the commands that began the steps from `done` on ahead of time, and the weight syncs of
    the versions that generate their chunks.
    """
    updates = [i for i, c in enumerate(commands) if isinstance(c, Update) and c.step == done - 1]
    end = updates[-1] + 1 if updates else 0
    generated = (c for c in commands if isinstance(c, Generate) and _step(c) >= done)
    sampled = {c.weights_version for c in generated}

    def is_ahead(c: Command) -> bool:
        return c.weights_version in sampled if isinstance(c, SyncWeights) else _step(c) >= done

    return [*filter(is_ahead, commands[:end]), *commands[end:]]


def _step(command: Command) -> int:
    """The step of a command's chunks; -1 if it has none."""
    if isinstance(command, DropChunks):
        return command.chunks[0].step
    if isinstance(command, Encode):
        return command.step
    chunk = getattr(command, "chunk", None)
    return -1 if chunk is None or chunk.evaluation else chunk.step


def _parts(path: pathlib.Path) -> list[tuple[int, list[Command]]]:
    """(steps done before, commands) of each process."""
    parts: list[tuple[int, list[Command]]] = []
    lines = without_torn_line(path.read_bytes()).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line)
            if "steps_done" in value:
                parts.append((value["steps_done"], []))
            else:
                parts[-1][1].append(unpack(value))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{path}, line {number} is not a command: delete the file, which only a replay needs"
            ) from error
    return parts


def _text(values: Iterable[dict]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)
