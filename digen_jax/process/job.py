"""Sets up a process before its first array: devices, memory, compile cache, and its place in a `jax.distributed` job.

The processes of a job work together: all of them, or where several workers share a job those of one worker.
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

# Seconds that processes wait for one another at the start, and between two lines about it.
START_TIMEOUT, REPORT_EVERY = 300, 30


class Place(NamedTuple):
    """Which of several processes this one is, and where the first one listens."""

    host: str
    port: int
    processes: int
    process: int
    devices: tuple[int, ...] = ()  # the GPUs that are its own, of those it sees; (): all
    # (first, number) of the processes that it works with, if several workers share the job; (): all
    group: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        """The first process's host:port."""
        return f"{_bracketed(self.host)}:{self.port}"


def resolve_place(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    seconds: float = START_TIMEOUT,
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
        coordinator, processes, process = detect_cluster(processes, process, seconds)
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
    return Place(address[1], int(address[2]), processes, process, own_devices())


def join(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    seconds: float = START_TIMEOUT,
) -> None:
    """Joins this process to others in one job of `jax.distributed`; None for all three: it runs alone.

    Must be called before JAX starts.

    Args:
      coordinator: as in `resolve_place`.
      processes: as in `resolve_place`.
      process: as in `resolve_place`.
      seconds: time for the others to come, after which this process ends with code 2.

    Raises:
      ConfigError: as in `resolve_place`, or the first process cannot be reached.
    """
    place = resolve_place(coordinator, processes, process, seconds)
    if place is not None:
        join_job(place, seconds)


def join_job(place: Place, seconds: float = START_TIMEOUT) -> None:
    """As `join`, of a place that is known.

    Raises:
      ConfigError: the first process cannot be reached.
    """
    if place.process:
        wait_for_port(place.host, place.port, seconds)
    elif place.processes > 1:
        words = f"waiting at {place.address} for {place.processes - 1} more processes, at most {seconds:g} s"
        print(words, file=sys.stderr, flush=True)
    # A process that gets a signal to stop tells the first one, which decides when (see runtime.opening).
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    abort_later()
    # JAX aborts the process with a page of text where the others do not come in time: this ends it before.
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
    words = (
        f"--coordinator={place.address}: not all processes have come in {seconds:g} s: start as many as --processes "
        "says, each with its own --process"
    )
    if place.group:  # Ray starts them
        words = (
            f"--one_job: not all {place.processes} processes have started in {seconds:g} s: see `ray status` for free "
            "resources, or leave --one_job out, so that rollout workers can join later"
        )
    print(f"{name}: {words}", file=sys.stderr, flush=True)
    exit_now(2)


def wait_for_port(host: str, port: int, seconds: float, pause: float = 1) -> None:
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
        if said == begin or now - said > REPORT_EVERY:
            words = (
                f"waiting for the first process at {host}:{port} ({reason}), at most {seconds:g} s"
            )
            print(words, file=sys.stderr, flush=True)
            said = now
        time.sleep(pause)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# Variables of places where the detection finds nothing, and why.
_WHY = {
    "OMPI_COMM_WORLD_RANK": (
        "Open MPI 5 does not tell where its first process is: set --coordinator=HOST:PORT with that host's name, "
        "--processes=$OMPI_COMM_WORLD_SIZE and --process=$OMPI_COMM_WORLD_RANK"
    ),
    "SLURM_JOB_ID": "within a Slurm job start the command with srun",
    "KUBERNETES_SERVICE_HOST": "on Kubernetes install the package kubernetes (pip install 'jax[k8s]')",
}
_NOTHING = (
    "there is no Slurm, Open MPI, Kubernetes job or TPU slice here: set --coordinator=HOST:PORT"
)


def detect_cluster(
    processes: int | None, process: int | None, seconds: float
) -> tuple[str, int | None, int | None]:
    """(the first process's host:port, number of processes, which of them this is), as the cluster says.

    `JAX_COORDINATOR_ADDRESS` and `JAX_COORDINATOR_PORT` take precedence, as for `jax.distributed.initialize`.

    Args:
      processes: given by the user; None: the cluster says.
      process: the same.
      seconds: for names of hosts that are not known yet.

    Raises:
      ConfigError: no cluster is detected, or it does not answer.
    """
    from jax._src.clusters import ClusterEnv

    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own sentence says what is missing
            address, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
                given, processes, process, (), None, int(seconds)
            )
    # Errors of environments, of Kubernetes' client and of requests have nothing in common.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--coordinator=auto does not work: {what}") from error
    if address is None:
        why = next((why for name, why in _WHY.items() if name in os.environ), _NOTHING)
        raise ConfigError(f"--coordinator=auto does not work: {why}")
    return address, processes, process


def own_devices() -> tuple[int, ...]:
    """Which of the GPUs that this process sees it may use, by number; (): all of them.

    A process that is alone on its host uses all. Several that see the same ones (Slurm, Open MPI) get equal shares, in
    order. Those that see fewer than the job has there were divided before, by `srun --gpus-per-task` or a script.
    `JAX_LOCAL_DEVICE_IDS` takes precedence, as for `jax.distributed.initialize`, which by itself would give each
    process one GPU.

    Raises:
      ConfigError: there are no equal shares.
    """
    if given := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        if not re.fullmatch(r"\d+(,\d+)*", given):
            raise ConfigError(f"JAX_LOCAL_DEVICE_IDS={given} must be numbers with commas between")
        return tuple(map(int, given.split(",")))
    local, beside = _on_this_host()
    if beside == 1:
        return ()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return (local,)  # JAX's own rule: their number is not known
    seen = len([name for name in seen.split(",") if name])
    if seen < 2 or seen < int(os.environ.get("SLURM_GPUS_ON_NODE", 0)):
        return ()
    if seen % beside:
        raise ConfigError(
            f"{seen} GPUs cannot be divided among {beside} processes of a host: start another number there, or set "
            "JAX_LOCAL_DEVICE_IDS for each, such as 0,1"
        )
    share = seen // beside
    return tuple(range(local * share, (local + 1) * share))


def _on_this_host() -> tuple[int, int]:
    """(which of this host's processes this one is, how many there are); (0, 1) where nothing tells."""
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


LONGEST_WAIT = 10**6  # seconds, for waits without a deadline

_meetings = itertools.count()  # a name for each, as all processes come to the same ones
_first: int = 0
_count: int | None = None  # None: all


def set_group(first: int, count: int) -> None:
    """From now on this process works with so many, of which `first` is the first one's number within the job."""
    global _first, _count
    _first, _count = first, count
    if count == 1:
        # Libraries that count the job's processes, such as orbax, would take arrays of this one for parts.
        jax.process_count = lambda backend=None: 1


def size() -> int:
    """How many they are; 1 where there is no job."""
    state = distributed.global_state
    if state.client is None:
        return 1
    return state.num_processes if _count is None else _count


def is_first() -> bool:
    """Whether this process is the first of them; always true in a run of one process."""
    return distributed.global_state.process_id == _first


def members() -> list[int] | None:
    """Their numbers within the job; None: all of it."""
    return None if _count is None else list(range(_first, _first + _count))


def several() -> bool:
    """Whether this run has more than one process."""
    return size() > 1


def barrier(what: str, seconds: float) -> None:
    """Waits until all processes have come to this call; with one process it does nothing.

    Args:
      what: the work that all have done by then, in words.
      seconds: the longest wait, which may be infinite.

    Raises:
      Stopped: another process has not come, or has ended.
    """
    if not several():
        return
    limit = int(min(seconds, LONGEST_WAIT) * 1000)
    try:
        name, client = f"digen_jax/meeting/{next(_meetings)}", distributed.global_state.client
        client.wait_at_barrier(name, limit, process_ids=members())
    except jax.errors.JaxRuntimeError as error:
        late = "DEADLINE_EXCEEDED" in str(error)
        why = f"not there within {seconds:g} seconds (config.runtime.deadline)" if late else "gone"
        raise Stopped(
            f"another process is {why} after {what}: look at what it printed, and start the same command on all again, "
            "which continues"
        ) from error


# Parameters of mallopt (glibc's malloc.h), and the most that an int can say, in bytes.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST_KEPT = 2**31 - 1


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


def prepare(cpu_devices: int = 1) -> None:
    """Sets up virtual CPU devices (used where there is no accelerator) and a compile cache between runs.

    Devices that XLA_FLAGS asks for, and settings of the cache in JAX's own variables, take precedence. Without an
    accelerator the process keeps memory that it frees (`keep_freed_memory`).
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


def keep_freed_memory() -> None:
    """Lets the process use freed memory again, where JAX computes on CPUs and the C library is glibc.

    XLA allocates a program's temporary arrays anew for every call. glibc maps blocks above 32 MB from the kernel and
    returns them as they are freed, so that in each call every page is mapped and zeroed again. Now there are no such
    maps, and up to 2 GiB of free memory stay with the process. There is one arena, because another one than the main
    arena has at most 64 MB and would map larger blocks.

    Must be called before JAX starts its threads.
    """
    if sys.platform != "linux" or _has_accelerators():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in (
        (M_ARENA_MAX, 1),
        (M_MMAP_MAX, 0),
        (M_TRIM_THRESHOLD, MOST_KEPT),
    ):
        mallopt(parameter, value)


def _has_accelerators() -> bool:
    """Whether JAX was installed for devices whose arrays do not come from malloc."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or importlib.util.find_spec("libtpu") is not None
