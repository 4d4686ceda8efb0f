"""What a cluster tells a process: where the first one listens, how many there are, and which GPUs are its own.

The one place that uses JAX's own detection (`jax._src.clusters`), which is private: it asks neither devices nor
other processes.
"""

import os
import re
import warnings

from digen_jax.errors import ConfigError

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


def ask(
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
