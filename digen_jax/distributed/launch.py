"""`launch/train.py --ray=...`: starts the trainer's processes on the cluster, and forwards output and signals.

The processes run the same command. The first one connects to the cluster and starts the other workers, which end with
it. All processes end with this driver.
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
from concurrent.futures import wait
from contextlib import ExitStack
from typing import NamedTuple

from digen_jax.config.sections import AUTO
from digen_jax.config.train_config import TrainConfig
from digen_jax.distributed import engine as ray_engine
from digen_jax.distributed.engine import AGAIN, POLL, Actor, ProcessDied, RayEngine
from digen_jax.distributed.transfer import Mailbox
from digen_jax.distributed.worker_process import check_same, fingerprints
from digen_jax.errors import ConfigError, check_divides
from digen_jax.process.job import Place
from digen_jax.process.shutdown import SIGNALS, STOPPED, exit_now, log_fatal

PART = "DIGEN_JAX_RAY_TRAINER"  # `TrainerPart` as JSON, set in the trainer's processes
ENDING = 5.0  # seconds for the trainer's processes to exit after the first of them


class TrainerPart(NamedTuple):
    """Arguments of a trainer process."""

    address: str  # cluster address
    mailbox: str  # name of the `Mailbox` actor
    files: dict[str, str]  # `fingerprints` of the driver
    devices: str  # accelerator, such as GPU; "" means virtual CPU devices
    place: Place | None = None  # place in a JAX job, if any
    one_job: bool = False  # whether rollout workers share the trainer's JAX job


def check(config: TrainConfig, place: tuple[str | int | None, ...], one_job: bool) -> None:
    """Checks that a config can run with workers in other processes.

    `place` has the values of --coordinator, --processes and --process.

    Raises:
      ConfigError: The config or an option is unsupported with --ray.
    """
    rollout, trainer = config.placement.meshes
    if place != (None, None, None):
        raise ConfigError("--ray starts all processes: omit --coordinator, --processes, --process")
    if config.algorithm.given_images:
        raise ConfigError(
            f"config.algorithm.name = {config.algorithm.name!r} trains image files, which Ray's workers do not read: "
            "omit --ray"
        )
    if config.placement.mode == AUTO:
        raise ConfigError(
            "config.placement.mode = 'auto' plans for one process: with --ray set the sizes in "
            "config.placement.rollout and config.placement.trainer"
        )
    if not rollout.data and trainer.workers == 1:
        raise ConfigError(
            "config.placement.rollout.data = 0 and config.placement.trainer.workers = 1 mean a single worker: with "
            "--ray set the first to 1 or more or the second to 2 or more, or leave --ray out"
        )
    if trainer.workers > 1 and (one_job or trainer.hosts > 1):
        other = "--one_job" if one_job else f"config.placement.trainer.hosts = {trainer.hosts}"
        raise ConfigError(
            f"config.placement.trainer.workers = {trainer.workers} needs one process for each training worker: set it "
            f"to 1, or leave {other} out"
        )
    if one_job and rollout.max_workers > rollout.workers:
        raise ConfigError(
            f"config.placement.rollout.max_workers = {rollout.max_workers}, but no worker can join a JAX job later: "
            "set it to 0 with --one_job"
        )
    why = "as its processes have equal numbers of devices"
    for name, axes in config.placement.meshes._asdict().items():
        hosts, devices = f"config.placement.{name}.hosts", f"the devices of config.placement.{name}"
        check_divides(hosts, axes.hosts, devices, axes.devices, why)


def run(config: TrainConfig, workdir: str, address: str, is_open: bool, one_job: bool) -> int:
    """Runs this process's command in the trainer's processes on the cluster; returns the first one's exit code.

    The workdir is on a disk that all trainer processes share. The address "local" starts a cluster on this machine,
    which ends with this process. See launch/train.py for --ray_open (`is_open`) and --one_job.

    Raises:
      ConfigError: The cluster is not reachable, has no token, or is too small.
    """
    rollout, trainer = config.placement.meshes
    sampling = max(rollout.workers, rollout.max_workers) * rollout.hosts if rollout.data else 0
    processes = trainer.hosts * trainer.workers + sampling
    engine = RayEngine(address, show=False, cpus=max(os.cpu_count() or 1, processes))
    engine.check_secure(address, is_open)
    kinds = () if os.environ.get("JAX_PLATFORMS") == "cpu" else ("TPU", "GPU")
    kind = next((kind for kind in kinds if engine.most(kind)), "")
    if kind:
        check_devices(config, engine, kind)
    os.makedirs(workdir, exist_ok=True)  # checked again on the trainer's nodes
    given = [sys.executable, *sys.argv], *ray_engine.surroundings()
    part = TrainerPart(engine.address, f"trainer {uuid.uuid4()}", fingerprints(config), kind)
    each = {kind: trainer.devices // trainer.hosts} if kind else {}
    actors = engine.start(TrainerProcess, [given] * trainer.hosts, each, part.mailbox)
    terminal = sys.stdout.isatty() and sys.stderr.isatty() and tuple(shutil.get_terminal_size())
    signals: list[int] = []
    with ExitStack() as stack:
        stack.callback(engine.close)
        for number in SIGNALS:  # Ray's handlers would abort the process
            before = signal.signal(number, lambda found, _: signals.append(found))
            stack.callback(signal.signal, number, before)
        try:
            started = [engine.coordinator_address(actor) for actor in actors]
            needed = f"{len(actors)} times a free CPU core"
            needed += f" and {each[kind]} free {kind}s" if kind else ""
            ray_engine.wait_for_resources(started, "the trainer", needed, lambda: bool(signals))
            if signals:
                return 128 + signals[0]
            host, port = started[0].result()
            job = trainer.hosts + one_job * rollout.workers * rollout.hosts
            for process, actor in enumerate(actors):
                if job > 1:
                    group = (0, trainer.hosts) if one_job else ()
                    place = Place(host, port, job, process, (), group)
                    part = part._replace(place=place, one_job=one_job)
                engine.call(actor, "start", terminal or None, part, group="work").result()
            return _follow(engine, actors, signals)
        except ProcessDied as error:
            return log_fatal(f"a process of the trainer died ({error}): {AGAIN}", STOPPED)


def check_devices(config: TrainConfig, engine: RayEngine, kind: str) -> None:
    """Raises ConfigError if the cluster has too few accelerators, or no node has enough for one process."""
    rollout, trainer = config.placement.meshes
    there = [int(have.get(kind, 0)) for _, have in engine.nodes]
    needed = trainer.workers * trainer.devices + rollout.workers * rollout.devices
    most = engine.most(kind)
    if needed > most:
        raise ConfigError(
            f"config.placement needs {needed} {kind}s and the cluster has at most {most}: reduce "
            "config.placement.rollout or config.placement.trainer, or add nodes"
        )
    if most > sum(there):  # an autoscaler may add nodes of any size
        return
    for name, axes in config.placement.meshes._asdict().items():
        if (each := axes.devices // axes.hosts) > max(there):
            raise ConfigError(
                f"config.placement.{name} has {each} {kind}s in each process and no node has more than {max(there)}: "
                f"set config.placement.{name}.hosts to {-(-axes.devices // max(there))} or more"
            )


def _follow(engine: RayEngine, actors: list[Actor], signals: list[int]) -> int:
    """Prints the output of trainer processes, forwards signals to the first one and returns its exit code."""
    pending = {actor: engine.call(actor, "output", group="sync") for actor in actors}
    codes: dict[Actor, int] = {}
    until = float("inf")  # deadline after the first exit
    while pending and time.monotonic() < until:
        wait(pending.values(), POLL, "FIRST_COMPLETED")
        while signals:
            engine.call(actors[0], "signal", signals.pop(0), group="control")
        for actor in [actor for actor, one in pending.items() if one.done()]:
            parts, code = pending.pop(actor).result()
            for descriptor, data in parts:
                stream = sys.stdout if descriptor == 1 else sys.stderr
                stream.buffer.write(data)
                stream.flush()
            if code is None:
                pending[actor] = engine.call(actor, "output", group="sync")
            else:
                codes[actor] = code
                until = min(until, time.monotonic() + ENDING)
    first = codes.get(actors[0], -signal.SIGKILL)
    if first >= 0:  # other processes may not have exited yet
        return first
    killed = [-code for code in codes.values() if code < 0]
    why = f"was killed by {signal.Signals(killed[0]).name}" if killed else "has failed"
    return log_fatal(f"a process of the trainer {why}: {AGAIN}", STOPPED)


class TrainerProcess(Mailbox):
    """Actor that runs `command` as a subprocess, so that JAX and signals work as usual; see `surroundings`."""

    def __init__(self, command: list[str], variables: dict[str, str], folder: str, path: list[str]):
        super().__init__()
        self._command, self._folder = command, folder
        self._environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(path)}

    def __repr__(self) -> str:
        """Prefix of each line of output."""
        return "trainer"

    def start(self, terminal: tuple[int, int] | None, part: TrainerPart) -> None:
        """Starts the process; with `terminal` = (columns, lines), its output is a pseudo-terminal of that size."""
        if terminal is None:
            streams = [os.pipe(), os.pipe()]
        else:
            streams = [pty.openpty()]
            termios.tcsetwinsize(streams[0][1], terminal[::-1])
        writes = [streams[0][1], streams[-1][1]]
        self._reads = {read: number for number, (read, _) in enumerate(streams, start=1)}
        # Stdin gets no data, only EOF when this process ends: see `trainer_part`.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=writes[0],
            stderr=writes[1],
            cwd=self._folder if os.path.isdir(self._folder) else None,
            env=self._environment | {PART: json.dumps(part)},
            start_new_session=True,  # the driver alone forwards Ctrl-C
        )
        for write in set(writes):
            os.close(write)

    def output(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Returns (new output as (descriptor, bytes), exit code at the end or None); codes of signals are negative."""
        while self._reads:
            found = []
            for read in select.select(list(self._reads), [], [])[0]:
                try:
                    data = os.read(read, 1 << 16)
                except OSError:  # EOF of a pseudo-terminal
                    data = b""
                if data:
                    found.append((self._reads[read], data))
                else:
                    del self._reads[read]
                    os.close(read)
            if found:
                return found, None
        return [], self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)


def trainer_part() -> TrainerPart | None:
    """Returns the part of this process if it is a trainer process on Ray, otherwise None.

    A trainer process ends with its driver from this call on.
    """
    given = os.environ.pop(PART, None)
    if given is None:
        return None
    # Children of Ray's processes inherit blocked signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_ends_with_driver, name="driver", daemon=True).start()
    part = TrainerPart(*json.loads(given))
    return part._replace(place=part.place and Place(*part.place))


def check_part(part: TrainerPart, config: TrainConfig, workdir: str) -> None:
    """Checks that a trainer process, possibly on another host, has the driver's files.

    Raises:
      ConfigError: A file differs, or the workdir is missing.
    """
    check_same(part.files, config)
    if not os.path.isdir(workdir):
        missing = f"--workdir={workdir} does not exist on {socket.gethostname()}, a trainer's host"
        raise ConfigError(f"{missing}: give a folder on a disk that all nodes share")


def _ends_with_driver() -> None:
    while os.read(0, 1):
        pass
    exit_now(log_fatal(f"the driver has ended: {AGAIN}", STOPPED))
