"""`launch/train.py --ray=...`: starts the trainer's process on the cluster, and passes its output and signals on.

The trainer's process runs the same command. It connects to the cluster by itself and starts the rollout workers, so
that they end with it, and it ends with this driver.
"""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from digen_jax.config.recipe import Recipe
from digen_jax.config.sections import AUTO
from digen_jax.distributed.engine import (
    Engine,
    Lost,
    RayEngine,
    Resources,
    forwarded,
    python_path,
)
from digen_jax.errors import ConfigError, check_divides
from digen_jax.process.ending import STOPPED, last_word, leave
from digen_jax.process.interrupt import SIGNALS

ADDRESS = "DIGEN_JAX_RAY_ADDRESS"  # set in the trainer's process: the cluster's address
LOOK = 0.5  # seconds between two looks at signals
PENDING = 30.0  # seconds between two lines about a cluster without room for the trainer


def check(recipe: Recipe, place: tuple[str | int | None, ...]) -> None:
    """Checks that a recipe can run with rollout workers in other processes.

    Args:
      recipe: of the run.
      place: the values of --coordinator, --processes and --process.

    Raises:
      ConfigError: names the field or the option to change.
    """
    if place != (None, None, None):
        raise ConfigError(
            "--coordinator, --processes and --process are for processes that sample and train together: leave them out "
            "with --ray, which starts all processes"
        )
    if recipe.placement.sizes == AUTO:
        raise ConfigError(
            "config.placement = 'auto' plans for one process only: with --ray give config.placement.rollout and "
            "config.placement.trainer their sizes"
        )
    if not recipe.placement.meshes.rollout.data:
        raise ConfigError(
            "config.placement.rollout.data = 0, so that the trainer's devices sample: with --ray set it to 1 or more, "
            "or leave --ray out"
        )
    rollout = recipe.placement.meshes.rollout
    check_divides(
        "config.placement.rollout.hosts",
        rollout.hosts,
        "the number of devices of config.placement.rollout",
        rollout.devices,
        "as its processes have equally many devices",
    )


def run(recipe: Recipe, address: str) -> int:
    """Runs this process's own command in a trainer's process on the cluster; returns that one's exit code.

    Args:
      recipe: that was checked.
      address: of the cluster; "local" starts one on this machine, which ends with this process.

    Raises:
      ConfigError: there is no such cluster, or it is too small.
    """
    rollout, trainer = recipe.placement.meshes
    workers = rollout.workers
    processes = 1 + workers * rollout.hosts
    engine = RayEngine(address, show=False, cpus=max(os.cpu_count() or 1, processes))
    gpus = trainer.devices if has_gpus(engine) else 0
    if gpus and (needed := gpus + workers * rollout.devices) > engine.resources["GPU"]:
        raise ConfigError(
            f"config.placement needs {needed} GPUs and the cluster has {engine.resources['GPU']:g}: make "
            "config.placement.rollout or config.placement.trainer smaller, or add nodes"
        )
    environment = forwarded() | {ADDRESS: engine.address}
    given = [sys.executable, *sys.argv], environment, os.getcwd(), python_path()
    (process,) = engine.start(TrainerProcess, [given], Resources(gpus=gpus))
    started = engine.call(process, "start", _terminal(), group="work")
    try:
        with _noted() as signals:
            return _wait_for_start(started, gpus, signals) or _follow(engine, process, signals)
    except Lost as error:
        return last_word(
            f"the trainer's process is lost ({error}): the same command continues from the last checkpoint",
            STOPPED,
        )
    finally:
        engine.close()


def has_gpus(engine: RayEngine) -> bool:
    """Whether the cluster's devices are GPUs and the environment does not ask for others."""
    return bool(engine.resources.get("GPU")) and os.environ.get("JAX_PLATFORMS", "gpu") != "cpu"


def _wait_for_start(started: Future, gpus: int, signals: list[int]) -> int:
    """Waits until the cluster has room for the trainer's process, which may take as long as other jobs run.

    Returns:
      The exit code of a signal that came meanwhile, or 0.
    """
    begin = reported = time.monotonic()
    while not _done(started):
        if signals:
            return 128 + signals[0]
        if time.monotonic() - reported > PENDING:
            reported = time.monotonic()
            print(
                f"waiting for {reported - begin:.0f} s for a node with a free CPU core and {gpus} free GPUs for the "
                "trainer: see `ray status`",
                file=sys.stderr,
                flush=True,
            )
    started.result()
    return 0


def _follow(engine: Engine, process: object, signals: list[int]) -> int:
    """Prints the trainer's output and passes signals on, until it ends."""
    while True:
        asked = engine.call(process, "output", group="sync")
        while not _done(asked):
            while signals:
                engine.call(process, "signal", signals.pop(0), group="control")
        parts, code = asked.result()
        for descriptor, data in parts:
            stream = sys.stdout if descriptor == 1 else sys.stderr
            stream.buffer.write(data)
            stream.flush()
        if code is not None:
            return code if code >= 0 else _killed(-code)


def _killed(number: int) -> int:
    return last_word(
        f"the trainer's process was killed by {signal.Signals(number).name}: the same command continues from the last "
        "checkpoint",
        STOPPED,
    )


def _done(asked: Future) -> bool:
    """Waits a little for a result; signals are handled in the meantime."""
    try:
        asked.exception(LOOK)
    except TimeoutError:
        return False
    return True


@contextmanager
def _noted() -> Iterator[list[int]]:
    """Appends signals to a list in this block. Ray's own handlers would abort the process."""
    found: list[int] = []
    before = {number: signal.signal(number, lambda n, _: found.append(n)) for number in SIGNALS}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal() -> tuple[int, int] | None:
    """(columns, lines) of the terminal that has the output of this process; None if a stream is no terminal."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return tuple(shutil.get_terminal_size())


class TrainerProcess:
    """An actor that runs the trainer's process, in which JAX and signals work as in any other one.

    Args:
      command: of the process.
      environment: variables in addition to this process's own.
      folder: its working directory.
      path: folders for PYTHONPATH.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: str, path: list[str]
    ):
        self._command, self._folder = command, folder
        self._environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join(path)}

    def __repr__(self) -> str:
        """The name before each line of its output."""
        return "trainer"

    def start(self, terminal: tuple[int, int] | None) -> None:
        """Starts the process; with `terminal`, (columns, lines), its output is a terminal of that size."""
        if terminal is None:
            streams = [os.pipe(), os.pipe()]
        else:
            streams = [pty.openpty()]
            termios.tcsetwinsize(streams[0][1], terminal[::-1])
        writes = [streams[0][1], streams[-1][1]]
        self._reads = {number: read for number, (read, _) in enumerate(streams, start=1)}
        # Its input is never written to: it ends as soon as this process does.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=writes[0],
            stderr=writes[1],
            cwd=self._folder if os.path.isdir(self._folder) else None,
            env=self._environment,
            start_new_session=True,  # a terminal's Ctrl-C reaches it through the driver alone
        )
        for write in set(writes):
            os.close(write)

    def output(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """The next output, as (1 or 2, bytes), and at its end the exit code, which is negative after a signal."""
        while self._reads:
            readable, _, _ = select.select(list(self._reads.values()), [], [])
            found = []
            for number, read in list(self._reads.items()):
                if read not in readable:
                    continue
                try:
                    data = os.read(read, 1 << 16)
                except OSError:  # a terminal whose process has ended
                    data = b""
                if data:
                    found.append((number, data))
                else:
                    os.close(self._reads.pop(number))
            if found:
                return found, None
        return [], self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)


def cluster_address() -> str | None:
    """The cluster's address if this is the trainer's process, which a driver has started; else None.

    From this call on the process ends when the driver is gone.
    """
    address = os.environ.pop(ADDRESS, None)
    if address is not None:
        # Processes of Ray block signals for their children.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_ends_with_driver, name="driver", daemon=True).start()
    return address


def _ends_with_driver() -> None:
    while os.read(0, 1):
        pass
    leave(
        last_word(
            "the driver is gone: the same command continues from the last checkpoint", STOPPED
        )
    )
