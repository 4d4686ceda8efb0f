"""Selects the attention kernel for the devices that a network is traced for (`Target`).

The sampler and the trainer trace a network inside `on_mesh` or `on_device`, which set the target devices of attention
and the sharding of its arrays.

| kernel | platform                        | memory                                           |
| ------ | ------------------------------- | ------------------------------------------------ |
| xla    | any                             | float32 scores, one block of queries at a time   |
| packed | TPU, ours (`packed`)            | queries, keys, values and one number per query   |
| splash | TPU, Pallas splash attention    | same as packed, plus copies in another layout    |
| cudnn  | NVIDIA, cuDNN flash attention   | queries, keys, values and one number per query   |
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from digen_jax.errors import ConfigError

Kernel = Literal["auto", "xla", "packed", "splash", "cudnn"]
AUTO, XLA, PACKED, SPLASH, CUDNN = get_args(Kernel)
# Mesh axes that split heads, and tokens or, in attention, heads; see `parallel.mesh`.
TENSOR, SEQUENCE = "tensor", "sequence"

# Maximum head width: blocks of splash attention fit a core's memory, and every GPU of cuDNN supports it.
WIDEST = 128
# cuDNN requires multiples of this; at most this number of channels is added for key weights.
MULTIPLE = 8
CUDNN_DTYPES = ("bfloat16", "float16")
AMPERE = 8.0  # lowest compute capability with cuDNN flash attention


class Heads(NamedTuple):
    """Shape of an attention computation.

    Attributes:
      number: Number of query heads.
      width: Channels per head.
      weighted: Whether keys have weights, for which some kernels need extra channels (see `attend.attend`).
      groups: Number of key heads; 0 means the same as query heads.
      keys: Number of key tokens; 0 means unknown.
    """

    number: int
    width: int
    weighted: bool = False
    groups: int = 0
    keys: int = 0

    def split(self, parts: int) -> "Heads":
        """Returns the heads of one of `parts` devices, or all heads if `parts` does not divide them."""
        if self.number % parts or self.groups % parts:
            return self
        return self._replace(number=self.number // parts, groups=self.groups // parts)


def choose(configured: str, device: jax.Device | None, dtype: DTypeLike, heads: Heads) -> str:
    """Returns the configured kernel, or for "auto" the best kernel that supports the heads.

    Args:
      configured: Configured `Kernel`.
      device: One device that the program is compiled for. None means unknown, for which "auto" selects XLA.
      dtype: dtype of queries, keys and values.
      heads: Heads on one device.

    Raises:
      ConfigError: the configured kernel does not support the heads.
    """
    if configured == AUTO:
        kernels = (PACKED, SPLASH, CUDNN)
        return next((k for k in kernels if not obstacle(k, device, dtype, heads)), XLA)
    if reason := obstacle(configured, device, dtype, heads):
        raise ConfigError(
            f"config.model.attention = {configured!r} cannot be used, because {reason}: set it to 'auto'"
        )
    return configured


def obstacle(kernel: str, device: jax.Device | None, dtype: DTypeLike, heads: Heads) -> str | None:
    """Returns why a kernel does not support the heads on a device, as a clause, or None. Arguments as in `choose`."""
    if kernel == XLA:
        return None
    if device is None:
        return "the devices are unknown"
    found = "a CPU" if device.platform == "cpu" else f"a {device.device_kind!r}"
    if kernel in (PACKED, SPLASH) and device.platform != "tpu":
        return f"{kernel} attention runs on TPUs, but the device is {found}"
    if kernel == PACKED:
        return _unpacked(heads, jnp.dtype(dtype).itemsize)
    if kernel == CUDNN:
        capability = _compute_capability(device)
        if capability is None:
            return f"cuDNN runs on NVIDIA GPUs, but the device is {found}"
        if capability < AMPERE:
            return (
                f"cuDNN's flash attention needs compute capability {AMPERE}, but {found} has less"
            )
        if (name := jnp.dtype(dtype).name) not in CUDNN_DTYPES:
            return f"cuDNN's flash attention computes in {' or '.join(CUDNN_DTYPES)}, not in {name}"
        if heads.width % MULTIPLE:
            return f"cuDNN supports multiples of {MULTIPLE} channels per head, not {heads.width}"
    if (channels := heads.width + MULTIPLE * heads.weighted) > WIDEST:
        more = ", with those for the weights of keys," if heads.weighted else ""
        return f"it takes at most {WIDEST} channels per head, which{more} are {channels} here"
    return None


def _unpacked(heads: Heads, itemsize: int) -> str | None:
    """Returns why heads do not fill tiles of lanes, as a clause, or None if they do."""
    from digen_jax.attention import packed  # only for TPUs: Pallas is slow to import

    number, width, _, groups, keys = heads
    if groups not in (0, number):
        return f"packed attention does not support grouped heads, but there are {groups} of keys for {number}"
    if packed.LANES % width or number * width % packed.LANES:
        return f"{number} heads of {width} channels on a device do not fill tiles of {packed.LANES}"
    if not packed.fits(keys, itemsize):
        return f"{keys} keys do not fit a core's fast memory"
    return None


def _compute_capability(device: jax.Device) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, such as 9.0, or None. AMD GPUs have a name, such as gfx942."""
    if device.platform != "gpu" or not device.compute_capability.replace(".", "").isdigit():
        return None
    return float(device.compute_capability)


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of a program, and the mesh axes that split a network's arrays if XLA partitions it.

    Attributes:
      device: One of the program's devices. None means not known.
      kernel: Configured attention kernel, a `Kernel`.
      mesh: Mesh over which XLA partitions. None means that arrays are those of one device.
      rows: Mesh axes over which rows are split.
    """

    device: jax.Device | None = None
    kernel: str = AUTO
    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """Platform of the device: "cpu", "gpu" or "tpu"; "" if it is not known."""
        return self.device.platform if self.device is not None else ""

    def parts(self, *axes: str) -> int:
        """Returns the number of devices along some mesh axes; 1 if arrays are those of one device."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)


_UNKNOWN = Target()
_current = contextvars.ContextVar("target", default=_UNKNOWN)


def current() -> Target:
    """Returns the innermost target that was entered, or one without known devices."""
    return _current.get()


@contextlib.contextmanager
def on_device(
    device: jax.Device, kernel: str = AUTO, mesh: Mesh | None = None, rows: tuple[str, ...] = ()
) -> Iterator[None]:
    """Context for tracing a network for one device, as inside `jax.shard_map`, or for a mesh (see `Target`).

    Used instead of `jax.lax.platform_dependent`, which chooses at lowering: under a gradient it keeps the residuals of
    every branch, so a TPU's program would contain XLA's scores of all pairs of tokens, filled with zeros.

    It has an effect while the network is traced, so it must be entered inside the jitted function.
    """
    token = _current.set(Target(device, kernel, mesh, rows))
    try:
        yield
    finally:
        _current.reset(token)


def on_mesh(
    mesh: Mesh, rows: tuple[str, ...], kernel: str = AUTO
) -> contextlib.AbstractContextManager[None]:
    """Context for tracing a network whose program XLA partitions over a mesh; `rows` as in `Target`."""
    device = mesh.devices.flat[0]
    return on_device(device, kernel, *((mesh, rows) if mesh.size > 1 else ()))
