"""The choice of the kernel that computes attention.

| kernel | where                           | what it keeps in memory                          |
| ------ | ------------------------------- | ------------------------------------------------ |
| xla    | everywhere                      | float32 scores, a block of queries at a time     |
| packed | TPU, ours (`packed`)            | queries, keys, values and one number a query     |
| splash | TPU, Pallas's splash attention  | the same, and copies of them in another layout   |
| cudnn  | NVIDIA, cuDNN's flash attention | queries, keys, values and one number a query     |
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.attention import packed
from digen_jax.errors import ConfigError

Kernel = Literal["auto", "xla", "packed", "splash", "cudnn"]
AUTO, XLA, PACKED, SPLASH, CUDNN = get_args(Kernel)

# The widest heads: of splash attention those whose blocks fit a core's memory, of cuDNN those on every GPU.
WIDEST = 128
# Multiples that cuDNN takes; no more channels than this are added for keys' weights.
MULTIPLE = 8
CUDNN_DTYPES = ("bfloat16", "float16")
AMPERE = 8.0  # the compute capability from which on cuDNN has flash attention


class Heads(NamedTuple):
    """What attention computes.

    Attributes:
      number: heads of queries.
      width: channels of one.
      weighted: some keys have weights, for which some kernels need further channels: `attend.attend`.
      groups: heads of keys; 0: as many as of queries.
      keys: tokens that are attended to; 0: not known.
    """

    number: int
    width: int
    weighted: bool = False
    groups: int = 0
    keys: int = 0

    def split(self, parts: int) -> "Heads":
        """Those of one of `parts` devices, or all of them where these do not divide the heads."""
        if self.number % parts or self.groups % parts:
            return self
        return self._replace(number=self.number // parts, groups=self.groups // parts)


def choose(asked: str, device: jax.Device | None, dtype: DTypeLike, heads: Heads) -> str:
    """The kernel for some heads: the one that was asked for, or for "auto" the best that can compute them.

    Args:
      asked: a `Kernel`.
      device: one of those that the program is compiled for; None: not known, which is XLA's for "auto".
      dtype: of queries, keys and values.
      heads: of one device.

    Raises:
      ConfigError: the kernel that was asked for cannot compute them.
    """
    if asked == AUTO:
        kernels = (PACKED, SPLASH, CUDNN)
        return next((k for k in kernels if not obstacle(k, device, dtype, heads)), XLA)
    if reason := obstacle(asked, device, dtype, heads):
        raise ConfigError(
            f"config.model.attention = {asked!r} cannot be used, because {reason}: set it to 'auto'"
        )
    return asked


def obstacle(kernel: str, device: jax.Device | None, dtype: DTypeLike, heads: Heads) -> str | None:
    """Why a kernel cannot compute such heads on a device, as a clause; None if it can. Arguments as in `choose`."""
    if kernel == XLA:
        return None
    if device is None:
        return "the devices are not known"
    found = "a CPU" if device.platform == "cpu" else f"a {device.device_kind!r}"
    if kernel in (PACKED, SPLASH) and device.platform != "tpu":
        return f"{kernel} attention runs on TPUs, and the device is {found}"
    if kernel == PACKED:
        return _unpacked(heads, jnp.dtype(dtype).itemsize)
    if kernel == CUDNN:
        capability = _compute_capability(device)
        if capability is None:
            return f"cuDNN runs on NVIDIA's GPUs, and the device is {found}"
        if capability < AMPERE:
            return (
                f"cuDNN's flash attention needs compute capability {AMPERE}, and {found} has less"
            )
        if (name := jnp.dtype(dtype).name) not in CUDNN_DTYPES:
            return f"cuDNN's flash attention computes in {' or '.join(CUDNN_DTYPES)}, not in {name}"
        if heads.width % MULTIPLE:
            return f"cuDNN takes a multiple of {MULTIPLE} channels a head, not {heads.width}"
    if (channels := heads.width + MULTIPLE * heads.weighted) > WIDEST:
        more = ", with those for the weights of keys," if heads.weighted else ""
        return f"it takes at most {WIDEST} channels a head, which{more} are {channels} here"
    return None


def _unpacked(heads: Heads, itemsize: int) -> str | None:
    """Why heads do not fill tiles of lanes, as a clause; None if they do."""
    number, width, _, groups, keys = heads
    if groups not in (0, number):
        return f"packed attention has no grouped heads, and there are {groups} of keys for {number}"
    if packed.LANES % width or number * width % packed.LANES:
        return f"{number} heads of {width} channels on a device do not fill tiles of {packed.LANES}"
    if not packed.fits(keys, itemsize):
        return f"{keys} keys do not fit a core's fast memory"
    return None


def _compute_capability(device: jax.Device) -> float | None:
    """Of NVIDIA's GPUs, such as 9.0; None for others: AMD's have a name there, such as gfx942."""
    if device.platform != "gpu" or not device.compute_capability.replace(".", "").isdigit():
        return None
    return float(device.compute_capability)
