"""Ordered log of a run's scheduler commands, for inspection and replay."""

import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable
from typing import Any

from digen_jax.files import append, read_lines, replace, without_torn_line
from digen_jax.scheduling.commands import (
    Command,
    DropChunks,
    Encode,
    Generate,
    SyncWeights,
    Update,
    pack,
    unpack,
)


class CommandLog:
    """Appends commands to a file, one per line. Each process first writes the number of completed steps.

    An incomplete last line is removed on open. Thread-safe.

    Args:
      path: The file.
      done: Number of completed steps at the start of this process.
    """

    def __init__(self, path: pathlib.Path, done: int):
        self._path, self._lock = path, threading.Lock()
        if path.exists():
            os.truncate(path, len(without_torn_line(path.read_bytes())))
        self._pending = _text([{"steps_done": done}])
        self.flush()

    def extend(self, commands: Iterable[Command]) -> None:
        """Appends commands. After a failure they are kept for `flush`, so that the run can complete its step."""
        with self._lock:
            self._pending += _text(map(pack, commands))
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Writes pending commands.

        Raises:
          OSError: The commands cannot be written.
        """
        with self._lock:
            append(self._path, self._pending.encode())
            self._pending = ""

    def truncate(self, done: int) -> None:
        """Removes the commands of the first `done` steps, except dependencies of later steps.

        The remaining ones can be replayed from the checkpoint after `done` steps.

        Raises:
          OSError: The disk is full; the file is unchanged.
        """
        with self._lock:
            starts = _read(self._path)
            last = max((i for i, (first, _) in enumerate(starts) if first <= done), default=None)
            if last is None:
                return
            kept = [(done, since(starts[last][1], done)), *starts[last + 1 :]]
            lines = ([{"steps_done": first}, *map(pack, commands)] for first, commands in kept)
            replace(self._path, "".join(map(_text, lines)).encode())


def read_log(path: pathlib.Path) -> tuple[int, list[Command]]:
    """Returns (completed steps before the last process, its commands), without an incomplete last line.

    Raises:
      ConfigError: A line is not a command; names the line.
    """
    return (_read(path) or [(0, [])])[-1]


def since(commands: list[Command], done: int) -> list[Command]:
    """Returns the commands of a process after its first `done` steps, and the earlier commands that they depend on.

    The latter belong to later steps, or sync the weights versions that generate their chunks.
    """
    updates = [i for i, c in enumerate(commands) if isinstance(c, Update) and c.step == done - 1]
    end = updates[-1] + 1 if updates else 0
    generated = (c for c in commands if isinstance(c, Generate) and _step(c) >= done)
    versions = {c.weights_version for c in generated}

    def is_needed(c: Command) -> bool:
        return c.weights_version in versions if isinstance(c, SyncWeights) else _step(c) >= done

    return [*filter(is_needed, commands[:end]), *commands[end:]]


def _step(command: Command) -> int:
    """Returns the step of a command's chunks, or -1 if there are none."""
    if isinstance(command, DropChunks):
        return command.chunks[0].step
    if isinstance(command, Encode):
        return command.step
    chunk = getattr(command, "chunk", None)
    return -1 if chunk is None or chunk.evaluation else chunk.step


def _read(path: pathlib.Path) -> list[tuple[int, list[Command]]]:
    """Returns (completed steps before, commands) for each process."""
    starts: list[tuple[int, list[Command]]] = []

    def add(value: Any) -> None:
        if "steps_done" in value:
            starts.append((value["steps_done"], []))
        else:
            starts[-1][1].append(unpack(value))

    read_lines(path, add, "is not a command: delete the file, which only a replay needs")
    return starts


def _text(values: Iterable[dict]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)
