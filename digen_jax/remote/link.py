"""The link between processes: trees are offered here, and taken from whichever process offers them."""

import collections
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import grpc
import jax
import numpy as np
from jax.sharding import Sharding

from digen_jax.engine.hosts import put
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.frames import gathered, plan
from digen_jax.remote.lending import Lending
from digen_jax.remote.messages import write_key
from digen_jax.remote.outline import Outline
from digen_jax.remote.pull import Pulls, layout_of, read_layouts, write_layouts
from digen_jax.remote.wire import FRAME, Peer, PeerError, Wire, result
from digen_jax.runtime.link import Key, LinkError, LocalLink, Shardings, Tree
from digen_jax.scheduling.commands import TRAINER, Publication

WINDOW = 4  # frames that a taker has asked for and not got
PATIENCE = 60.0  # seconds for a frame, and for a transfer between devices
GIVING = 10.0  # seconds for a frame of a giver in whose place another one is asked
WAIT = 0.1  # seconds between two looks at transfers to other processes


class _Met(NamedTuple):
    """Another process: `transfer` is its address of transfers, `until` when it is to have given what it gives."""

    peer: Peer
    transfer: str = ""
    patience: float = PATIENCE
    until: float = math.inf

    def seconds(self) -> float:
        """For the next answer."""
        return min(self.patience, max(0.001, self.until - time.monotonic()))


class RemoteLink:
    """A `Link` whose offers other processes take, by bytes over gRPC or from device to device.

    Args:
      wire: how to connect.
      known: the named tuples that may be nodes of a tree (`outline.nodes`).
      pulls: transfers between devices; None: bytes.
      patience: seconds for a frame, and for a transfer between devices.

    Attributes:
      session: drawn at random, by which others know this process from one that had its name before.
    """

    def __init__(
        self,
        wire: Wire,
        known: Mapping[str, type],
        pulls: Pulls | None = None,
        patience: float = PATIENCE,
    ):
        self.known = known
        self.session = secrets.token_hex(16)
        self.lending = Lending(here := LocalLink(), known, patience, pulls)
        self._here, self._wire, self._pulls, self._patience = here, wire, pulls, patience
        self._peers: dict[str, _Met] = {}
        self._lock = threading.Lock()

    def meet(
        self, name: str, address: str, transfer: str = "", sessions: frozenset[str] = frozenset()
    ) -> None:
        """From now on what `name` offers is taken from another process, at this address.

        `sessions` are those of all processes that take under this name; who took under it before gets nothing more.
        """
        self.part(name)
        self.lending.expect(name, sessions)
        with self._lock:
            self._peers[name] = _Met(Peer(self._wire, address), transfer, self._patience)

    def meet_giver(self, name: str, address: str, seconds: float) -> None:
        """The same, but it has only so many seconds to give what is asked for next, and 10 for a frame."""
        with self._lock:
            met = self._peers.get(name)
        if met is None or met.peer.address != address:
            self.part(name)
            met = _Met(Peer(self._wire, address))
        limits = min(self._patience, GIVING), time.monotonic() + seconds
        with self._lock:
            self._peers[name] = met._replace(patience=limits[0], until=limits[1])

    def part(self, name: str) -> None:
        """Ends the connection by which is taken from a process; that one may still take from here."""
        with self._lock:
            met = self._peers.pop(name, None)
        if met is not None:
            met.peer.close()

    def make(self, kind: type, tree: Callable[[Any], Tree]) -> None:
        """From now on trees whose keys are of this type are made from the key when another process asks for them."""
        self.lending.made[kind] = tree

    def describe(self, name: str) -> str:
        """How arrays come from a process, for one line of the console."""
        if self._transfer(name):
            return "jax.experimental.transfer, from device to device"
        mebibytes = WINDOW * FRAME // 2**20
        return f"bytes over gRPC, at most {mebibytes} MiB in flight"

    def offer(self, key: Key, tree: Tree) -> None:
        """See `Link`."""
        self.lending.expire()
        self._here.offer(key, tree)

    def take(self, key: Key, shardings: Shardings, taker: str) -> Tree | None:
        """See `Link`.

        Raises:
          LinkError: the process that offers the tree is gone, or does not send it in time.
        """
        name = _owner(key)
        if name not in self._peers:
            return self._here.take(key, shardings, taker)
        with self._opened(name, key, taker) as (met, ticket, outline):
            if outline is None:
                return None
            wanted = outline.of_arrays(shardings(outline.tree))
            if self._transfer(name):
                arrays = self._pulled(met, ticket, outline, wanted)
            else:
                arrays = self._read(met, ticket, outline, lambda i, a: put(a, wanted[i]))
            tree = outline.filled(arrays)
            if not outline.plain:
                # Numbers, too, become arrays, as they do in one process, and keys lie as asked.
                tree = jax.device_put(tree, shardings(tree))
            return jax.block_until_ready(tree)

    def fetch(self, key: Key, taker: str) -> Tree | None:
        """A tree of another process with its arrays on this host; raises the same errors as `take`."""
        with self._opened(_owner(key), key, taker) as (met, ticket, outline):
            if outline is None:
                return None
            return outline.filled(self._read(met, ticket, outline, lambda _, array: array))

    def withdraw(self, key: Key) -> None:
        """See `Link`. Another process is told without waiting for it."""
        with self._lock:
            met = self._peers.get(_owner(key))
        if met is None:
            self._here.withdraw(key)
            return
        met.peer.tell("Withdraw", pb.Ask(key=write_key(key)), self._patience)

    def settle(self, key: Key) -> bool:
        """See `Link`. A taker in another process that has not read for `patience` seconds is not waited for."""
        self._here.withdraw(key)
        waiting = threading.Event()
        while self.lending.lends(key):
            self.lending.expire()
            waiting.wait(WAIT)
        return self._here.settle(key)

    def give_up(self, worker: str) -> None:
        """See `Link`. Whoever takes from its process at this moment gets an error."""
        self._here.give_up(worker)
        self.lending.forget(worker)
        transfer = self._transfer(worker)
        self.part(worker)
        if self._pulls is not None:
            self._pulls.give_up(transfer)

    def close(self) -> None:
        """Ends the connections to all other processes."""
        with self._lock:
            peers, self._peers = self._peers, {}
        for met in peers.values():
            met.peer.close()

    def _transfer(self, name: str) -> str:
        """The address of a process's transfers between devices; "": bytes."""
        with self._lock:
            met = self._peers.get(name)
        return met.transfer if met is not None and self._pulls is not None else ""

    @contextmanager
    def _opened(
        self, name: str, key: Key, taker: str
    ) -> Iterator[tuple[_Met, str, Outline | None]]:
        """A transfer, from its beginning to its end: (its giver, its ticket, the tree or None)."""
        with self._lock:
            met = self._peers.get(name)
        if met is None:
            raise LinkError(f"{key} has not come from {name}, which was given up")
        ticket = ""
        try:
            ask = pb.Ask(key=write_key(key), taker=taker, session=self.session)
            lent = met.peer.call("Open", ask, pb.Lent, met.seconds())
            ticket = lent.ticket
            yield met, ticket, Outline(lent.outline, self.known) if ticket else None
        except (PeerError, TimeoutError, jax.errors.JaxRuntimeError) as error:
            raise LinkError(f"{key} has not come from {name}: {error}") from error
        finally:
            if ticket:
                met.peer.tell("Close", pb.Piece(ticket=ticket), self._patience)

    def _pulled(
        self, met: _Met, ticket: str, outline: Outline, wanted: list[Sharding]
    ) -> list[jax.Array]:
        shapes = [array.shape for array in outline.raw]
        layouts = write_layouts([layout_of(*pair) for pair in zip(wanted, shapes, strict=True)])
        asked = pb.Wanted(ticket=ticket, layouts=layouts)
        staged = met.peer.call("Stage", asked, pb.Staged, met.seconds())
        lying = read_layouts(staged.layouts, len(wanted))
        return self._pulls.pull(met.transfer, staged.number, outline.raw, lying, wanted)

    def _read(
        self,
        met: _Met,
        ticket: str,
        outline: Outline,
        place: Callable[[int, np.ndarray], Any],
    ) -> list[Any]:
        """The arrays of a tree, each of them placed as soon as it is here."""
        found: dict[int, Any] = {}
        with closing(self._frames(met, ticket, len(plan(outline.raw)))) as frames:
            for number, array in gathered(outline.raw, frames):
                found[number] = place(number, array)
        return [found[number] for number in range(len(outline.raw))]

    def _frames(self, met: _Met, ticket: str, count: int) -> Iterator[bytes]:
        """The frames in order; so many are asked for before the first has come."""
        asked: collections.deque[grpc.Future] = collections.deque()
        try:
            for number in range(count + WINDOW):
                if number >= WINDOW:
                    yield result(asked.popleft())
                if number < count:
                    piece = pb.Piece(ticket=ticket, number=number)
                    asked.append(met.peer.begin("Read", piece, None, met.seconds()))
        finally:
            for call in asked:
                call.cancel()


def _owner(key: Key) -> str:
    """Who offers a tree."""
    return TRAINER if isinstance(key, Publication) else key.worker
