"""How the C library hands memory to this process."""

import ctypes
import importlib.metadata
import importlib.util
import sys

# Parameters of mallopt (glibc's malloc.h), and the most that an int can say, in bytes.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST_KEPT = 2**31 - 1


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
