"""Devices of a TPU slice or of GPUs that this machine lacks, for which programs can be compiled but not run."""

import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from digen_jax.errors import ConfigError
from digen_jax.planning.chips import GPUS

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

# Settings of the CUDA compiler without a GPU: nothing can be timed, so it must not choose kernels by their times.
XLA_FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
GPUS_OF_HOST = 8  # at most
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")  # with the CUDA compiler


def slice_devices(name: str) -> Sequence[jax.Device]:
    """Returns the devices of a TPU slice such as "v5p:2x2x1", or of GPUs such as "h100:8" or, on two hosts, "h100:2x8".

    Must be called before JAX starts; JAX then runs on the CPU.

    Raises:
      ConfigError: the compiler is missing, held by another process, or knows no such slice.
    """
    chip = name.partition(":")[0]
    if chip in GPUS:
        return _gpu_devices(name)
    if not re.match(r"v\d|tpu", chip):
        raise ConfigError(
            f"--topology={name} names no accelerator: give GPUs ({', '.join(GPUS)}), such as h100:8 or on two hosts "
            "h100:2x8, or a TPU slice, such as v5p:2x2x1"
        )
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


def _gpu_devices(name: str) -> Sequence[jax.Device]:
    chip, _, count = name.partition(":")
    found = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d?)", count)
    if found is None or int(found[2]) > GPUS_OF_HOST:
        raise ConfigError(
            f"--topology={name} gives no number of GPUs, at most {GPUS_OF_HOST} on a host: write {chip}:8, or on two "
            f"hosts {chip}:2x8"
        )
    if _plugin() is None:
        raise ConfigError(
            f"--topology={name} needs the CUDA compiler, which is not installed: "
            "pip install -r requirements-gpu-check.txt"
        )
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*given, *XLA_FLAGS]))
    jax.config.update("jax_platforms", "cpu")
    try:
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=GPUS[chip].description(),
            topology=f"1x{found[1] or 1}x{found[2]}",
        ).devices
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).partition("\n")[0]
        raise ConfigError(
            f"--topology={name} needs a CUDA compiler of jaxlib's version, {importlib.metadata.version('jaxlib')}: "
            f"pip install -r requirements-gpu-check.txt ({text})"
        ) from error


def _plugin() -> str | None:
    """The installed package with the CUDA compiler, or None if it or cuDNN, which it asks for kernels, is missing."""
    if not _installed("nvidia.cudnn") and ctypes.util.find_library("cudnn") is None:
        return None
    return next((name for name in PLUGINS if _installed(name.replace("-", "_"))), None)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def compiler_version(name: str) -> str:
    """Returns the installed compiler of a slice, with its version."""
    gpu = name.partition(":")[0] in GPUS
    package = _plugin() if gpu else "libtpu"
    return f"{package} {importlib.metadata.version(package)}"
