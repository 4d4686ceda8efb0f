"""The leader's end of control: one stream to each mesh's process, with commands in order and events back."""

import dataclasses
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import grpc

from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.failures import error_of
from digen_jax.remote.identity import Identity
from digen_jax.remote.messages import Unreadable, read_event, write
from digen_jax.remote.wire import SILENCE, STREAMS, hello_of, service
from digen_jax.runtime.worker import Gone, Line
from digen_jax.scheduling.commands import TRAINER, Command, Update
from digen_jax.scheduling.events import Failed

WAITING = 1024  # commands that a process has not read yet; a run has a few
NAME = 100  # characters of a mesh's name
PING = pb.Order(ping=pb.Nothing())


@dataclasses.dataclass(frozen=True)
class Keepalive:
    """Seconds: between two words, and without one until either side counts the other as lost."""

    ping: float = 2.0
    silence: float = 8.0


class Asked(Future):
    """The coming answer to a command."""

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
    """A mesh's process, from its hello to its end. For any thread."""

    def __init__(
        self, hello: pb.Hello, context: grpc.ServicerContext, keepalive: Keepalive | None = None
    ):
        self.name, self.devices = hello.mesh, hello.devices
        self.address, self.transfer = hello.address, hello.transfer
        self.heard = time.monotonic()
        self.ready = False  # for commands
        self.asked = 0  # to end, by this signal
        self.dismissed: str | None = None  # no more commands, for this reason
        self.why: str | None = None  # it has ended
        self._context, self._keepalive = context, keepalive or Keepalive()
        self._orders: queue.Queue[pb.Order | None] = queue.Queue(WAITING)
        self._asked: dict[int, tuple[Command, Asked]] = {}
        self._serials = itertools.count()
        self._lock = threading.Lock()

    def ask(self, make: Callable[[int], Command]) -> Asked:
        """Sends the command that `make` makes of its serial; the future has its `Completed`.

        The future has an error as soon as the command has failed (see `failures`) or the process is lost (`Gone`).
        """
        return self._send(make, Asked(self._keepalive.silence))

    def tell(self, make: Callable[[int], Command]) -> None:
        """The same for a command that is not answered; a process that is lost gets none."""
        with suppress(Gone):
            self._send(make, None)

    def _send(self, make: Callable[[int], Command], future: Asked | None) -> Asked | None:
        with self._lock:
            if self.why is not None or self.dismissed is not None:
                raise Gone(f"{self.name} {self.why or f'was dismissed: {self.dismissed}'}")
            serial = next(self._serials)
            command = make(serial)
            try:
                self._orders.put_nowait(pb.Order(command=write(command)))
                if future is not None:
                    self._asked[serial] = command, future
                return future
            except queue.Full:
                pass
        self.end("does not read its commands")
        raise Gone(f"{self.name} {self.why}")

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

    def end(self, why: str) -> None:
        """Ends the stream, and whatever waits for an answer, unless it has ended before."""
        with self._lock:
            if self.why is not None:
                return
            self.why = why
            waiting, self._asked = self._asked, {}
        for _, future in waiting.values():
            with suppress(InvalidStateError):
                future.set_exception(Gone(f"{self.name} {why}"))
        with suppress(queue.Full):
            self._orders.put_nowait(None)

    def dismiss(self, reason: str) -> None:
        """Sends, after all commands, that there are no more."""
        with self._lock, suppress(queue.Full):
            self.dismissed = reason
            self._orders.put_nowait(pb.Order(end=reason))

    def orders(self) -> Iterator[pb.Order]:
        """What to send, until the end: pings between the other orders, too, as they are asked for progress."""
        due = time.monotonic() + self._keepalive.ping
        while self.why is None:
            left = due - time.monotonic()
            if left <= 0:
                due = time.monotonic() + self._keepalive.ping
                yield PING
                continue
            with suppress(queue.Empty):
                order = self._orders.get(timeout=left)
                if order is None:
                    return
                yield order

    def break_off(self) -> None:
        """Ends the stream where its process does not read it."""
        self._context.cancel()


class Leader:
    """The service Control, with the processes that have joined by name.

    Args:
      identity: of the run; a process with another one is refused.
      joined, lost: called in one thread with a member that is ready for commands, and with such a one that is
        lost, after its calls have ended, unless it was dismissed. `lost` gets a reason, too.
      transfer: the address at which this process offers transfers between devices; "": it offers none.
      step: the present one.
    """

    def __init__(
        self,
        identity: Identity,
        joined: Callable[[Member], None] = lambda member: None,
        lost: Callable[[Member, str], None] = lambda member, why: None,
        keepalive: Keepalive | None = None,
        transfer: str = "",
        step: Callable[[], int] = lambda: 0,
    ):
        self.members: dict[str, Member] = {}
        self._identity, self._joined, self._lost = identity, joined, lost
        self._keepalive, self._transfer = keepalive or Keepalive(), transfer
        self._step = step
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._calls = Line("members")
        threading.Thread(target=self._watch, name="keepalive", daemon=True).start()

    @property
    def service(self) -> grpc.GenericRpcHandler:
        """For this process's server."""
        follow = grpc.stream_stream_rpc_method_handler(
            self._follow, pb.Report.FromString, pb.Order.SerializeToString
        )
        return service("Control", {"Follow": follow})

    def wait_for(self, names: set[str], seconds: float) -> set[str]:
        """Those of these meshes that are not ready in time."""

        def missing() -> set[str]:
            return names - {name for name, member in self.members.items() if member.ready}

        with self._changed:
            self._changed.wait_for(lambda: not missing(), seconds)
            return missing()

    def give_up(self, name: str, why: str) -> None:
        """Ends a member's stream, without the call of `lost`; whatever waits for it gets an error.

        One that was dismissed ends its work and leaves by itself.
        """
        with self._changed:
            member = self.members.get(name)
        if member is not None and member.dismissed is None:
            self._ended(member, why, known=True)

    def dismiss(self, name: str, why: str) -> None:
        """Tells a member to end after the commands that it works on; `lost` is not called for it."""
        with self._changed:
            member = self.members.get(name)
        if member is not None:
            member.dismiss(why)

    def close(self, reason: str = "the run has ended", seconds: float = 2.0) -> None:
        """Tells all processes that the run ends, and waits a little until they have left."""
        self._closed.set()
        with self._changed:
            for member in self.members.values():
                member.dismiss(reason)
            self._changed.wait_for(lambda: not self.members, seconds)
            left = list(self.members.values())
        for member in left:
            self._ended(member, "does not leave", known=True)
        self._calls.close()

    # ------------------------------------------------------------------------- in gRPC's threads

    def _follow(
        self, reports: Iterator[pb.Report], context: grpc.ServicerContext
    ) -> Iterator[pb.Order]:
        member = self._admitted(context)
        if not context.add_callback(lambda: self._ended(member, "has lost its connection")):
            self._ended(member, "has lost its connection")
            return
        # Not in the call's own thread, which sends.
        listener = threading.Thread(target=self._listen, args=(member, reports), daemon=True)
        listener.start()
        yield pb.Order(
            welcome=pb.Welcome(
                silence=self._keepalive.silence, transfer=self._transfer, step=self._step()
            )
        )
        yield from member.orders()
        context.abort(
            grpc.StatusCode.ABORTED, f"the leader counts {member.name} as lost: it {member.why}"
        )

    def _admitted(self, context: grpc.ServicerContext) -> Member:
        """The member of a hello; the call ends here if it is refused."""
        hello = hello_of(context)
        if hello is None or not 0 < len(hello.mesh) <= NAME or hello.mesh == TRAINER:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "its hello has no name of a sampling mesh"
            )
        sentence = self._identity.difference(hello.config, hello.code)
        if sentence is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        if hello.process:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"it is process {hello.process} of its mesh, but a mesh of several processes cannot be led yet",
            )
        self._replaced(hello.mesh)
        member = Member(hello, context, self._keepalive)
        with self._changed:
            there, full = hello.mesh in self.members, len(self.members) >= STREAMS
            if not (there or full or self._closed.is_set()):
                self.members[hello.mesh] = member
                return member
        if full or self._closed.is_set():
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"there are {STREAMS} meshes already, or the run ends",
            )
        # It may try again for so long: the other one is perhaps lost.
        context.set_trailing_metadata([(SILENCE, str(self._keepalive.silence))])
        return context.abort(
            grpc.StatusCode.ALREADY_EXISTS,
            f"{hello.mesh} has joined already: give each process a mesh of its own, or end the other one",
        )

    def _replaced(self, name: str) -> None:
        """Where another process comes in its place, half the silence is enough for a member to be lost."""
        with self._changed:
            member = self.members.get(name)
        if member is None:
            return
        silent = time.monotonic() - member.heard
        if silent > self._keepalive.silence / 2:
            self._ended(
                member,
                f"has been silent for {silent:.1f} seconds, and another process comes in its place",
            )

    def _listen(self, member: Member, reports: Iterator[pb.Report]) -> None:
        """Takes a process's reports until its stream ends."""
        why = "has lost its connection"
        try:
            for report in _unbroken(reports):
                member.heard = time.monotonic()
                match report.WhichOneof("kind"):
                    case "event":
                        member.answered(report.event)
                    case "pong":
                        member.working(report.pong)
                    case "ready":
                        self._is_ready(member)
                    case "asked":
                        member.asked = report.asked
                    case "leaving":
                        why = f"has left: {report.leaving}"
                        break
        except Unreadable as error:
            why = f"sent what cannot be read: {error}"
        finally:  # after a mistake of this code, too, which the thread prints
            self._ended(member, why)

    def _is_ready(self, member: Member) -> None:
        if member.ready:
            return
        # Its first order: since its welcome steps may have ended.
        last = self._step() - 1
        member.tell(functools.partial(Update, worker=TRAINER, step=last, update=0))
        with self._changed:
            if member.why is not None:
                return
            member.ready = True
            self._calls.submit(self._joined, member)
            self._changed.notify_all()

    # --------------------------------------------------------------------------- in other threads

    def _ended(self, member: Member, why: str, known: bool = False) -> None:
        """A member ends, unless it has; `known`: whoever calls knows it."""
        member.end(why)
        with self._changed:
            if self.members.get(member.name) is not member:
                return
            del self.members[member.name]
            self._changed.notify_all()
        if member.ready and not known and member.dismissed is None:
            self._calls.submit(self._lost, member, member.why)
        # Its own thread ends the stream with a sentence, unless the process does not read.
        timer = threading.Timer(self._keepalive.ping, member.break_off)
        timer.daemon = True
        timer.start()

    def _watch(self) -> None:
        """Ends members that are silent. Time in which this process was suspended does not count."""
        every, silence = self._keepalive.silence / 16, self._keepalive.silence
        before = time.monotonic()
        while not self._closed.wait(every):
            now = time.monotonic()
            slept, before = max(0.0, now - before - 2 * every), now
            with self._changed:
                members = list(self.members.values())
            for member in members:
                member.heard += slept
                if member.why is not None:  # it does not read
                    self._ended(member, member.why)
                elif now - member.heard > silence:
                    self._ended(member, f"has been silent for {silence:g} seconds")


def _unbroken(reports: Iterator[pb.Report]) -> Iterator[pb.Report]:
    """A stream's reports, to its end or to where it breaks."""
    try:
        yield from reports
    except Exception:  # gRPC's iterator raises a bare Exception
        return
