"""Process setup before the first array: devices, memory, compile cache, and joining a `jax.distributed` job.

If several workers share a job, the processes of each worker form a group.
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
from typing import Any, NamedTuple, cast

import jax
from absl import logging
from jax._src import distributed  # not in JAX's public API

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped, abort_later, exit_now

START_TIMEOUT = 300  # seconds that processes wait for each other at the start
REPORT_PERIOD = 30  # seconds between reports of waiting
LONGEST_WAIT = 10**6  # seconds, for waits without a deadline
MOST_CPU_DEVICES = 256  # more would take minutes to start


def _user_cache() -> pathlib.Path:
    """Returns the user's cache folder, or a temporary one if the home folder is not writable."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(given)
    home = os.path.expanduser("~")  # unchanged if the home folder is unknown
    if os.path.isabs(home) and os.access(home, os.W_OK):
        return pathlib.Path(home, ".cache")
    return pathlib.Path(tempfile.gettempdir(), f"cache-{os.getuid()}")


CACHE = _user_cache() / "digen_jax/xla"
# Caches all programs, so that a restart compiles nothing.
CACHE_OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def prepare(cpu_devices: int = 1) -> None:
    """Sets up virtual CPU devices (used without an accelerator) and a compile cache. Must run before JAX starts.

    XLA_FLAGS and JAX's environment variables take precedence.
    """
    keep_freed_memory()
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(CACHE))
    for name, value in CACHE_OPTIONS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    logging.set_verbosity(logging.ERROR)  # orbax warnings are not actionable
    # Hides transformers' advice to install PyTorch, which is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def describe_cache() -> str:
    """Returns a one-line description of the compile cache: folder, and size if local."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return "compiled programs are not kept for the next start"
    files = [entry for entry in pathlib.Path(folder).glob("*") if entry.is_file()]
    size = f" ({sum(file.stat().st_size for file in files) / 2**20:.1f} MiB)" if files else ""
    return f"compiled programs are kept in {folder}{size}"


def keep_freed_memory() -> None:
    """Configures glibc's malloc to reuse freed memory on CPUs. Must run before JAX starts its threads.

    XLA allocates a program's temporary arrays for every call. glibc maps blocks above 32 MB from the kernel and unmaps
    them on free, so that every call zeroes all pages again. These options disable mmap and keep up to 2 GiB of free
    memory in a single arena, because secondary arenas have at most 64 MB and would map larger blocks.
    """
    # With accelerators, arrays are not allocated by malloc.
    accelerated = importlib.metadata.entry_points(group="jax_plugins")
    if sys.platform != "linux" or accelerated or importlib.util.find_spec("libtpu") is not None:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # M_ARENA_MAX, M_MMAP_MAX and M_TRIM_THRESHOLD from glibc's malloc.h
        for parameter, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):
            mallopt(parameter, value)


class Place(NamedTuple):
    """Place of this process in a `jax.distributed` job."""

    host: str  # of the coordinator (process 0)
    port: int  # of the coordinator
    processes: int  # number of processes in the job
    process: int  # index of this process
    devices: tuple[int, ...] = ()  # visible GPUs that this process uses; empty means all
    # (first index, number) of the processes of its worker, if several share the job; empty means all
    group: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve_place(
    coordinator: str | None, processes: int | None, process: int | None
) -> Place | None:
    """Returns the place of this process from the command line or the cluster, without contacting other processes.

    Args:
      coordinator: HOST:PORT of the coordinator, or "auto" to detect all three values (Slurm, Open MPI, Kubernetes,
        TPU slices). None means a single process, for which the result is None.
      processes: Number of processes.
      process: Index of this process.

    Raises:
      ConfigError: A value is missing or invalid, or no cluster is detected.
    """
    if coordinator is None:
        if (processes, process) != (None, None):
            raise ConfigError("--processes and --process need --coordinator=HOST:PORT")
        return None
    if coordinator == "auto":
        coordinator, processes, process = _detect_cluster(processes, process)
    if processes is None or process is None:
        raise ConfigError(
            "--coordinator=HOST:PORT needs --processes, their number, and --process, the number of this one from 0; or "
            "set --coordinator=auto on a cluster"
        )
    address = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", coordinator)
    if address is None or not 0 < int(address[2]) < 2**16:
        right = "auto or the first process's HOST:PORT, such as 10.0.0.1:1234"
        raise ConfigError(f"--coordinator={coordinator} must be {right}")
    if not 0 <= process < processes:
        raise ConfigError(f"--process={process} must be from 0 to below --processes={processes}")
    return Place(address[1], int(address[2]), processes, process, own_devices())


def join_job(place: Place, seconds: float = START_TIMEOUT) -> None:
    """Joins a `jax.distributed` job. Must run before JAX starts.

    If the other processes do not join in time, this process exits with code 2.

    Raises:
      ConfigError: The coordinator is not reachable.
    """
    if place.process:
        wait_for_port(place.host, place.port, seconds)
    elif place.processes > 1:
        missing = f"{place.processes - 1} more processes"
        message = f"waiting at {place.address} for {missing}, at most {seconds:g} s"
        print(message, file=sys.stderr, flush=True)
    # Signals are forwarded to the coordinator, which decides when to stop (see `runtime.opening`).
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    abort_later()
    # JAX would abort later, with a page of text.
    late = threading.Timer(seconds, _exit_late, (place, seconds))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            place.address,
            place.processes,
            place.process,
            local_device_ids=place.devices,  # also if empty: with None, JAX would choose one
            initialization_timeout=int(seconds) + 60,
        )
    except ValueError as error:
        raise ConfigError(f"--coordinator={place.address} does not work: {error}") from error
    finally:
        late.cancel()
    if place.group:
        set_group(*place.group)


def _exit_late(place: Place, seconds: float) -> None:
    """Exits while the main thread is blocked in JAX."""
    what = f"not all {place.processes} processes have joined in {seconds:g} s"
    if place.group:  # Ray starts them
        advice = "see `ray status` for free resources, or leave --one_job out"
        message = f"--one_job: {what}: {advice}, so that rollout workers can join later"
    else:
        advice = "start as many as --processes, each with its own --process"
        message = f"--coordinator={place.address}: {what}: {advice}"
    print(f"{pathlib.Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    exit_now(2)


def wait_for_port(host: str, port: int, seconds: float, pause: float = 1) -> None:
    """Waits until a process listens at a port, with progress reports. JAX itself would wait silently.

    Raises:
      ConfigError: No process listens within `seconds`.
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
            where = f"{host}:{port} ({reason}), at most {seconds:g} s"
            print(f"waiting for the first process at {where}", file=sys.stderr, flush=True)
            reported = now
        time.sleep(pause)


# Advice for environments in which detection fails, by environment variable.
_NOT_DETECTED = {
    "OMPI_COMM_WORLD_RANK": (
        "Open MPI 5 does not name the host of the first process: set --coordinator=HOST:PORT with that host's name, "
        "--processes=$OMPI_COMM_WORLD_SIZE and --process=$OMPI_COMM_WORLD_RANK"
    ),
    "SLURM_JOB_ID": "within a Slurm job start the command with srun",
    "KUBERNETES_SERVICE_HOST": "on Kubernetes install the package kubernetes (pip install 'jax[k8s]')",
}
_NO_CLUSTER = "no Slurm, Open MPI, Kubernetes job or TPU slice is here: set --coordinator=HOST:PORT"


def _detect_cluster(processes: Any, process: Any) -> tuple[str, Any, Any]:
    """Returns (coordinator, processes, process); JAX's private cluster detection finds the missing ones.

    `JAX_COORDINATOR_ADDRESS` and `JAX_COORDINATOR_PORT` take precedence, as in `jax.distributed.initialize`.
    """
    from jax._src.clusters import ClusterEnv

    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below names what is missing
            address, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
                given, processes, process, (), None, START_TIMEOUT
            )
    # Errors of environments, the Kubernetes client and requests have no common base class.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--coordinator=auto does not work: {what}") from error
    if address is None:
        found = (why for name, why in _NOT_DETECTED.items() if name in os.environ)
        raise ConfigError(f"--coordinator=auto does not work: {next(found, _NO_CLUSTER)}")
    return address, processes, process


def own_devices() -> tuple[int, ...]:
    """Returns the indices of the visible GPUs that this process uses. Empty means all.

    A single process per host uses all GPUs. Several processes that see the same GPUs (Slurm, Open MPI) get equal,
    consecutive shares. If each sees fewer GPUs than the job has on the host, `srun --gpus-per-task` or a script has
    already divided them. `JAX_LOCAL_DEVICE_IDS` takes precedence, as in `jax.distributed.initialize`, which would
    default to one GPU per process.

    Raises:
      ConfigError: The GPUs cannot be divided equally.
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
        return (local,)  # JAX's default, since the number of GPUs is unknown
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
    """Returns (local rank, local size) of this process on its host, or (0, 1) if not detected."""
    have = os.environ
    if {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"} <= have.keys():
        return int(have["OMPI_COMM_WORLD_LOCAL_RANK"]), int(have["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if {"SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"} <= have.keys():
        # For example, 2(x3),1 means two on each of three hosts, one on the fourth.
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", have["SLURM_STEP_TASKS_PER_NODE"]):
            counts += [int(count)] * int(times or 1)
        return int(have["SLURM_LOCALID"]), counts[int(have["SLURM_NODEID"])]
    return 0, 1


_barriers = itertools.count()  # all processes call the same barriers in order
_first = 0
_count: int | None = None  # None means all processes of the job


def set_group(first: int, count: int) -> None:
    """Sets this process's group: `count` consecutive processes of the job, from index `first`."""
    global _first, _count
    _first, _count = first, count
    if count == 1:
        # Otherwise libraries such as orbax would treat local arrays as shards of the job.
        jax.process_count = lambda backend=None: 1


def size() -> int:
    """Returns the number of processes in the group; 1 without a job."""
    state = distributed.global_state
    if state.client is None:
        return 1
    return state.num_processes if _count is None else _count


def is_first() -> bool:
    """Returns whether this process is the first of its group."""
    return distributed.global_state.process_id == _first


def members() -> list[int] | None:
    """Returns the group's process indices in the job. None means all."""
    return None if _count is None else list(range(_first, _first + _count))


def several() -> bool:
    """Returns whether the group has more than one process."""
    return size() > 1


def barrier(what: str, seconds: float) -> None:
    """Synchronizes all processes of the group after the work `what`; no-op with one process.

    Raises:
      Stopped: Another process disconnected or did not arrive in time, which may be infinite.
    """
    if not several():
        return
    limit = int(min(seconds, LONGEST_WAIT) * 1000)
    try:
        name, state = f"digen_jax/barrier/{next(_barriers)}", cast(Any, distributed.global_state)
        state.client.wait_at_barrier(name, limit, process_ids=members())
    except jax.errors.JaxRuntimeError as error:
        why = "has ended"
        if "DEADLINE_EXCEEDED" in str(error):
            why = f"is not ready within {seconds:g} seconds (config.runtime.deadline)"
        raise Stopped(
            f"another process {why} after {what}: check its log, and restart the same command in all "
            "processes, which resumes the run"
        ) from error
