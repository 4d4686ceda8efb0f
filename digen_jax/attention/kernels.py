"""The choice of the kernel that computes attention.

| kernel | where                           | what it keeps in memory                          |
| ------ | ------------------------------- | ------------------------------------------------ |
| xla    | everywhere                      | the float32 scores of all pairs of tokens        |
| splash | TPU, Pallas's splash attention  | queries, keys, values and one number a query     |
| cudnn  | NVIDIA, cuDNN's flash attention | the same                                         |
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from digen_jax.errors import ConfigError

Kernel = Literal["auto", "xla", "splash", "cudnn"]
AUTO, XLA, SPLASH, CUDNN = get_args(Kernel)

# The widest heads: of splash attention those whose blocks fit a core's memory, of cuDNN those on every GPU.
WIDEST = 128
# Multiples that cuDNN takes; no more channels than this are added for keys' weights.
MULTIPLE = 8
CUDNN_DTYPES = ("bfloat16", "float16")
AMPERE = 8.0  # the compute capability from which on cuDNN has flash attention


def choose(
    asked: str, device: jax.Device | None, dtype: DTypeLike, width: int, weighted: bool = False
) -> str:
    """The kernel for some heads: the one that was asked for, or for "auto" the best that can compute them.

    Args:
      asked: a `Kernel`.
      device: one of those that the program is compiled for; None: not known, which is XLA's for "auto".
      dtype: of queries, keys and values.
      width: channels of a head.
      weighted: whether keys have weights, which take further channels.

    Raises:
      ConfigError: the kernel that was asked for cannot compute them.
    """
    if asked == AUTO:
        kernels = (SPLASH, CUDNN)
        return next((k for k in kernels if not obstacle(k, device, dtype, width, weighted)), XLA)
    if reason := obstacle(asked, device, dtype, width, weighted):
        raise ConfigError(
            f"config.model.attention = {asked!r} cannot be used, because {reason}: set it to 'auto'"
        )
    return asked


def obstacle(
    kernel: str, device: jax.Device | None, dtype: DTypeLike, width: int, weighted: bool = False
) -> str | None:
    """Why a kernel cannot compute such heads on a device, as a clause; None if it can. Arguments as in `choose`."""
    if kernel == XLA:
        return None
    if device is None:
        return "the devices are not known"
    found = "a CPU" if device.platform == "cpu" else f"a {device.device_kind!r}"
    if kernel == SPLASH and device.platform != "tpu":
        return f"splash attention runs on TPUs, and the device is {found}"
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
        if width % MULTIPLE:
            return f"cuDNN takes a multiple of {MULTIPLE} channels a head, not {width}"
    if (channels := width + MULTIPLE * weighted) > WIDEST:
        more = ", with those for the weights of keys," if weighted else ""
        return f"it takes at most {WIDEST} channels a head, which{more} are {channels} here"
    return None


def _compute_capability(device: jax.Device) -> float | None:
    """Of NVIDIA's GPUs, such as 9.0; None for others: AMD's have a name there, such as gfx942."""
    if device.platform != "gpu" or not device.compute_capability.replace(".", "").isdigit():
        return None
    return float(device.compute_capability)
