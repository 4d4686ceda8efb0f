"""The ordered log of a run's commands, on disk: what happened when, and what `replay` repeats."""

import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable

from digen_jax.errors import ConfigError
from digen_jax.files import append, replace, without_torn_line
from digen_jax.scheduling.commands import (
    Command,
    DropFragments,
    Encode,
    Generate,
    Publish,
    Update,
)
from digen_jax.scheduling.saving import pack, unpack


class CommandLog:
    """Appends commands to a file, one a line, each process's behind a line that says where it began.

    A last line that a kill cut off is removed first. May be used by several threads.
    """

    def __init__(self, path: pathlib.Path, first: int):
        """`first`: the steps done before this process."""
        self._path, self._lock = path, threading.Lock()
        if path.exists():
            os.truncate(path, len(without_torn_line(path.read_bytes())))
        self._waiting = _text([{"steps_done": first}])
        self.flush()

    def extend(self, commands: Iterable[Command]) -> None:
        """Some more. What cannot be written waits for `flush`, as the run goes on to the end of its step."""
        with self._lock:
            self._waiting += _text(map(pack, commands))
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Writes what could not be written before.

        Raises:
          OSError: nor can it now.
        """
        with self._lock:
            append(self._path, self._waiting.encode())
            self._waiting = ""

    def cut_back(self, done: int) -> None:
        """Removes what came before `done` steps were, but for what later steps' commands build on.

        From the checkpoint after `done` steps the rest can be replayed.

        Raises:
          OSError: the disk is full; the file is as it was.
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
    """(steps done before the last process, its commands); a last line that a kill cut off is left out.

    Raises:
      ConfigError: names the line that holds no command.
    """
    return (_parts(path) or [(0, [])])[-1]


def since(commands: list[Command], done: int) -> list[Command]:
    """Of a process's commands those behind the step that was `done`, and those before that they build on.

    These are whatever began the steps from `done` on ahead of their time, and the publications of the
    versions that they are sampled by.
    """
    ends = [i for i, c in enumerate(commands) if isinstance(c, Update) and c.step == done - 1] or [
        -1
    ]
    before, behind = commands[: ends[-1] + 1], commands[ends[-1] + 1 :]
    sampled = {
        c.publication for c in (*before, *behind) if isinstance(c, Generate) and _step(c) >= done
    }
    ahead = [
        c
        for c in before
        if (c.publication in sampled if isinstance(c, Publish) else _step(c) >= done)
    ]
    return ahead + behind


def _step(command: Command) -> int:
    """The step whose fragments a command is about; -1 where it is about none."""
    if isinstance(command, DropFragments):
        return command.fragments[0].step
    if isinstance(command, Encode):
        return command.step
    fragment = getattr(command, "fragment", None)
    return -1 if fragment is None or fragment.evaluation else fragment.step


def _parts(path: pathlib.Path) -> list[tuple[int, list[Command]]]:
    """(steps done before, commands) of each process."""
    parts: list[tuple[int, list[Command]]] = []
    lines = without_torn_line(path.read_bytes()).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if "steps_done" in value:
                parts.append((value["steps_done"], []))
            else:
                parts[-1][1].append(unpack(value))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{path}, line {number} is no command: delete the file, which only a replay needs"
            ) from error
    return parts


def _text(values: Iterable[dict]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)
