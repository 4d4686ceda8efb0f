"""Facts of accelerators, of what JAX calls one device.

TPUs: Google's pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x" (docs.cloud.google.com/tpu/docs). A v4 and a TPU7x chip
are two devices each, so their pages' numbers are halved. GPUs: NVIDIA's data sheets "A100" (80 GB SXM), "H100" (SXM),
"H200" (SXM) and "HGX B200", dense bfloat16 without sparsity; network adapters are those of DGX systems, one a GPU. The
memory that a GPU reports, and what else XLA's compiler reads, are in XLA's repository, xla/backends/gpu/target_config.
"""

import dataclasses

from digen_jax.errors import ConfigError

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: as people call it.
      clock: cycles a second, in which the TPU compiler's estimates count; 0: it gives none.
      flops: bfloat16 operations a second of the matrix units, a multiply-add as two.
      memory: bytes of its high-bandwidth memory.
      bandwidth: bytes a second of that memory.
      link: bytes a second in one direction over one link to a neighbour, of a GPU over NVLink.
      array: rows and columns of a matrix unit: narrower products leave it partly idle.
      network: bytes a second in one direction to other hosts. 0 means that links join hosts, too.
    """

    name: str
    clock: float
    flops: float
    memory: int
    bandwidth: float
    link: float
    array: int
    network: float = 0

    @property
    def flops_a_cycle(self) -> float:
        """Operations of the matrix units in a cycle."""
        return self.flops / self.clock


def _tpu(
    name: str, clock: float, a_cycle: int, memory: int, bandwidth: float, link: float, array: int
) -> Chip:
    return Chip(
        name, clock * 1e9, clock * 1e9 * a_cycle, memory, bandwidth * 1e9, link * 1e9, array
    )


# By `jax.Device.device_kind`. Of the pages' bidirectional link bandwidth of a chip, one direction of one of its links
# (four of v5e and v6e, six of the others) is 1/8 or 1/12; both devices of a TPU7x or v4 chip share its links.
CHIPS = {
    "TPU v4": _tpu("v4", 1.05, 131_072, 16 * GB, 614, 25, 128),
    "TPU v5 lite": _tpu("v5e", 1.5, 131_072, 16 * GB, 819, 50, 128),
    "TPU v5": _tpu("v5p", 1.75, 262_144, 95 * GB, 2765, 100, 128),
    "TPU v6 lite": _tpu("v6e", 1.75, 524_288, 32 * GB, 1638, 100, 256),
    "TPU7x": _tpu("tpu7x", 2.2, 524_288, 96 * GB, 3690, 50, 256),
    "NVIDIA A100-SXM4-80GB": Chip("A100", 0, 312e12, 85_100_068_864, 2039e9, 300e9, 16, 25e9),
    "NVIDIA H100 80GB HBM3": Chip("H100", 0, 989e12, 84_942_979_072, 3352e9, 450e9, 16, 50e9),
    "NVIDIA H200": Chip("H200", 0, 989e12, 151_397_597_184, 4800e9, 450e9, 16, 50e9),
    "NVIDIA B200": Chip("B200", 0, 2250e12, 191_514_411_008, 7672e9, 900e9, 16, 50e9),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Facts of a GPU that XLA's compiler asks for, in addition to those of its `Chip`.

    Attributes:
      kind: its `jax.Device.device_kind`.
      capability: major number of its compute capability.
      cores: streaming multiprocessors.
      units: float32 units of a core.
      shared: bytes of shared memory of a core.
      cache: bytes of the L2 cache.
      clock: in GHz.
    """

    kind: str
    capability: int
    cores: int
    units: int
    shared: int
    cache: int
    clock: float

    def description(self) -> str:
        """The GPU as XLA's text of a `GpuTargetConfigProto`."""
        chip = CHIPS[self.kind]
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "registers_per_core_limit": 65_536,
            "registers_per_block_limit": 65_536,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65_535,
            "block_dim_limit_z": 65_535,
            "shared_memory_per_block": 49_152,
            "shared_memory_per_block_optin": self.shared - 1024,
            "shared_memory_per_core": self.shared,
            "core_count": self.cores,
            "fpus_per_core": self.units,
            "l2_cache_size": self.cache,
            "clock_rate_ghz": self.clock,
            "memory_bandwidth": round(chip.bandwidth),
            "device_memory_size": chip.memory,
        }
        fields = "\n".join(f"  {name}: {value}" for name, value in info.items())
        return (
            f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {self.capability} }}\n}}\n"
            f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 }}\n'
            f'device_description_str: "{self.kind}"\n'
        )


# By the name that `--topology` takes.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 41_943_040, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 52_428_800, 1.98),
    "h200": Gpu("NVIDIA H200", 9, 132, 128, 233_472, 52_428_800, 1.98),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 233_472, 132_644_864, 1.965),
}


def chip_of(kind: str) -> Chip:
    """The chip of a device kind.

    Raises:
      ConfigError: nothing is known of it.
    """
    if kind not in CHIPS:
        raise ConfigError(
            f"nothing is known of the chip {kind!r}: choose one of {', '.join(chip.name for chip in CHIPS.values())}"
        )
    return CHIPS[kind]
