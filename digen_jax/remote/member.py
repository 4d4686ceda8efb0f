"""A mesh's process, as the leader sees it: the orders to it, and what it is asked and has not answered."""

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.failures import error_of
from digen_jax.remote.messages import read_event, write
from digen_jax.remote.server import loop
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import Command
from digen_jax.scheduling.events import Failed

WAITING = 1024  # commands that a process has not read yet; a run has a few
PING = pb.Order(ping=pb.Nothing())


@dataclasses.dataclass(frozen=True)
class Keepalive:
    """Seconds: between two words, and without one until either side counts the other as lost."""

    ping: float = 2.0
    silence: float = 8.0


class Asked(Future):
    """The coming answer to a command. Callbacks are called in the thread of all streams, and must be short."""

    def __init__(self, silence: float):
        super().__init__()
        self._silence, self._seen = silence, (0.0, time.monotonic())

    def seen(self, seconds: float) -> None:
        """Its process has just said that it has worked on it for so long."""
        self._seen = seconds, time.monotonic()

    def so_far(self) -> float:
        """Seconds of the work on it: what its process has said last, and the time since then."""
        seconds, when = self._seen
        return seconds + min(self._silence, time.monotonic() - when)


class Member:
    """A mesh's process, from its hello to its end. For any thread, but for `orders`.

    Attributes:
      mesh: its mesh's name.
      process: its number within the mesh.
      session: drawn by it, so that it is not taken for another one of its name.
      pid: its number on its host.
      heard: when it said something last, by `time.monotonic`.
      pinged: when it was asked to say something.
      ready: for commands.
      asked: to end, by this signal; 0: not.
      dismissed: it gets no more commands, for this reason.
      why: it has ended.
    """

    def __init__(self, hello: pb.Hello, keepalive: Keepalive | None = None):
        several = hello.processes > 1
        self.name = f"{hello.mesh}, process {hello.process}," if several else hello.mesh
        self.mesh, self.process, self.devices = hello.mesh, hello.process, hello.devices
        self.address, self.transfer = hello.address, hello.transfer
        self.session, self.pid = hello.session, hello.pid
        self.heard = self.pinged = time.monotonic()
        self.ready, self.asked = False, 0
        self.dismissed: str | None = None
        self.why: str | None = None
        self._keepalive = keepalive or Keepalive()
        self._orders: collections.deque[pb.Order] = collections.deque()
        self._ping = False  # to send
        self._more = asyncio.Event()
        self._asked: dict[int, tuple[Command, Asked]] = {}
        self._lock = threading.Lock()

    def ask(self, command: Command, giver: pb.Giver | None = None) -> Asked:
        """Sends a command, whose serial no other one has; the future has its `Completed`. `giver`: see `Mesh.ask`.

        The future has an error as soon as the command has failed (see `failures`) or the process is lost (`Gone`).
        """
        return self._send(command, Asked(self._keepalive.silence), giver)

    def tell(self, command: Command) -> None:
        """The same for a command that is not answered; a process that is lost gets none."""
        with suppress(Gone):
            self._send(command, None)

    def _send(
        self, command: Command, future: Asked | None, giver: pb.Giver | None = None
    ) -> Asked | None:
        with self._lock:
            if self.why is not None or self.dismissed is not None:
                raise Gone(f"{self.name} {self.why or f'was dismissed: {self.dismissed}'}")
            if len(self._orders) < WAITING:
                if future is not None:
                    self._asked[command.serial] = command, future
                self._put(pb.Order(command=write(command), giver=giver))
                return future
        self.end("does not read its commands")
        raise Gone(f"{self.name} {self.why}")

    def _put(self, order: pb.Order | None = None) -> None:
        if order is not None:
            self._orders.append(order)
        loop().call_soon_threadsafe(self._more.set)

    def answered(self, text: str) -> None:
        """Takes an event. An answer that nobody waits for is ignored, as that to a command that was given up."""
        event = read_event(text)
        with self._lock:
            command, future = self._asked.get(event.command.serial, (None, None))
            if command != event.command:
                return
            del self._asked[command.serial]
        with suppress(InvalidStateError):
            if isinstance(event, Failed):
                # What the whole run has to know is said as in one process.
                reason = event.reason if event.kind else f"{self.name}: {event.reason}"
                future.set_exception(error_of(event.kind, reason))
            else:
                future.set_result(event)

    def working(self, pong: pb.Pong) -> None:
        """Takes how far its commands are; one that it has not begun is not there."""
        seconds = {doing.serial: doing.seconds for doing in pong.doing}
        with self._lock:
            asked = [(seconds.get(serial, 0.0), one) for serial, (_, one) in self._asked.items()]
        for so_far, future in asked:
            future.seen(so_far)

    def ping(self) -> None:
        """Asks it to say something, between its commands."""
        self.pinged, self._ping = time.monotonic(), True
        self._put()

    def dismiss(self, reason: str) -> None:
        """Sends, after all commands, that there are no more."""
        with self._lock:
            self.dismissed = reason
            self._put(pb.Order(end=reason))

    def end(self, why: str) -> None:
        """Ends the stream, and whatever waits for an answer, unless it has ended before."""
        with self._lock:
            if self.why is not None:
                return
            self.why = why
        self.let_go(why)
        self._put()

    def let_go(self, why: str) -> None:
        """Ends whatever waits for an answer."""
        with self._lock:
            waiting, self._asked = self._asked, {}
        for _, future in waiting.values():
            with suppress(InvalidStateError):
                future.set_exception(Gone(f"{self.name} {why}"))

    async def orders(self) -> AsyncIterator[pb.Order]:
        """What to send, until the end."""
        while self.why is None:
            await self._more.wait()
            self._more.clear()
            while self.why is None and (self._ping or self._orders):
                if self._ping:
                    self._ping = False
                    yield PING
                else:
                    yield self._orders.popleft()
