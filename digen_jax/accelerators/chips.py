"""Facts of accelerators, of what JAX calls one device.

TPUs: Google's pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x" (docs.cloud.google.com/tpu/docs). GPUs: NVIDIA's data
sheets "A100" (80 GB SXM), "H100" (SXM) and "H200" (SXM), dense bfloat16 without sparsity. A v4 and a TPU7x chip are
two devices each, so their pages' numbers are halved.
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
      link: bytes a second in one direction over one link to a neighbour.
      array: rows and columns of a matrix unit: narrower products leave it partly idle.
    """

    name: str
    clock: float
    flops: float
    memory: int
    bandwidth: float
    link: float
    array: int

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
    "NVIDIA A100-SXM4-80GB": Chip("A100", 0, 312e12, 80 * GB, 2039e9, 300e9, 16),
    "NVIDIA H100 80GB HBM3": Chip("H100", 0, 989e12, 80 * GB, 3350e9, 450e9, 16),
    "NVIDIA H200": Chip("H200", 0, 989e12, 141 * GB, 4800e9, 450e9, 16),
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
