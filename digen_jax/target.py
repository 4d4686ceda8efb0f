"""Target of a network during tracing: the devices that it will run on, and the sharding of arrays over them."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of a program, and the mesh axes that split a network's arrays if XLA partitions it.

    Attributes:
      device: One of the program's devices. None means not known.
      kernel: Configured attention kernel, an `attention.kernels.Kernel`.
      mesh: Mesh over which XLA partitions. None means that arrays are those of one device.
      rows: Mesh axes over which rows are split.
      heads: Mesh axis over which heads are split.
      tokens: Mesh axis over which tokens are split and, in attention, heads.
    """

    device: jax.Device | None = None
    kernel: str = "auto"
    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()
    heads: str = ""
    tokens: str = ""

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
def on_mesh(
    mesh: Mesh, rows: tuple[str, ...], heads: str, tokens: str, kernel: str = "auto"
) -> Iterator[None]:
    """Context for tracing a network whose program XLA partitions over a mesh.

    Used instead of `jax.lax.platform_dependent`, which chooses at lowering: under a gradient it keeps the residuals of
    every branch, so a TPU's program would contain XLA's scores of all pairs of tokens, filled with zeros.

    It has an effect while the network is traced, so it must be entered inside the jitted function.

    Args:
      mesh: Devices that the program is for, all of one kind.
      rows: Axes that split the leading dimension of activations.
      heads: Axis that splits heads.
      tokens: Axis that splits tokens.
      kernel: Attention kernel, an `attention.kernels.Kernel`.
    """
    device = mesh.devices.flat[0]
    split = (mesh, rows, heads, tokens) if mesh.size > 1 else ()
    with _entered(Target(device, kernel, *split)):
        yield


@contextlib.contextmanager
def on_device(device: jax.Device, kernel: str = "auto") -> Iterator[None]:
    """Context like `on_mesh` for arrays of one device, as inside `jax.shard_map`."""
    with _entered(Target(device, kernel)):
        yield


@contextlib.contextmanager
def _entered(target: Target) -> Iterator[None]:
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
