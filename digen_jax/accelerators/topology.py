"""The devices of a TPU slice that is not at hand, for which programs can be compiled but not run."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from digen_jax.errors import ConfigError

# Otherwise libtpu asks the cloud's metadata server which machine this is, and complains where there is none; and it
# locks the machine's TPU for this process, which uses none.
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Chips of a host in slices of one host; otherwise a host has the chips that libtpu takes by default, four.
ONE_HOST = {"1x1": (1, 1, 1), "1x1x1": (1, 1, 1), "2x4": (2, 4, 1)}


def slice_devices(name: str) -> Sequence[jax.Device]:
    """The devices of a slice such as "v5p:2x2x1": chips of a kind, and their arrangement.

    Must be called before JAX starts; JAX then runs on the CPU.

    Raises:
      ConfigError: libtpu is missing, held by another process, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler, which is not installed: "
            "pip install -r requirements-tpu.txt"
        )
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")
    host = ONE_HOST.get(name.partition(":")[2])
    given = {"chips_per_host_bounds": host} if host else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **given).devices
    except jax.errors.JaxRuntimeError as error:
        text = str(error).partition("\n")[0]
        if "lockfile" in text or "already in use" in text:
            raise ConfigError(
                f"--topology={name}: another process holds the TPU compiler: wait until it ends, or give this one "
                "a temporary folder of its own by TMPDIR"
            ) from error
        raise ConfigError(
            f"--topology={name} is no slice that the TPU compiler knows; one is a chip and its arrangement, such as "
            f"v5p:2x2x1, v6e:2x2 or v5e:2x4 ({text})"
        ) from error


def compiler_version() -> str:
    """The version of the TPU compiler that is installed."""
    return importlib.metadata.version("libtpu")
