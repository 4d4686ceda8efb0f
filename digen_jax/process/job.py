"""Sets up a process before its first array: devices, memory, compile cache, and its place in a `jax.distributed` job.

Where several workers share a job, the processes of each work together in a group.
"""

import ctypes
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import re
import socket
import sys
import tempfile
import threading
import time
import warnings
from typing import NamedTuple

import jax
from absl import logging
from jax._src import distributed  # JAX has no public way to it

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped, abort_later, exit_now

START_TIMEOUT = 300  # seconds that processes wait for one another at the start
REPORT_PERIOD = 30  # seconds between two lines about it
LONGEST_WAIT = 10**6  # seconds, for waits without a deadline
MOST_CPU_DEVICES = 256  # more would take minutes to start


def _user_cache() -> pathlib.Path:
    """Returns the user's cache folder, or a temporary one if the user has no home that can be written."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(given)
    home = os.path.expanduser("~")  # unchanged if neither HOME nor the system knows it
    if os.path.isabs(home) and os.access(home, os.W_OK):
        return pathlib.Path(home, ".cache")
    return pathlib.Path(tempfile.gettempdir(), f"cache-{os.getuid()}")


CACHE = _user_cache() / "digen_jax/xla"
# Every program, however small: a second start compiles nothing.
CACHE_OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def prepare(cpu_devices: int = 1) -> None:
    """Sets up virtual CPU devices (used without an accelerator) and a compile cache. Must run before JAX starts.

    XLA_FLAGS and JAX's own variables take precedence.
    """
    keep_freed_memory()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(CACHE))
    for name, value in CACHE_OPTIONS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    logging.set_verbosity(logging.ERROR)  # orbax warns of things that a user cannot change
    # transformers advises to install PyTorch, which training does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def describe_cache() -> str:
    """Returns one line for the console: the folder of the compile cache, and the size of its files if local."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return "compiled programs are not kept for the next start"
    files = [entry for entry in pathlib.Path(folder).glob("*") if entry.is_file()]
    size = f" ({sum(file.stat().st_size for file in files) / 2**20:.1f} MiB)" if files else ""
    return f"compiled programs are kept in {folder}{size}"


def keep_freed_memory() -> None:
    """Lets a process that computes on CPUs with glibc reuse freed memory. Must run before JAX starts its threads.

    XLA allocates a program's temporary arrays anew for every call. glibc maps blocks above 32 MB from the kernel and
    unmaps them when they are freed, so that every call zeroes all pages again. These options disable such maps and keep
    up to 2 GiB of free memory, in one arena, because others have at most 64 MB and would map larger blocks.
    """
    # With accelerators, arrays do not come from malloc.
    accelerated = importlib.metadata.entry_points(group="jax_plugins")
    if sys.platform != "linux" or accelerated or importlib.util.find_spec("libtpu") is not None:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # M_ARENA_MAX, M_MMAP_MAX and M_TRIM_THRESHOLD of glibc's malloc.h
        for parameter, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):
            mallopt(parameter, value)


# ------------------------------------------------------------------------------------ joining a job


class Place(NamedTuple):
    """The place of this process in a job.

    Attributes:
      host: Host at which the first process listens.
      port: Its port.
      processes: Number of processes of the job.
      process: Number of this one.
      devices: The GPUs that this process uses, of those that it sees. Empty means all.
      group: (first, number) of the processes that it works with, if several workers share the job. Empty means all.
    """

    host: str
    port: int
    processes: int
    process: int
    devices: tuple[int, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """The first process's HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve_place(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    seconds: float = START_TIMEOUT,
) -> Place | None:
    """Returns the place of this process, from the command line or the cluster. Contacts no other process.

    Args:
      coordinator: HOST:PORT of the first process, or "auto" to detect all three values (Slurm, Open MPI, Kubernetes,
        TPU slices). None, as all three: this process runs alone, and the result is None.
      processes: Number of processes.
      process: Number of this process, from 0.
      seconds: Limit for resolving the cluster's host names.

    Raises:
      ConfigError: A value is missing or wrong, or nothing is detected.
    """
    if coordinator is None:
        if (processes, process) != (None, None):
            raise ConfigError("--processes and --process need --coordinator=HOST:PORT")
        return None
    if coordinator == "auto":
        coordinator, processes, process = _detect_cluster(processes, process, seconds)
    elif None in (processes, process):
        raise ConfigError(
            "--coordinator=HOST:PORT needs --processes, their number, and --process, the number of this one from 0; or "
            "set --coordinator=auto on a cluster"
        )
    address = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", coordinator)
    if address is None or not 0 < int(address[2]) < 2**16:
        raise ConfigError(
            f"--coordinator={coordinator} must be auto or the first process's HOST:PORT, such as 10.0.0.1:1234"
        )
    if not 0 <= process < processes:
        raise ConfigError(
            f"--process={process} must be at least 0 and below --processes={processes}"
        )
    return Place(address[1], int(address[2]), processes, process, own_devices())


def join(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    seconds: float = START_TIMEOUT,
) -> None:
    """Joins a job, unless this process runs alone: see `resolve_place` and `join_job`."""
    place = resolve_place(coordinator, processes, process, seconds)
    if place is not None:
        join_job(place, seconds)


def join_job(place: Place, seconds: float = START_TIMEOUT) -> None:
    """Joins a job of `jax.distributed`. Must run before JAX starts.

    If the other processes do not join in time, this process ends with code 2.

    Raises:
      ConfigError: The first process cannot be reached.
    """
    if place.process:
        wait_for_port(place.host, place.port, seconds)
    elif place.processes > 1:
        missing = f"{place.processes - 1} more processes"
        message = f"waiting at {place.address} for {missing}, at most {seconds:g} s"
        print(message, file=sys.stderr, flush=True)
    # A process that gets a signal notifies the first one, which decides when to stop (see `runtime.opening`).
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    abort_later()
    # JAX would abort with a page of text later.
    late = threading.Timer(seconds, _exit_late, (place, seconds))
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
    if place.group:
        set_group(*place.group)


def _exit_late(place: Place, seconds: float) -> None:
    """Ends this process, whose main thread is blocked in JAX."""
    name = pathlib.Path(sys.argv[0]).name
    message = (
        f"--coordinator={place.address}: not all processes have joined in {seconds:g} s: start as many as --processes, "
        "each with its own --process"
    )
    if place.group:  # Ray starts them
        message = (
            f"--one_job: not all {place.processes} processes have started in {seconds:g} s: see `ray status` for free "
            "resources, or leave --one_job out, so that rollout workers can join later"
        )
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    exit_now(2)


def wait_for_port(host: str, port: int, seconds: float, pause: float = 1) -> None:
    """Waits until a process listens at a port, and reports from time to time. JAX itself would wait silently.

    Raises:
      ConfigError: No process listened within `seconds`.
    """
    start, reported = time.monotonic(), -float("inf")
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5, seconds)).close()
            return
        except OSError as error:
            reason, now = error, time.monotonic()
        if now - start > seconds:
            raise ConfigError(
                f"--coordinator={host}:{port} was not reached in {seconds:g} s ({reason}): check the address, and "
                "that the first process (--process=0) has been started"
            ) from reason
        if now - reported > REPORT_PERIOD:
            message = (
                f"waiting for the first process at {host}:{port} ({reason}), at most {seconds:g} s"
            )
            print(message, file=sys.stderr, flush=True)
            reported = now
        time.sleep(pause)


# Variables of environments in which the detection finds nothing, and why.
_NOT_DETECTED = {
    "OMPI_COMM_WORLD_RANK": (
        "Open MPI 5 does not name the host of the first process: set --coordinator=HOST:PORT with that host's name, "
        "--processes=$OMPI_COMM_WORLD_SIZE and --process=$OMPI_COMM_WORLD_RANK"
    ),
    "SLURM_JOB_ID": "within a Slurm job start the command with srun",
    "KUBERNETES_SERVICE_HOST": "on Kubernetes install the package kubernetes (pip install 'jax[k8s]')",
}
_NO_CLUSTER = (
    "there is no Slurm, Open MPI, Kubernetes job or TPU slice here: set --coordinator=HOST:PORT"
)


def _detect_cluster(
    processes: int | None, process: int | None, seconds: float
) -> tuple[str, int | None, int | None]:
    """Returns (coordinator, processes, process), as JAX's private detection finds those that are not given.

    `JAX_COORDINATOR_ADDRESS` and `JAX_COORDINATOR_PORT` take precedence, as for `jax.distributed.initialize`.
    """
    from jax._src.clusters import ClusterEnv

    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below says what is missing
            address, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
                given, processes, process, (), None, int(seconds)
            )
    # Errors of environments, of Kubernetes' client and of requests have nothing in common.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--coordinator=auto does not work: {what}") from error
    if address is None:
        found = (why for name, why in _NOT_DETECTED.items() if name in os.environ)
        raise ConfigError(f"--coordinator=auto does not work: {next(found, _NO_CLUSTER)}")
    return address, processes, process


def own_devices() -> tuple[int, ...]:
    """Returns the GPUs that this process may use, by number among those that it sees. Empty means all.

    A process that is alone on its host uses all. Several that see the same ones (Slurm, Open MPI) get equal shares, in
    order. If each sees fewer than the job has there, `srun --gpus-per-task` or a script has divided them.
    `JAX_LOCAL_DEVICE_IDS` takes precedence, as for `jax.distributed.initialize`, which by itself would give each
    process one GPU.

    Raises:
      ConfigError: There are no equal shares.
    """
    if given := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        if not re.fullmatch(r"\d+(,\d+)*", given):
            raise ConfigError(f"JAX_LOCAL_DEVICE_IDS={given} must be numbers with commas between")
        return tuple(map(int, given.split(",")))
    local, count = _place_on_host()
    if count == 1:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return (local,)  # JAX's own rule: their number is not known
    seen = len([name for name in visible.split(",") if name])
    if seen < 2 or seen < int(os.environ.get("SLURM_GPUS_ON_NODE", 0)):
        return ()
    if seen % count:
        raise ConfigError(
            f"{seen} GPUs cannot be divided among {count} processes of a host: start another number there, or set "
            "JAX_LOCAL_DEVICE_IDS for each, such as 0,1"
        )
    share = seen // count
    return tuple(range(local * share, (local + 1) * share))


def _place_on_host() -> tuple[int, int]:
    """Returns (number of this process among those of this host, their count), or (0, 1) if nothing is detected."""
    have = os.environ
    if {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"} <= have.keys():
        return int(have["OMPI_COMM_WORLD_LOCAL_RANK"]), int(have["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if {"SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"} <= have.keys():
        # Such as 2(x3),1: two on each of three hosts, one on the fourth.
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", have["SLURM_STEP_TASKS_PER_NODE"]):
            counts += [int(count)] * int(times or 1)
        return int(have["SLURM_LOCALID"]), counts[int(have["SLURM_NODEID"])]
    return 0, 1


# ------------------------------------------------------------- the processes that work with this one

_barriers = itertools.count()  # all processes call the same ones, in order
_first = 0
_count: int | None = None  # None means all processes of the job


def set_group(first: int, count: int) -> None:
    """Makes this process work with `count` processes, of which `first` is the first one's number within the job."""
    global _first, _count
    _first, _count = first, count
    if count == 1:
        # Libraries that count the job's processes, such as orbax, would take arrays of this one for parts.
        jax.process_count = lambda backend=None: 1


def size() -> int:
    """Returns the number of processes that work together; 1 without a job."""
    state = distributed.global_state
    if state.client is None:
        return 1
    return state.num_processes if _count is None else _count


def is_first() -> bool:
    """Returns whether this process is the first of them."""
    return distributed.global_state.process_id == _first


def members() -> list[int] | None:
    """Returns their numbers within the job. None means all."""
    return None if _count is None else list(range(_first, _first + _count))


def several() -> bool:
    """Returns whether this run has more than one process."""
    return size() > 1


def barrier(what: str, seconds: float) -> None:
    """Waits until all processes reach this call; returns at once if there is only one.

    Args:
      what: The work that all have done by then, for the error message.
      seconds: The longest wait, which may be infinite.

    Raises:
      Stopped: Another process has not reached it in time, or has ended.
    """
    if not several():
        return
    limit = int(min(seconds, LONGEST_WAIT) * 1000)
    try:
        name, client = f"digen_jax/barrier/{next(_barriers)}", distributed.global_state.client
        client.wait_at_barrier(name, limit, process_ids=members())
    except jax.errors.JaxRuntimeError as error:
        why = "has ended"
        if "DEADLINE_EXCEEDED" in str(error):
            why = f"is not ready within {seconds:g} seconds (config.runtime.deadline)"
        raise Stopped(
            f"another process {why} after {what}: check its log, and start the same command on all again, which "
            "continues"
        ) from error
