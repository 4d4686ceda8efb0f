"""What every launch script does before the first array: devices, compile cache, quiet logs."""

import os
import pathlib

import jax
from absl import logging

from digen_jax.settings import ConfigError, check_range

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "digen_jax/xla"
MOST_CPU_DEVICES = 256


def prepare(cpu_devices: int = 1) -> None:
    """Virtual CPU devices (used where there is no accelerator), and a compile cache between runs.

    Devices that XLA_FLAGS asks for, and a cache that JAX's own variable names, stand as they are.
    Must be called before JAX starts.

    Raises:
      ConfigError: as many virtual devices would take minutes to start.
    """
    # Here, as what else is checked comes behind the start of the devices.
    check_range("cpu_devices of the config", cpu_devices, 0, MOST_CPU_DEVICES, "least")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(CACHE))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    logging.set_verbosity(logging.WARNING)
    # transformers advises to install PyTorch, of which training needs nothing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Makes this process one of several that run together; None for all three: it is alone.

    Must be called before JAX starts.

    Args:
      coordinator: "host:port", where the first process listens, or "auto" where JAX finds all of this out by
        itself (Slurm, Open MPI, Kubernetes, TPU slices).
      processes: how many there are.
      process: which of them this is; 0 is the first.

    Raises:
      ConfigError: some of it is missing.
    """
    told = (processes, process)
    if coordinator is None:
        if told != (None, None):
            raise ConfigError(
                "--processes and --process need the first one's --coordinator=host:port"
            )
        return
    if coordinator != "auto" and None in told:
        raise ConfigError(
            "--coordinator=host:port needs --processes, how many there are, and --process, which of "
            "them this is, from 0; or set --coordinator=auto where a cluster tells"
        )
    # A process that is told to stop says so to the first one, which decides when (see executors.orders).
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(None if coordinator == "auto" else coordinator, *told)
    except ValueError as error:
        raise ConfigError(f"--coordinator={coordinator} does not work: {error}") from error
