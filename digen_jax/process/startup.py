"""Setup of every launch script before the first array: devices, memory, compile cache, quiet logs."""

import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import tempfile

import jax
from absl import logging

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
