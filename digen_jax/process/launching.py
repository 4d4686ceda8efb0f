"""What every launch script does before the first array: devices, compile cache, quiet logs."""

import os
import pathlib
import re
import socket
import sys
import tempfile
import threading
import time
from typing import NamedTuple

import jax
from absl import logging

from digen_jax.errors import ConfigError
from digen_jax.process import clusters, team
from digen_jax.process.ending import abort_later, leave
from digen_jax.process.memory import keep_freed_memory


def _user_cache() -> pathlib.Path:
    """The user's cache folder; one in the folder for temporary files if the user has no home that can be written."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(given)
    home = os.path.expanduser("~")  # unchanged if neither HOME nor the system knows it
    if os.path.isabs(home) and os.access(home, os.W_OK):
        return pathlib.Path(home, ".cache")
    return pathlib.Path(tempfile.gettempdir(), f"cache-{os.getuid()}")


CACHE = _user_cache() / "digen_jax/xla"
# Every program, however small: a second start compiles nothing.
KEPT = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
MOST_CPU_DEVICES = 256  # more would take minutes to start
# Seconds that processes wait for one another at the start, and between two lines about it.
MEETING, WORD = 300, 30


def prepare(cpu_devices: int = 1) -> None:
    """Sets up virtual CPU devices (used where there is no accelerator) and a compile cache between runs.

    Devices that XLA_FLAGS asks for, and settings of the cache in JAX's own variables, take precedence. Without an
    accelerator the process keeps memory that it frees (`memory.keep_freed_memory`).
    Must be called before JAX starts.
    """
    keep_freed_memory()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(CACHE))
    for name, value in KEPT.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    logging.set_verbosity(logging.ERROR)  # orbax warns of things that a user cannot change
    # transformers advises to install PyTorch, which training does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def describe_cache() -> str:
    """One line for the console: where the compile cache lies, and the size of its files if they are local."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return "compiled programs are not kept for the next start"
    files = [entry for entry in pathlib.Path(folder).glob("*") if entry.is_file()]
    size = f" ({sum(file.stat().st_size for file in files) / 2**20:.1f} MiB)" if files else ""
    return f"compiled programs are kept in {folder}{size}"


class Place(NamedTuple):
    """Which of several processes this one is, and where the first one listens."""

    host: str
    port: int
    processes: int
    process: int
    devices: tuple[int, ...] = ()  # the GPUs that are its own, of those it sees; (): all
    # (first, number) of the processes that it works with, if several workers share the job; (): all
    team: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """The first process's host:port."""
        return f"{_bracketed(self.host)}:{self.port}"


def detected(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    seconds: float = MEETING,
) -> Place | None:
    """Which process this is, from the command line or the cluster; None for all three: it runs alone.

    It starts nothing and reaches no other process; JAX may start before or after.

    Args:
      coordinator: "host:port", where the first process listens, or "auto" where JAX detects all three by
        itself (Slurm, Open MPI, Kubernetes, TPU slices).
      processes: how many there are.
      process: which of them this is; 0 is the first.
      seconds: for the cluster's names of hosts.

    Raises:
      ConfigError: one of them is missing or wrong, or nothing is detected.
    """
    if coordinator is None:
        if (processes, process) != (None, None):
            raise ConfigError(
                "--processes and --process need the first one's --coordinator=host:port"
            )
        return None
    if coordinator == "auto":
        coordinator, processes, process = clusters.ask(processes, process, seconds)
    elif None in (processes, process):
        raise ConfigError(
            "--coordinator=host:port needs --processes, how many there are, and --process, which of "
            "them this is, from 0; or set --coordinator=auto where a cluster tells"
        )
    address = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", coordinator)
    if address is None or not 0 < int(address[2]) < 2**16:
        raise ConfigError(
            f"--coordinator={coordinator} must be auto or the first process's HOST:PORT, such as 10.0.0.1:1234"
        )
    if not 0 <= process < processes:
        raise ConfigError(
            f"--process={process} must be one of the --processes={processes}, which are counted from 0"
        )
    return Place(address[1], int(address[2]), processes, process, clusters.own_devices())


def join(
    coordinator: str | None, processes: int | None, process: int | None, seconds: float = MEETING
) -> None:
    """Joins this process to others in one job of `jax.distributed`; None for all three: it runs alone.

    Must be called before JAX starts.

    Args:
      coordinator: as in `detected`.
      processes: as in `detected`.
      process: as in `detected`.
      seconds: time for the others to come, after which this process ends with code 2.

    Raises:
      ConfigError: as in `detected`, or the first process cannot be reached.
    """
    place = detected(coordinator, processes, process, seconds)
    if place is not None:
        join_job(place, seconds)


def join_job(place: Place, seconds: float = MEETING) -> None:
    """As `join`, of a place that is known.

    Raises:
      ConfigError: the first process cannot be reached.
    """
    if place.process:
        reach(place.host, place.port, seconds)
    elif place.processes > 1:
        words = f"waiting at {place.address} for {place.processes - 1} more processes, at most {seconds:g} s"
        print(words, file=sys.stderr, flush=True)
    # A process that gets a signal to stop tells the first one, which decides when (see runtime.orders).
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    abort_later()
    # JAX aborts the process with a page of text where the others do not come in time: this ends it before.
    late = threading.Timer(seconds, _give_up, (place, seconds))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            place.address,
            place.processes,
            place.process,
            local_device_ids=place.devices,  # even if there are none: JAX would choose one
            initialization_timeout=int(seconds) + 60,
        )
    except ValueError as error:
        raise ConfigError(f"--coordinator={place.address} does not work: {error}") from error
    finally:
        late.cancel()
    if place.team:
        team.form(*place.team)


def _give_up(place: Place, seconds: float) -> None:
    """Ends this process, whose main thread is blocked in JAX."""
    name = pathlib.Path(sys.argv[0]).name
    words = (
        f"--coordinator={place.address}: not all processes have come in {seconds:g} s: start as many as --processes "
        "says, each with its own --process"
    )
    if place.team:  # Ray starts them
        words = (
            f"--one_job: not all {place.processes} processes have started in {seconds:g} s: see `ray status` for free "
            "resources, or leave --one_job out, so that rollout workers can join later"
        )
    print(f"{name}: {words}", file=sys.stderr, flush=True)
    leave(2)


def reach(host: str, port: int, seconds: float, pause: float = 1) -> None:
    """Returns as soon as a process listens at a port; prints from time to time that it waits, and why.

    Raises:
      ConfigError: no process listened within `seconds`. JAX itself would wait silently, and then abort.
    """
    begin = said = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5, seconds)).close()
            return
        except OSError as error:
            reason, now = error, time.monotonic()
        if now - begin > seconds:
            raise ConfigError(
                f"--coordinator={host}:{port} was not reached in {seconds:g} s ({reason}): check the address, and "
                "that the first process (--process=0) has been started"
            ) from reason
        if said == begin or now - said > WORD:
            words = (
                f"waiting for the first process at {host}:{port} ({reason}), at most {seconds:g} s"
            )
            print(words, file=sys.stderr, flush=True)
            said = now
        time.sleep(pause)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
