"""The target of a network that is being traced: the devices that it will run on, and how arrays are split over them."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Target:
    """Of a network's arrays: the devices, and the mesh axes that split them, if XLA partitions the program.

    Attributes:
      device: one of those that the program is for; None: not known.
      kernel: of attention that was asked for, an `attention.kernels.Kernel`.
      mesh: on which XLA partitions; None: arrays are those of one device.
      rows: the mesh axes over which rows are split.
      heads: the mesh axis over which heads are split.
      tokens: the mesh axis over which tokens are split, and while they attend heads.
    """

    device: jax.Device | None = None
    kernel: str = "auto"
    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()
    heads: str = ""
    tokens: str = ""

    @property
    def platform(self) -> str:
        """Of the device: "cpu", "gpu" or "tpu"; "" if it is not known."""
        return self.device.platform if self.device is not None else ""

    def parts(self, *axes: str) -> int:
        """Devices along some mesh axes; 1 if arrays are those of one device."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)


_UNKNOWN = Target()
_current = contextvars.ContextVar("target", default=_UNKNOWN)


def current() -> Target:
    """The innermost target that was entered; without any, nothing is known of the devices."""
    return _current.get()


@contextlib.contextmanager
def on_mesh(
    mesh: Mesh, rows: tuple[str, ...], heads: str, tokens: str, kernel: str = "auto"
) -> Iterator[None]:
    """A context in which a network is traced whose program XLA partitions over a mesh.

    Not `jax.lax.platform_dependent`, which chooses at lowering: under a gradient it keeps the residuals of
    every branch, so a TPU's program would have XLA's scores of all pairs of tokens, filled with zeros.

    It acts while the network is traced, so enter it inside the jitted function.

    Args:
      mesh: of the devices that the program is for, all of one kind.
      rows: the axes that split the leading dimension of activations.
      heads: the axis that splits heads.
      tokens: the axis that splits tokens.
      kernel: of attention, an `attention.kernels.Kernel`.
    """
    device = mesh.devices.flat[0]
    split = (mesh, rows, heads, tokens) if mesh.size > 1 else ()
    with _entered(Target(device, kernel, *split)):
        yield


@contextlib.contextmanager
def on_device(device: jax.Device, kernel: str = "auto") -> Iterator[None]:
    """As `on_mesh`, where arrays are those of one device, as inside `jax.shard_map`."""
    with _entered(Target(device, kernel)):
        yield


@contextlib.contextmanager
def _entered(target: Target) -> Iterator[None]:
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
