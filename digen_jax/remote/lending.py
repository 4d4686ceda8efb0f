"""Gives away the trees that this process offers on its link, to other processes that ask for them by key."""

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np
from jaxtyping import UInt8

from digen_jax.process.ending import Stopped
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.frames import Cut, frame, plan, to_bytes
from digen_jax.remote.messages import Unreadable, read_key
from digen_jax.remote.outline import Outline, write_outline
from digen_jax.remote.pull import Pulls, read_layouts, write_layouts
from digen_jax.remote.server import Context
from digen_jax.remote.wire import service, unary
from digen_jax.runtime.link import Key, LocalLink

HELD = 2  # arrays of a ticket whose bytes are on the host
NOTHING = pb.Nothing()


@dataclasses.dataclass
class Ticket:
    """A transfer to another process that has begun."""

    key: Key
    taker: str
    session: str  # of the taker's process
    arrays: list[Any]
    frames: list[list[Cut]]
    used: float  # when it was last
    reading: int = 0  # calls at present
    staged: bool = False  # between devices
    held: dict[int, UInt8[np.ndarray, "_"]] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def bytes_of(self, number: int) -> UInt8[np.ndarray, "_"]:
        """The bytes of an array, brought to the host once for the frames that follow one another."""
        with self.lock:
            if number not in self.held:
                while len(self.held) >= HELD:
                    del self.held[next(iter(self.held))]
                self.held[number] = to_bytes(self.arrays[number])
            return self.held[number]


class Lending:
    """The service Lending. A ticket that nobody uses for `patience` seconds ends.

    Args:
      link: has the trees.
      known: the named tuples that may be nodes of a tree.
      pulls: for transfers between devices; None: bytes only.
      made: by the types of their keys, trees that are made when they are asked for.
    """

    def __init__(
        self, link: LocalLink, known: Mapping[str, type], patience: float, pulls: Pulls | None
    ):
        self._link, self._known, self._pulls = link, known, pulls
        self.made: dict[type, Callable[[Any], Any]] = {}
        self._patience = patience
        self._tickets: dict[str, Ticket] = {}
        self._sessions: dict[str, frozenset[str]] = {}  # by takers
        self._lost: set[str] = set()  # sessions
        self._lock = threading.Lock()

    @property
    def service(self) -> grpc.GenericRpcHandler:
        """For this process's server."""
        methods = {
            "Open": unary(self._open, pb.Ask),
            "Read": unary(self._read, pb.Piece, raw=True),
            "Stage": unary(self._stage, pb.Wanted),
            "Close": unary(self._close, pb.Piece),
            "Withdraw": unary(self._withdraw, pb.Ask),
        }
        return service("Lending", methods)

    def expire(self) -> None:
        """Ends the tickets that nobody has used for a while."""
        limit = time.monotonic() - self._patience
        with self._lock:
            old = [
                ticket
                for ticket, found in self._tickets.items()
                if found.used < limit and not found.reading
            ]
        for ticket in old:
            self._end(ticket)

    def expect(self, taker: str, sessions: frozenset[str]) -> None:
        """The processes of a taker are these from now on, and not those of before."""
        self.forget(taker, sessions)
        with self._lock:
            self._sessions[taker] = sessions

    def forget(self, taker: str, but: frozenset[str] = frozenset()) -> None:
        """Ends the tickets of a taker that is gone; where it is not gone, but stopped, it gets no others later.

        `but` has the sessions of those that come in its place and may have tickets already.
        """
        with self._lock:
            self._lost |= self._sessions.pop(taker, frozenset()) - but
            its = [
                ticket
                for ticket, found in self._tickets.items()
                if found.taker == taker and found.session not in but
            ]
        for ticket in its:
            self._end(ticket)

    def lends(self, key: Key) -> bool:
        """Whether a transfer of a tree to another process has begun and not ended."""
        with self._lock:
            return any(found.key == key for found in self._tickets.values())

    def _end(self, ticket: str, done: bool = False) -> None:
        """Ends a ticket; unless it is `done`, devices may still send what was staged."""
        with self._lock:
            found = self._tickets.pop(ticket, None)
        if found is not None:
            hung = not done and (found.staged or found.reading > 0)
            self._link.returned(found.key, found.taker, hung)

    # ------------------------------------------------------------------------- in gRPC's threads

    def _open(self, ask: pb.Ask, context: Context) -> pb.Lent:
        self.expire()
        key = _key(ask.key, context)
        tree = self._tree(key, ask.taker, context)
        if tree is None:
            return pb.Lent()
        try:
            text, arrays = write_outline(tree, self._known)
            frames = plan(Outline(text, self._known).raw)
        except ValueError as error:
            self._link.returned(key, ask.taker)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        ticket = secrets.token_hex(16)
        found = Ticket(key, ask.taker, ask.session, arrays, frames, time.monotonic())
        with self._lock:
            lost = ask.session in self._lost
            if not lost:
                self._tickets[ticket] = found
        if lost:
            self._link.returned(key, ask.taker)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{ask.taker} counts as lost")
        return pb.Lent(ticket=ticket, outline=text)

    def _tree(self, key: Key, taker: str, context: Context) -> Any:
        make = self.made.get(type(key))
        if make is None:
            return self._link.lend(key, taker)
        try:
            return make(key)
        except Stopped as error:
            return context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def _read(self, piece: pb.Piece, context: Context) -> bytes:
        found = self._used(piece.ticket, context)
        try:
            if piece.number >= len(found.frames):
                context.abort(grpc.StatusCode.OUT_OF_RANGE, "there is no such frame")
            return frame(found.frames[piece.number], found.bytes_of)
        finally:
            self._unused(found)

    def _stage(self, wanted: pb.Wanted, context: Context) -> pb.Staged:
        found = self._used(wanted.ticket, context)
        try:
            if self._pulls is None:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it offers bytes only")
            layouts = read_layouts(wanted.layouts, len(found.arrays))
            found.staged = True
            number, lying = self._pulls.stage(found.arrays, layouts)
            return pb.Staged(number=number, layouts=write_layouts(lying))
        except ValueError as error:
            return context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._unused(found)

    def _close(self, piece: pb.Piece, context: Context) -> pb.Nothing:
        self._end(piece.ticket, done=True)
        return NOTHING

    def _withdraw(self, ask: pb.Ask, context: Context) -> pb.Nothing:
        self._link.withdraw(_key(ask.key, context))
        self.expire()
        return NOTHING

    def _used(self, ticket: str, context: Context) -> Ticket:
        with self._lock:
            found = self._tickets.get(ticket)
            if found is not None:
                found.reading += 1
                found.used = time.monotonic()
                return found
        return context.abort(grpc.StatusCode.NOT_FOUND, "this transfer has ended")

    def _unused(self, found: Ticket) -> None:
        with self._lock:
            found.reading -= 1
            found.used = time.monotonic()


def _key(text: str, context: Context) -> Any:
    try:
        return read_key(text)
    except Unreadable as error:
        return context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"a key that cannot be read: {error}"
        )
