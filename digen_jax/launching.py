"""What every launch script does before the first array: devices, compile cache, quiet logs."""

import os
import pathlib

import jax
from absl import logging

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "digen_jax/xla"


def prepare(cpu_devices: int = 1) -> None:
    """Virtual CPU devices (used where there is no accelerator), and a compile cache between runs.

    Devices that XLA_FLAGS asks for, and a cache that JAX's own variable names, stand as they are.
    Must be called before JAX starts.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(CACHE))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    logging.set_verbosity(logging.WARNING)
