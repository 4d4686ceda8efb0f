"""What a network that is being traced will run on: its devices, and how arrays are split over them."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from digen_jax.attention.kernels import AUTO


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Of a network's arrays: the devices, and the mesh axes that split them, if XLA partitions the program.

    Attributes:
      device: one of those that the program is for; None: not known.
      kernel: that was asked for, a `kernels.Kernel`.
      mesh: on which XLA partitions; None: arrays are those of one device.
      rows: the mesh axes over which rows are split.
      heads: the mesh axis over which heads are split.
      tokens: the mesh axis over which tokens are split, and while they attend heads.
    """

    device: jax.Device | None = None
    kernel: str = AUTO
    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()
    heads: str = ""
    tokens: str = ""

    def parts(self, *axes: str) -> int:
        """Devices along some mesh axes; 1 if arrays are those of one device."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)


_UNKNOWN = Surroundings()
_current = contextvars.ContextVar("surroundings", default=_UNKNOWN)


def current() -> Surroundings:
    """The innermost surroundings that were entered; without any, nothing is known of the devices."""
    return _current.get()


def heads_fill_tiles() -> bool:
    """Whether a network's heads lie side by side in the tiles of a TPU, all of a token's on one device."""
    around = current()
    on_tpu = around.device is not None and around.device.platform == "tpu"
    return on_tpu and around.parts(around.heads) == 1


@contextlib.contextmanager
def on_mesh(
    mesh: Mesh, rows: tuple[str, ...], heads: str, tokens: str, kernel: str = AUTO
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
      kernel: a `kernels.Kernel`.
    """
    device = mesh.devices.flat[0]
    split = (mesh, rows, heads, tokens) if mesh.size > 1 else ()
    with _entered(Surroundings(device, kernel, *split)):
        yield


@contextlib.contextmanager
def on_device(device: jax.Device, kernel: str = AUTO) -> Iterator[None]:
    """As `on_mesh`, where arrays are those of one device, as inside `jax.shard_map`."""
    with _entered(Surroundings(device, kernel)):
        yield


@contextlib.contextmanager
def _entered(surroundings: Surroundings) -> Iterator[None]:
    token = _current.set(surroundings)
    try:
        yield
    finally:
        _current.reset(token)
