"""A run's processes on this machine, each of which can be killed, stopped and started again; Linux only.

All of them have the job's token in their environment, by which also those are found that others have started.
"""

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from digen_jax.process.cluster import LAUNCHER, TOKEN
from digen_jax.process.ports import free_port

TRAINER = "trainer"
LOOK = 0.1  # seconds between two looks
PROC = pathlib.Path("/proc")
REWARDS = b"digen_jax.rewards.process"  # on the command line of a process that scores


class Wrong(RuntimeError):
    """Something that must not be; its text says what, with what the processes printed."""


class Begun:
    """One start of a process; what it prints lies in a file of its own."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: pathlib.Path,
        environment: Mapping[str, str],
    ):
        self.name, self.log, self.since = name, log, time.monotonic()
        self.stopped = False  # by SIGSTOP
        # The kernel kills it with the thread that starts it, which therefore is the main one.
        launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environment},
                start_new_session=True,
            )

    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def joined(self) -> bool:
        """Whether a rollout process has reached the leader."""
        return f"{self.name} joins " in self.said()

    @property
    def ready(self) -> bool:
        """Whether a rollout process takes commands."""
        return f"{self.name} is ready, " in self.said()

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone, not to those that it has started."""
        self.stopped = {signal.SIGSTOP: True, signal.SIGCONT: False}.get(number, self.stopped)
        self.process.send_signal(number)

    def ends(self, seconds: float) -> int:
        """Its exit code, below 0 for a signal.

        Raises:
          Wrong: it still runs after these seconds.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Wrong(
                f"{self.name} has not ended in {seconds:g} s; it said:\n{self.said()}"
            ) from None


class Job:
    """The processes of one run: the trainer, its rollout meshes, and those that are added.

    Args:
      command: a Python file and its options, or -m and a module.
      folder: gets what the processes print.
      rollouts: how many rollout meshes the config has.
      environment: variables of all processes in addition.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        folder: pathlib.Path,
        rollouts: int,
        environment: Mapping[str, str] | None = None,
    ):
        self.token, self.address = secrets.token_hex(16), f"127.0.0.1:{free_port()}"
        self.rollouts = [f"rollout {number}" for number in range(rollouts)]
        self.now: dict[str, Begun] = {}  # the last start of each process
        self.all: list[Begun] = []
        self._command, self._folder = [os.fspath(word) for word in command], folder
        self._environment = {"PYTHONUNBUFFERED": "1"} | os.environ | (environment or {})
        self._environment |= {TOKEN: self.token}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *options: str, before: Sequence[str] = ()) -> Begun:
        """Starts the trainer's process, that of one of the config's meshes, or of a mesh that is added.

        `before` is a command that runs its command, such as `ip netns exec`.
        """
        names = [TRAINER, *self.rollouts]
        part = [f"--mesh={name}"]
        if name in names:
            part = [f"--processes={len(names)}", f"--process={names.index(name)}"]
        log = self._folder / f"{len(self.all):03d} {name}.txt"
        own = [*self._python(before), *self._command, f"--coordinator={self.address}", *part]
        begun = Begun(name, [*own, *options], log, self._environment)
        self.now[name] = begun
        self.all.append(begun)
        return begun

    def _python(self, before: Sequence[str]) -> list[str]:
        if not before:
            return [sys.executable]
        return [shutil.which(before[0]) or before[0], *before[1:], sys.executable]

    def start_all(self, *options: str) -> None:
        """Starts the trainer and the config's meshes."""
        for name in (TRAINER, *self.rollouts):
            self.start(name, *options)

    @property
    def leader(self) -> Begun:
        """The trainer's process."""
        return self.now[TRAINER]

    def meshes(self) -> list[Begun]:
        """The rollout processes that have not ended."""
        return [one for name, one in self.now.items() if name != TRAINER and one.alive]

    def wait(self, true: Callable[[], object], seconds: float, what: str) -> float:
        """Waits until something is true; returns the seconds.

        Raises:
          Wrong: it does not become true in time, or the trainer ends before.
        """
        begin = time.monotonic()
        while not true():
            if not self.leader.alive and not true():
                raise Wrong(
                    f"the trainer has ended with {self.leader.process.returncode} before {what}:\n{self.tails()}"
                )
            if time.monotonic() - begin > seconds:
                raise Wrong(f"not in {seconds:g} s: {what}\n{self.tails()}")
            time.sleep(LOOK)
        return time.monotonic() - begin

    def tails(self, lines: int = 25) -> str:
        """The ends of what the present processes have printed."""
        return "\n".join(
            f"--- {name} ({one.process.poll()}), {one.log}:\n"
            + "\n".join(one.said().splitlines()[-lines:])
            for name, one in self.now.items()
        )

    def rewards(self, of: Begun) -> list[int]:
        """The processes that score for a process."""
        return [
            one
            for one in self.living()
            if REWARDS in _read(one, "cmdline") and _parent(one) == of.process.pid
        ]

    def living(self) -> list[int]:
        """All processes with the job's token that have not ended."""
        mine = f"{TOKEN}={self.token}".encode()
        found = [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]
        return [
            one for one in found if mine in _read(one, "environ").split(b"\0") and not _dead(one)
        ]

    def orphans(self) -> list[int]:
        """Processes of the job that none of the processes that run has started."""
        roots = {one.process.pid for one in self.all if one.alive}
        return [one for one in self.living() if not roots & set(_line(one))]

    def check_no_orphans(self, seconds: float = 10.0) -> None:
        """Waits until there are none.

        Raises:
          Wrong: there are still some.
        """
        until = time.monotonic() + seconds
        while found := self.orphans():
            if time.monotonic() > until:
                shown = [_read(one, "cmdline").replace(b"\0", b" ")[:200] for one in found]
                raise Wrong(f"processes are left: {found}, {shown}")
            time.sleep(LOOK)

    def close(self) -> None:
        """Kills whatever is left."""
        for one in self.all:
            if one.alive:
                one.process.kill()
            one.process.wait(10)
        for one in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def memory(process: int) -> int:
    """Bytes of a process that lie in memory; 0 if it has ended."""
    pages = _read(process, "statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _read(process: int, file: str) -> bytes:
    try:
        return (PROC / str(process) / file).read_bytes()
    except OSError:  # it has ended, or belongs to somebody else
        return b""


def _dead(process: int) -> bool:
    """Whether a process has ended; its parent may not have noticed."""
    return re.search(rb"\) ([ZX]) ", _read(process, "stat")) is not None


def _parent(process: int) -> int:
    found = re.search(rb"\) \w (\d+) ", _read(process, "stat"))
    return int(found[1]) if found else 0


def _line(process: int) -> list[int]:
    """A process, its parent, and so on."""
    found = []
    while process > 1:
        found.append(process)
        process = _parent(process)
    return found
