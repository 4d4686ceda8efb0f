"""`launch/train.py --ray=...`: starts the trainer's processes on the cluster, and passes output and signals on.

They run the same command. The first one connects to the cluster by itself and starts the rollout workers, so that these
end with it. All end with this driver.
"""

import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import NamedTuple

from digen_jax.config.recipe import Recipe
from digen_jax.config.sections import AUTO
from digen_jax.distributed.engine import (
    Actor,
    Engine,
    Lost,
    RayEngine,
    Resources,
    check_secure,
    forwarded,
    python_path,
)
from digen_jax.distributed.files import check_same, fingerprints
from digen_jax.distributed.transfer import Mailbox
from digen_jax.engine.placement import APART, check_one_mesh
from digen_jax.errors import ConfigError, check_divides
from digen_jax.process.ending import STOPPED, last_word, leave
from digen_jax.process.interrupt import SIGNALS
from digen_jax.process.launching import Place

PART = "DIGEN_JAX_RAY_TRAINER"  # set in the trainer's processes: a `TrainerPart` as JSON
LOOK = 0.5  # seconds between two looks at signals
PENDING = 30.0  # seconds between two lines about a cluster without resources for the trainer
ENDING = 5.0  # seconds for the trainer's other processes to end after one has


class TrainerPart(NamedTuple):
    """What a process of the trainer knows: the cluster's address, and of several processes which one it is."""

    address: str
    mailbox: str  # the name of the actor that passes stored objects on
    files: dict[str, str]  # the driver's: see `fingerprints`
    devices: str  # the kind of accelerator, such as GPU; "": virtual CPU devices
    place: Place | None = None
    one_job: bool = False  # whether the rollout workers are in the trainer's job of JAX


def check(recipe: Recipe, place: tuple[str | int | None, ...], one_job: bool) -> None:
    """Checks that a recipe can run with rollout workers in other processes.

    Args:
      recipe: of the run.
      place: the values of --coordinator, --processes and --process.
      one_job: the value of --one_job.

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
    check_one_mesh(recipe.placement.meshes, APART)
    rollout = recipe.placement.meshes.rollout
    if one_job and rollout.max_workers > rollout.workers:
        raise ConfigError(
            f"config.placement.rollout.max_workers = {rollout.max_workers}, but no process can join a JAX job later: "
            "set it to 0 with --one_job"
        )
    for name, axes in recipe.placement.meshes._asdict().items():
        check_divides(
            f"config.placement.{name}.hosts",
            axes.hosts,
            f"the number of devices of config.placement.{name}",
            axes.devices,
            "as its processes have equally many devices",
        )


def check_without_ray(recipe: Recipe, options: dict[str, bool]) -> None:
    """Refuses fields, and options by their names, that only --ray uses. Raises ConfigError."""
    for name, given in options.items():
        if given:
            raise ConfigError(f"--{name} needs --ray: add --ray=local or a cluster's address")
    rollout, trainer = recipe.placement.meshes
    for name, given, unused in (
        ("rollout.hosts", rollout.hosts, 1),
        ("rollout.max_workers", rollout.max_workers, 0),
        ("trainer.hosts", trainer.hosts, 1),
    ):
        if given != unused:
            raise ConfigError(
                f"config.placement.{name} = {given}, but only --ray starts other processes: add --ray=local or a "
                f"cluster's address, or set it to {unused}"
            )


def run(
    recipe: Recipe, workdir: str, address: str, is_open: bool = False, one_job: bool = False
) -> int:
    """Runs this process's own command in the trainer's processes on the cluster; returns the first one's exit code.

    Args:
      recipe: that was checked.
      workdir: the run's folder, which all processes of the trainer must see.
      address: of the cluster; "local" starts one on this machine, which ends with this process.
      is_open: whether a cluster of several hosts needs no token.
      one_job: whether all processes are one job of JAX.

    Raises:
      ConfigError: there is no such cluster, it has no token, or it is too small.
    """
    rollout, trainer = recipe.placement.meshes
    workers = rollout.workers
    processes = trainer.hosts + max(workers, rollout.max_workers) * rollout.hosts
    engine = RayEngine(address, show=False, cpus=max(os.cpu_count() or 1, processes))
    check_secure(engine, address, is_open)
    kind = accelerator(engine)
    if kind:
        check_devices(recipe, engine, kind)
    os.makedirs(workdir, exist_ok=True)  # a node that does not see it has another disk
    given = [sys.executable, *sys.argv], forwarded(), os.getcwd(), python_path()
    part = TrainerPart(engine.address, f"trainer {uuid.uuid4()}", fingerprints(recipe), kind)
    resources = Resources(kind, trainer.devices // trainer.hosts if kind else 0)
    actors = engine.start(TrainerProcess, [given] * trainer.hosts, resources, part.mailbox)
    try:
        with _noted() as signals:
            if code := _wait_for_resources(engine, actors, resources, signals):
                return code
            job = trainer.hosts + one_job * workers * rollout.hosts
            host, port = engine.coordinator_address(actors[0]).result()
            for number, actor in enumerate(actors):
                if job > 1:
                    team = (0, trainer.hosts) if one_job else ()
                    place = Place(host, port, job, number, (), team)
                    part = part._replace(place=place, one_job=one_job)
                engine.call(actor, "start", _terminal(), part, group="work").result()
            return _follow(engine, actors, signals)
    except Lost as error:
        return _ended(f"is lost ({error})")
    finally:
        engine.close()


def accelerator(engine: RayEngine) -> str:
    """The kind of accelerator that the cluster has, or can have, and the environment does not exclude; "": none."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return ""
    return next((kind for kind in ("TPU", "GPU") if engine.most(kind)), "")


def check_devices(recipe: Recipe, engine: RayEngine, kind: str) -> None:
    """Raises ConfigError if the cluster cannot have enough accelerators, or no node has enough for one process."""
    rollout, trainer = recipe.placement.meshes
    there = [int(have.get(kind, 0)) for _, have in engine.nodes]
    needed, most = trainer.devices + rollout.workers * rollout.devices, engine.most(kind)
    if needed > most:
        raise ConfigError(
            f"config.placement needs {needed} {kind}s and the cluster has at most {most}: make "
            "config.placement.rollout or config.placement.trainer smaller, or add nodes"
        )
    if most > sum(there):  # an autoscaler may add nodes of any size
        return
    for name, axes in recipe.placement.meshes._asdict().items():
        if axes.devices // axes.hosts > max(there):
            raise ConfigError(
                f"config.placement.{name} has {axes.devices // axes.hosts} {kind}s in each process and no node has "
                f"more than {max(there)}: set config.placement.{name}.hosts to {-(-axes.devices // max(there))} or more"
            )


def _wait_for_resources(
    engine: Engine, actors: list[Actor], each: Resources, signals: list[int]
) -> int:
    """Waits until the cluster has resources for the trainer's processes, which may take as long as other jobs run.

    Returns:
      The exit code of a signal that came meanwhile, or 0.
    """
    begin = reported = time.monotonic()
    asked = [engine.coordinator_address(actor) for actor in actors]
    while not all(map(_done, asked)):
        if signals:
            return 128 + signals[0]
        if time.monotonic() - reported > PENDING:
            reported = time.monotonic()
            devices = f" and {each.devices} free {each.kind}s" if each.devices else ""
            print(
                f"the trainer has waited {reported - begin:.0f} s for {len(actors)} times a free CPU core{devices}: "
                "see `ray status`",
                file=sys.stderr,
                flush=True,
            )
    return 0


def _follow(engine: Engine, actors: list[Actor], signals: list[int]) -> int:
    """Prints the output of the trainer's processes and passes signals to the first one, until it ends."""
    asked = {actor: engine.call(actor, "output", group="sync") for actor in actors}
    codes: dict[Actor, int] = {}
    until = float("inf")  # when all others are ended
    while asked and time.monotonic() < until:
        wait(asked.values(), LOOK, "FIRST_COMPLETED")
        while signals:
            engine.call(actors[0], "signal", signals.pop(0), group="control")
        for actor in [actor for actor, one in asked.items() if one.done()]:
            parts, code = asked.pop(actor).result()
            for descriptor, data in parts:
                stream = sys.stdout if descriptor == 1 else sys.stderr
                stream.buffer.write(data)
                stream.flush()
            if code is None:
                asked[actor] = engine.call(actor, "output", group="sync")
            else:
                codes[actor] = code
                until = min(until, time.monotonic() + ENDING)
    first = codes.get(actors[0], -signal.SIGKILL)
    if first >= 0:  # the others may not have noticed that it has ended
        return first
    killed = [-code for code in codes.values() if code < 0]
    return _ended(f"was killed by {signal.Signals(killed[0]).name}" if killed else "has failed")


def _ended(why: str) -> int:
    return last_word(
        f"a process of the trainer {why}: the same command continues from the last checkpoint",
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


class TrainerProcess(Mailbox):
    """An actor that runs a process of the trainer, in which JAX and signals work as in any other one.

    Args:
      command: of the process.
      environment: variables in addition to this process's own.
      folder: its working directory.
      path: folders for PYTHONPATH.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: str, path: list[str]
    ):
        super().__init__()
        self._command, self._folder = command, folder
        self._environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join(path)}

    def __repr__(self) -> str:
        """The name before each line of its output."""
        return "trainer"

    def start(self, terminal: tuple[int, int] | None, part: TrainerPart) -> None:
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
            env=self._environment | {PART: json.dumps(part)},
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


def trainer_part() -> TrainerPart | None:
    """Which of the trainer's processes this is, if a driver has started it; else None.

    From this call on the process ends when the driver is gone.
    """
    given = os.environ.pop(PART, None)
    if given is None:
        return None
    # Processes of Ray block signals for their children.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_ends_with_driver, name="driver", daemon=True).start()
    *found, place, one_job = json.loads(given)
    return TrainerPart(*found, place and Place(*place), one_job)


def check_part(part: TrainerPart, recipe: Recipe, workdir: str) -> None:
    """Checks that a process of the trainer, maybe on another host than the driver, has the same files.

    Raises:
      ConfigError: names the file that is another one here.
    """
    check_same(part.files, recipe, "the driver's")
    if not os.path.isdir(workdir):
        raise ConfigError(
            f"--workdir={workdir} does not exist on {socket.gethostname()}, where a process of the trainer runs: "
            "give a folder on a disk that all nodes share"
        )


def _ends_with_driver() -> None:
    while os.read(0, 1):
        pass
    leave(
        last_word(
            "the driver is gone: the same command continues from the last checkpoint", STOPPED
        )
    )
