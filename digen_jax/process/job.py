"""Joins this process to a job of `jax.distributed`, by the command line or by what a cluster detects.

`ask_cluster` uses JAX's private detection (`jax._src.clusters`). It asks neither devices nor other processes.
"""

import os
import pathlib
import re
import socket
import sys
import threading
import time
import warnings
from typing import NamedTuple

import jax

from digen_jax.errors import ConfigError
from digen_jax.process import process_group
from digen_jax.process.shutdown import abort_later, leave

# Seconds that processes wait for one another at the start, and between two lines about it.
MEETING, WORD = 300, 30


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
        coordinator, processes, process = ask_cluster(processes, process, seconds)
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
        process_group.form(*place.team)


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


def ask_cluster(
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
