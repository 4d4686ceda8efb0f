"""Accelerators to plan for: rates and memory of chips, and devices of absent machines.

Sources. TPUs: Google's pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x" (docs.cloud.google.com/tpu/docs). A v4 and a
TPU7x chip are two JAX devices each, so their pages' numbers are halved. GPUs: NVIDIA's data sheets "A100" (80 GB SXM),
"H100" (SXM), "H200" (SXM) and "HGX B200", dense bfloat16 without sparsity; network adapters are those of DGX systems,
one per GPU. The memory that a GPU reports, and everything else that XLA's compiler reads, are in XLA's repository,
xla/backends/gpu/target_config; that of an RTX 4090, whose other numbers are of NVIDIA's page "GeForce RTX 4090" and
white paper "Ada GPU architecture", is ours: 98% of 24 GiB. The peak of an RTX A6000 is of its data sheet.
"""

import ctypes.util
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from digen_jax.errors import ConfigError

GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates and memory of one JAX device.

    Attributes:
      name: Short name.
      flops: Peak bfloat16 FLOP/s; a multiply-add counts as two.
      memory: Bytes of high-bandwidth memory.
      bandwidth: Bytes/s of that memory.
      link: Bytes/s in one direction over one link to a neighbor; for a GPU, over NVLink.
      network: Bytes/s in one direction to other hosts. 0 means that links also connect hosts.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    link: float
    network: float = 0


# By `jax.Device.device_kind`. The pages give a chip's bidirectional bandwidth over all links (four of v5e and v6e, six
# of the others); one direction of one link is 1/8 or 1/12. Both devices of a TPU7x or v4 chip share its links.
CHIPS = {
    "TPU v4": Chip("v4", 137.6256e12, 16 * GB, 614e9, 25e9),
    "TPU v5 lite": Chip("v5e", 196.608e12, 16 * GB, 819e9, 50e9),
    "TPU v5": Chip("v5p", 458.752e12, 95 * GB, 2765e9, 100e9),
    "TPU v6 lite": Chip("v6e", 917.504e12, 32 * GB, 1638e9, 100e9),
    "TPU7x": Chip("tpu7x", 1153.4336e12, 96 * GB, 3690e9, 50e9),
    "NVIDIA A100-SXM4-80GB": Chip("A100", 312e12, 85_100_068_864, 2039e9, 300e9, 25e9),
    "NVIDIA H100 80GB HBM3": Chip("H100", 989e12, 84_942_979_072, 3352e9, 450e9, 50e9),
    "NVIDIA H200": Chip("H200", 989e12, 151_397_597_184, 4800e9, 450e9, 50e9),
    "NVIDIA GeForce RTX 4090": Chip("RTX 4090", 165.2e12, 25_254_407_700, 1008e9, 32e9),
    "NVIDIA RTX A6000": Chip("RTX A6000", 154.8e12, 51_041_271_808, 768e9, 56.25e9),
    "NVIDIA B200": Chip("B200", 2250e12, 191_514_411_008, 7672e9, 900e9, 50e9),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that XLA's compiler reads, in addition to those of its `Chip`.

    Attributes:
      kind: Its `jax.Device.device_kind`.
      capability: Major number of its compute capability.
      cores: Number of streaming multiprocessors.
      units: Float32 units per streaming multiprocessor.
      shared: Bytes of shared memory per streaming multiprocessor.
      cache: Bytes of L2 cache.
      clock: Clock rate in GHz.
      minor: Minor number of its compute capability.
      threads: Maximum threads per streaming multiprocessor.
    """

    kind: str
    capability: int
    cores: int
    units: int
    shared: int
    cache: int
    clock: float
    minor: int = 0
    threads: int = 2048

    def description(self) -> str:
        """Returns XLA's `GpuTargetConfigProto` as text."""
        chip = CHIPS[self.kind]
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {self.threads}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared - 1024}
  shared_memory_per_core: {self.shared}
  core_count: {self.cores}
  fpus_per_core: {self.units}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  memory_bandwidth: {round(chip.bandwidth)}
  device_memory_size: {chip.memory}
  cuda_compute_capability {{ major: {self.capability} minor: {self.minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.kind}"
"""


# By the name in `--topology`.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 41_943_040, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 52_428_800, 1.98),
    "h200": Gpu("NVIDIA H200", 9, 132, 128, 233_472, 52_428_800, 1.98),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 8, 128, 128, 102_400, 75_497_472, 2.52, 9, 1536),
    "a6000": Gpu("NVIDIA RTX A6000", 8, 84, 128, 102_400, 6_291_456, 1.8, 6, 1536),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 233_472, 132_644_864, 1.965),
}
GPUS_PER_HOST = 8  # maximum
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")  # packages that contain the CUDA compiler
# Without a GPU nothing can be timed, so the compiler must not autotune kernels.
CUDA_XLA_FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")

# Otherwise libtpu queries the cloud's metadata server for the machine type and warns if there is none, and it locks
# the machine's TPU for this process, which does not use it.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Chips per host for slices of one host; libtpu's default is four.
ONE_HOST = {"1x1": (1, 1, 1), "1x1x1": (1, 1, 1), "2x4": (2, 4, 1)}


def chip_of(kind: str) -> Chip:
    """Returns the chip of a `jax.Device.device_kind`; raises ConfigError if it is unknown."""
    if kind not in CHIPS:
        known = ", ".join(chip.name for chip in CHIPS.values())
        raise ConfigError(f"unknown chip {kind!r}: choose one of {known}")
    return CHIPS[kind]


def topology_devices(name: str) -> Sequence[jax.Device]:
    """Returns the devices of a TPU slice such as "v5p:2x2x1", or of GPUs such as "h100:8" or, on two hosts, "h100:2x8".

    Programs can be compiled for them but not run. Must be called before JAX starts; JAX then runs on the CPU.

    Raises:
      ConfigError: The compiler is missing, is locked by another process, or does not know the slice.
    """
    chip, _, shape = name.partition(":")
    if chip in GPUS:
        return _gpu_devices(name, chip, shape)
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
    for variable, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")
    options = {"chips_per_host_bounds": ONE_HOST[shape]} if shape in ONE_HOST else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        text = str(error).partition("\n")[0]
        if "lockfile" in text or "already in use" in text:
            raise ConfigError(
                f"--topology={name}: another process has locked the TPU compiler: wait until it ends, or set TMPDIR "
                "to another folder for this one"
            ) from error
        raise ConfigError(
            f"--topology={name} is no slice that the TPU compiler knows; one is a chip and its arrangement, such as "
            f"v5p:2x2x1, v6e:2x2 or v5e:2x4 ({text})"
        ) from error


def _gpu_devices(name: str, chip: str, shape: str) -> Sequence[jax.Device]:
    found = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d?)", shape)
    if found is None or int(found[2]) > GPUS_PER_HOST:
        raise ConfigError(
            f"--topology={name} gives no number of GPUs, at most {GPUS_PER_HOST} on a host: write {chip}:8, or on two "
            f"hosts {chip}:2x8"
        )
    if _cuda_plugin() is None:
        raise ConfigError(
            f"--topology={name} needs the CUDA compiler, which is not installed: "
            "pip install -r requirements-gpu-check.txt"
        )
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, *CUDA_XLA_FLAGS]))
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


def _cuda_plugin() -> str | None:
    """Returns the installed package with the CUDA compiler, or None if it or cuDNN, which it needs, is missing."""
    if not _installed("nvidia.cudnn") and ctypes.util.find_library("cudnn") is None:
        return None
    return next((name for name in CUDA_PLUGINS if _installed(name.replace("-", "_"))), None)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def compiler_version(name: str) -> str:
    """Returns the installed compiler of a topology, with its version."""
    package = _cuda_plugin() if name.partition(":")[0] in GPUS else "libtpu"
    return f"{package} {importlib.metadata.version(str(package))}"
