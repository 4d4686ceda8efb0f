"""Arrays from device to device of two processes, by jax.experimental.transfer.

Whoever takes says how the shards of every array are to lie. The two sides must have equally many of them, so the
smaller mesh's layout is the one that crosses: the giver lays its arrays out so before (a jitted identity where the
devices stay the same), or the taker behind.

Its port knows no token, and bytes of a stranger abort the process that listens (jaxlib 0.10.2): only for networks
that nobody else can reach.
"""

import datetime
import json
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from digen_jax.engine.system import resharded
from digen_jax.process.ending import hangs

# None: whole, on one device. Else ((axis, size) ..., the partition of each dimension).
Layout = tuple[tuple[tuple[str, int], ...], tuple[Any, ...]] | None


class Pulls:
    """One process's end of transfers between devices.

    Args:
      host: the address of this host at which others reach it; the port is free to choose.
      patience: seconds for a transfer.

    Raises:
      RuntimeError: there are no transfers here.
    """

    def __init__(self, host: str, patience: float):
        self._patience = patience
        client, where = jax.local_devices()[0].client, f"{host}:0"
        self._server = transfer.start_transfer_server(client, where, [where])
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}
        self._pulling: dict[Future, str] = {}
        self._lock = threading.Lock()

    def stage(self, arrays: Sequence[Any], layouts: Sequence[Layout]) -> tuple[int, list[Layout]]:
        """Offers arrays, which lie as asked or as here: (the number by which to pull them, how they lie)."""
        laid = [_laid_out(*pair) for pair in zip(arrays, layouts, strict=True)]
        number = secrets.randbits(63)
        # An array without numbers aborts the process that sends it.
        sent = jax.block_until_ready([array for array, _ in laid if array.size])
        until = datetime.datetime.now() + datetime.timedelta(seconds=self._patience)
        self._server.await_pull(number, sent, timeout=until)
        return number, [layout for _, layout in laid]

    def pull(
        self,
        address: str,
        number: int,
        arrays: Sequence[jax.ShapeDtypeStruct],
        layouts: Sequence[Layout],
        shardings: Sequence[Sharding],
    ) -> list[Shaped[Array, "..."]]:
        """Staged arrays, in these shardings.

        Raises:
          TimeoutError: they have not come in time, or the process was given up. A thread may still wait for them
            until that process ends.
        """
        wanted = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_placed(layout, _devices(sharding)))
            for a, layout, sharding in zip(arrays, layouts, shardings, strict=True)
        ]

        def work() -> list[Array]:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            come = iter(
                jax.block_until_ready(
                    self._connections[address].pull(number, [w for w in wanted if w.size])
                )
            )
            found = [next(come) if w.size else np.zeros(w.shape, w.dtype) for w in wanted]
            return jax.block_until_ready(resharded(found, list(shardings)))

        try:
            return self._in_time(address, work)
        except Exception:
            self._connections.pop(address, None)  # a broken one never works again
            raise

    def give_up(self, address: str) -> None:
        """Nobody waits any longer for transfers from this process."""
        with self._lock:
            its = [call for call, whose in self._pulling.items() if whose == address]
        for call in its:
            _ends(call, TimeoutError("it was given up"))

    def _in_time(self, address: str, work: Callable[[], Any]) -> Any:
        """The result of `work`; where it takes too long or is given up, its thread is left alone."""
        call: Future = Future()
        with self._lock:
            self._pulling[call] = address

        def begin() -> None:
            try:
                result = work()
            except BaseException as error:
                _ends(call, error)
            else:
                with suppress(InvalidStateError):
                    call.set_result(result)

        threading.Thread(target=begin, name="pull", daemon=True).start()
        try:
            return call.result(self._patience)
        except TimeoutError as error:
            hangs("a transfer between devices")
            why = str(error) or f"it has not ended in {self._patience:g} s"
            raise TimeoutError(f"a transfer between devices from {address}: {why}") from None
        finally:
            with self._lock:
                del self._pulling[call]


def _ends(call: Future, error: BaseException) -> None:
    with suppress(InvalidStateError):
        call.set_exception(error)


def layout_of(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """How the shards of an array lie."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    sizes = tuple((str(axis), int(size)) for axis, size in sharding.mesh.shape.items())
    spec = sharding.spec
    return sizes, tuple(list(part) if isinstance(part, tuple) else part for part in spec)


def _placed(layout: Layout, devices: Sequence[jax.Device]) -> Sharding:
    if layout is None:
        return SingleDeviceSharding(devices[0])
    sizes, spec = layout
    count = math.prod(size for _, size in sizes)
    mesh = Mesh(
        np.array(devices[:count]).reshape([size for _, size in sizes]), [name for name, _ in sizes]
    )
    return NamedSharding(
        mesh, PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in spec))
    )


def _laid_out(array: Any, layout: Layout) -> tuple[Array, Layout]:
    """(an array as asked for, or as here where it has fewer devices; how it lies)."""
    if not isinstance(array, jax.Array):
        array = jax.device_put(array, jax.local_devices()[0])
    devices = _devices(array.sharding)
    if layout is not None and math.prod(size for _, size in layout[0]) > len(devices):
        layout = layout_of(array.sharding, array.shape)
    sharding = _placed(layout, devices)
    (moved,) = resharded([array], [sharding])
    return moved, layout


def _devices(sharding: Sharding) -> list[jax.Device]:
    if isinstance(sharding, NamedSharding):
        return sharding.mesh.devices.ravel().tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)


def write_layouts(layouts: Sequence[Layout]) -> str:
    """Layouts as text."""
    return json.dumps(layouts)


def read_layouts(text: str, count: int) -> list[Layout]:
    """The inverse of `write_layouts`.

    Raises:
      ValueError: they are not `count` layouts.
    """
    try:
        found = [
            None
            if one is None
            else (tuple((str(axis), int(size)) for axis, size in one[0]), tuple(one[1]))
            for one in json.loads(text)
        ]
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"layouts that cannot be read: {error!r}") from error
    if len(found) != count:
        raise ValueError(f"{len(found)} layouts of {count} arrays")
    return found
