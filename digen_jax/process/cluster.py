"""Several processes of one command on this machine, as if each were a host: started, shown and ended together.

The first process leads, and its end is that of the job. Each is a session of its own, so that a terminal's Ctrl-C
reaches only the process that started them, which passes it on. On Linux the kernel kills them when that process is
killed (`cluster_child.py`).
"""

import contextlib
import os
import pathlib
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED
from digen_jax.process.interrupt import SIGNALS
from digen_jax.process.ports import free_port

TOKEN = "DIGEN_JAX_TOKEN"  # the variable with the secret that the processes of a job share
GIVEN = ("coordinator", "processes", "process")  # options that each process gets from here
PAUSE = 1.0  # seconds before a process is started again
PATIENCE = 10.0  # seconds that the others have when the first process has ended
DRAIN = 1.0  # seconds in which what a process started may still print after its end
MISTAKE = 2  # exit code of a user's mistake, which another start would repeat
LONGEST = 2**20  # bytes of a line
LAUNCHER = pathlib.Path(__file__).with_name("cluster_child.py")


def check_command(command: Sequence[str]) -> None:
    """Refuses what is no Python file with its options, or has options that each process gets from here.

    Raises:
      ConfigError: says what to write.
    """
    if not command:
        raise ConfigError(
            "there is no command: write it after --, such as -- launch/train.py --config FILE --workdir FOLDER"
        )
    script = pathlib.Path(command[0])
    if script.suffix != ".py" or not script.is_file():
        raise ConfigError(
            f"the command begins with {command[0]!r}, which is no Python file here: begin it with one, such as "
            "launch/train.py"
        )
    for word in command[1:]:
        name, dashes = word.lstrip("-").partition("=")[0], word.startswith("-")
        if dashes and name in GIVEN:
            raise ConfigError(f"each process gets its own --{name}: leave it out of the command")


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line that was written again and again after carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class WholeLines:
    """Makes whole lines of what is read from a pipe, of each its last state."""

    def __init__(self):
        self._begun = b""

    def take(self, data: bytes) -> list[bytes]:
        """The lines that end in `data`; nothing in `data` ends the last one."""
        *whole, begun = (self._begun + data).split(b"\n")
        if not data or len(begun) > LONGEST:
            whole, begun = ([*whole, begun] if last_state(begun).strip() else whole), b""
        # A bar that is never ended takes no memory. A carriage return at the end may belong to the line's end.
        returned = b"\r" if begun.endswith(b"\r") else b""
        self._begun = last_state(begun) + returned
        return [last_state(line) for line in whole]


class Member:
    """One of the processes, from its start to the end of all that it prints."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str]):
        self.number = number
        # The kernel ties it to this thread, which therefore has to be the main one.
        launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
        self.process = subprocess.Popen(
            [*launcher, sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
        self.pipes = {
            self.process.stdout: (1, WholeLines()),
            self.process.stderr: (2, WholeLines()),
        }
        self.until: float | None = None  # it has ended; what it started may print until then

    @property
    def how(self) -> str:
        """How it has ended, in words."""
        code = self.process.returncode
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"

    def kill(self) -> None:
        """Kills the process and its group, which may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def has_ended(self, now: float) -> bool:
        """Whether the process has ended, and nothing more of it is to be shown."""
        if self.until is None and self.process.poll() is not None:
            self.until = now + DRAIN
            self.kill()
        return self.until is not None and (not self.pipes or now >= self.until)


class Cluster:
    """The processes of one job, for the main thread: `run` starts them and returns when all have ended.

    Args:
      command: a Python file and its options; each process gets --coordinator, --processes and --process, too.
      count: the number of processes.
      restarts: how often each process is started again, and how often the whole job is.
    """

    def __init__(self, command: Sequence[str], count: int, restarts: int = 0):
        self._command, self._count, self._restarts = list(command), count, restarts
        self._environment = {
            "PYTHONUNBUFFERED": "1"
        } | os.environ  # so that lines come when they are printed
        if not self._environment.get(TOKEN):
            self._environment[TOKEN] = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, Member] = {}
        self._due: dict[int, float] = {}  # processes to start again, and when
        self._used = [0] * count  # starts after the first one
        self._limit: float | None = None  # the first process has ended; the others have until then
        self._asked = 0  # signals to stop

    def run(self) -> int:
        """Returns the first process's exit code; 128 and a signal's number if it was killed."""
        with self._signals(), self._selector:
            try:
                return self._run()
            finally:
                for member in self._members.values():
                    member.kill()
                    member.process.wait()

    def _run(self) -> int:
        for again in range(1, self._restarts + 2):
            code = self._run_once()
            if self._asked or again > self._restarts or not (code < 0 or code == STOPPED):
                break
            _say(f"the whole job is started again ({again} of {self._restarts})")
            begin = time.monotonic() + PAUSE
            while not self._asked and time.monotonic() < begin:
                self._wait(begin)
            if self._asked:
                break
        return 128 - code if code < 0 else code

    def _run_once(self) -> int:
        """From the start of all processes to the end of all; returns the first one's code."""
        self._limit, code, place = None, 0, f"127.0.0.1:{free_port()}"
        for number in range(self._count):
            self._start(number, place)
        while self._members or self._due:
            self._wait(self._next_time())
            now = time.monotonic()
            for member in [one for one in self._members.values() if one.has_ended(now)]:
                self._forget(member)
                if member.number == 0:
                    code = member.process.returncode
                self._ended(member)
            for number in [one for one, when in self._due.items() if now >= when]:
                del self._due[number]
                self._start(number, place)
            if self._limit is not None and now >= self._limit:
                self._limit = None
                self._kill(f"still running after {PATIENCE:g} seconds: killed")
        return code

    # ---------------------------------------------------------------------------- what happens

    def _start(self, number: int, place: str) -> None:
        given = dict(zip(GIVEN, (place, self._count, number), strict=True))
        options = [f"--{name}={value}" for name, value in given.items()]
        member = Member(number, [*self._command, *options], self._environment)
        self._members[number] = member
        for pipe in member.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, member)

    def _ended(self, member: Member) -> None:
        """Says that a process has ended, and decides what follows."""
        number, code, others = member.number, member.process.returncode, len(self._members)
        said = f"process {number} has ended {member.how}"
        if number == 0:
            self._due.clear()
            if others:
                self._limit = time.monotonic() + PATIENCE
                _say(f"{said}: the others have {PATIENCE:g} seconds to end")
            elif code:
                _say(said)
            return
        leads = 0 in self._members
        if leads and not self._asked and code not in (0, MISTAKE) and self._left(number):
            self._used[number] += 1
            self._due[number] = time.monotonic() + PAUSE
            said += f" and is started again ({self._used[number]} of {self._restarts})"
        if leads or code:
            _say(said)

    def _left(self, number: int) -> int:
        return self._restarts - self._used[number]

    def _stop(self, number: int) -> None:
        """A signal asks to stop: the first one is passed on, the second one kills."""
        self._asked += 1
        self._due.clear()
        if self._asked > 1:
            self._kill("killed")
            return
        running = list(self._members.values())
        _say(
            f"{signal.Signals(number).name} is passed on to {_counted(len(running))}; once more kills"
        )
        for member in running:
            member.process.send_signal(number)

    def _kill(self, how: str) -> None:
        alive = [member for member in self._members.values() if member.until is None]
        if alive:
            _say(f"{_counted(len(alive))} {how}")
        for member in alive:
            member.kill()

    # ------------------------------------------------------------------------------- the loop

    def _next_time(self) -> float | None:
        """When something has to be done even if nothing happens."""
        ends = (member.until for member in self._members.values())
        times = [time for time in (*ends, *self._due.values(), self._limit) if time is not None]
        return min(times, default=None)

    def _wait(self, until: float | None) -> None:
        """Waits for output, a signal or a time, and shows the output."""
        seconds = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                for number in os.read(key.fd, 2**10):
                    if number in SIGNALS:
                        self._stop(number)
            else:
                self._read(key.data, key.fileobj)

    def _read(self, member: Member, pipe: object) -> None:
        data = os.read(pipe.fileno(), 2**16)
        self._show(member, pipe, data)
        if not data:
            self._close(member, pipe)

    def _show(self, member: Member, pipe: object, data: bytes) -> None:
        descriptor, lines = member.pipes[pipe]
        prefix = b"[%d] " % member.number
        _write(descriptor, b"".join(prefix + line + b"\n" for line in lines.take(data)))

    def _close(self, member: Member, pipe: object) -> None:
        self._selector.unregister(pipe)
        pipe.close()
        del member.pipes[pipe]

    def _forget(self, member: Member) -> None:
        """Shows the rest of what a process has printed, whose pipes others may hold open."""
        del self._members[member.number]
        for pipe in list(member.pipes):
            self._show(member, pipe, b"")
            self._close(member, pipe)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """In this block signals, and the end of a process, wake the loop."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        handled = (*SIGNALS, signal.SIGCHLD)
        before = {number: signal.signal(number, lambda *_: None) for number in handled}
        wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._selector.register(reads, selectors.EVENT_READ)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reads)
            os.close(writes)


def _counted(processes: int) -> str:
    return f"{processes} process{'es' * (processes != 1)}"


def _say(sentence: str) -> None:
    _write(2, f"cluster.py: {sentence}\n".encode())


def _write(descriptor: int, data: bytes) -> None:
    """Writes all of it, unless nothing reads the descriptor any more."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data) :]
