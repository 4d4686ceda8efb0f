"""The leader's end of control: one stream to each mesh's process, with commands in order and events back."""

import asyncio
import functools
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import grpc

from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.identity import Identity
from digen_jax.remote.member import Keepalive, Member
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.messages import Unreadable
from digen_jax.remote.server import STREAMS, loop
from digen_jax.remote.wire import SILENCE, hello_of, service
from digen_jax.runtime.worker import Line
from digen_jax.scheduling.commands import TRAINER, Update

ENDED = "the run has ended"
NAME = 100  # characters of a mesh's name


class Leader:
    """The service Control, with the meshes whose processes have joined by name.

    Args:
      identity: of the run; a process with another one is refused.
      joined, lost: called in one thread with a mesh that is ready for commands, and with such a one that is lost,
        after its calls have ended, unless it was dismissed. `lost` gets a reason, too.
      transfer: the address at which this process offers transfers between devices; "": it offers none.
      step: the present one.
      missed: called where a mesh has not got published weights from another one: see `Fanout.missed`.
      ended: called with every mesh that ends, ready or not; must be short.
      trainers: processes of the trainer's mesh; those that do not lead join as any others.
    """

    def __init__(
        self,
        identity: Identity,
        joined: Callable[[Mesh], None] = lambda mesh: None,
        lost: Callable[[Mesh, str], None] = lambda mesh, why: None,
        keepalive: Keepalive | None = None,
        transfer: str = "",
        step: Callable[[], int] = lambda: 0,
        missed: Callable[[str, str, bool], None] = lambda taker, giver, failed: None,
        ended: Callable[[Mesh], None] = lambda mesh: None,
        trainers: int = 1,
    ):
        self.meshes: dict[str, Mesh] = {}
        self._identity, self._joined, self._lost = identity, joined, lost
        self._keepalive, self._transfer = keepalive or Keepalive(), transfer
        self._step, self._missed, self._has_ended = step, missed, ended
        self._trainers = trainers
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._calls = Line("members")
        self._streams: dict[Member, asyncio.Task] = {}
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
            return names - {name for name, mesh in self.meshes.items() if mesh.ready}

        with self._changed:
            self._changed.wait_for(lambda: not missing(), seconds)
            return missing()

    def dismiss(self, name: str, why: str) -> None:
        """Tells a mesh to end after the commands that it works on; `lost` is not called for it."""
        with self._changed:
            mesh = self.meshes.get(name)
        if mesh is not None:
            mesh.dismiss(why)

    def close(self, reason: str = ENDED, seconds: float = 2.0) -> None:
        """Tells all processes that the run ends, and waits a little until they have left."""
        self._closed.set()
        with self._changed:
            for mesh in self.meshes.values():
                mesh.dismiss(reason)
            self._changed.wait_for(lambda: not self.meshes, seconds)
            left = list(self.meshes.values())
        for mesh in left:
            self._ended(mesh, "does not leave", known=True)
        self._calls.close()

    # ------------------------------------------------------------------------ in the servers' thread

    async def _follow(
        self, reports: AsyncIterator[pb.Report], context: grpc.aio.ServicerContext
    ) -> None:
        member = await self._admitted(context)
        listening = asyncio.create_task(self._listen(member, reports))
        self._streams[member] = asyncio.current_task()
        try:
            await context.write(await asyncio.to_thread(self._welcome))
            async for order in member.orders():
                await context.write(order)
        except asyncio.CancelledError:
            self._left(member, "has lost its connection")
            raise
        finally:
            del self._streams[member]
            listening.cancel()
        await context.abort(
            grpc.StatusCode.ABORTED, f"the leader counts {member.name} as lost: it {member.why}"
        )

    def _welcome(self) -> pb.Order:
        silence, step = self._keepalive.silence, self._step()
        return pb.Order(welcome=pb.Welcome(silence=silence, transfer=self._transfer, step=step))

    async def _admitted(self, context: grpc.aio.ServicerContext) -> Member:
        """The member of a hello; the call ends here if it is refused."""
        hello = hello_of(context)
        if hello is None or not 0 < len(hello.mesh) <= NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "its hello has no mesh's name")
        if hello.mesh == TRAINER and (not hello.process or hello.processes != self._trainers):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"it is none of the trainer's {self._trainers - 1} other processes",
            )
        sentence = self._identity.difference(hello.config, hello.code)
        if sentence is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        if hello.process >= max(1, hello.processes):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"its mesh has no process {hello.process}"
            )
        self._replaced(hello)
        member, why = self._entered(hello)
        if member is not None:
            return member
        if why is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        # It may try again for so long: the other one is perhaps lost.
        context.set_trailing_metadata([(SILENCE, str(self._keepalive.silence))])
        return await context.abort(
            grpc.StatusCode.ALREADY_EXISTS,
            f"{Member(hello).name} has joined already: give each process a mesh of its own, or end the other one",
        )

    def _entered(self, hello: pb.Hello) -> tuple[Member | None, str | None]:
        """(the member of a hello, why there cannot be one); neither: there is one already."""
        member, processes = Member(hello, self._keepalive), max(1, hello.processes)
        with self._changed:
            if (
                self._closed.is_set()
                or sum(len(m.members) for m in self.meshes.values()) >= STREAMS
            ):
                return None, f"there are {STREAMS} processes already, or the run ends"
            mesh = self.meshes.get(hello.mesh)
            if mesh is None:
                mesh = Mesh(hello.mesh, processes, self._keepalive.silence, self._ended)
                self.meshes[hello.mesh] = mesh
            if mesh.processes != processes:
                return None, f"{hello.mesh} has {mesh.processes} processes, not {processes}"
            if hello.process in mesh.members or mesh.dismissed is not None:
                return None, None
            mesh.members[hello.process] = member
            return member, None

    def _replaced(self, hello: pb.Hello) -> None:
        """Where another process comes in its place, half the silence is enough for a member to be lost."""
        with self._changed:
            mesh = self.meshes.get(hello.mesh)
            member = mesh and mesh.members.get(hello.process)
        if member is None:
            return
        silent = time.monotonic() - member.heard
        if silent > self._keepalive.silence / 2:
            self._left(
                member,
                f"has been silent for {silent:.1f} seconds, and another process comes in its place",
            )

    async def _listen(self, member: Member, reports: AsyncIterator[pb.Report]) -> None:
        """Takes a process's reports until its stream ends."""
        why = "has lost its connection"
        try:
            async for report in _unbroken(reports):
                member.heard = time.monotonic()
                match report.WhichOneof("kind"):
                    case "event":
                        member.answered(report.event)
                    case "pong":
                        member.working(report.pong)
                    case "ready":
                        await self._is_ready(member)
                    case "asked":
                        member.asked = report.asked
                    case "missed":
                        self._missed(member.mesh, report.missed.giver, report.missed.failed)
                    case "leaving":
                        why = f"has left: {report.leaving}"
                        break
        except Unreadable as error:
            why = f"sent what cannot be read: {error}"
        except Exception as error:  # a mistake of this code
            traceback.print_exception(error)
        finally:
            self._left(member, why)

    async def _is_ready(self, member: Member) -> None:
        last = await asyncio.to_thread(self._step) - 1
        with self._changed:
            mesh = self.meshes.get(member.mesh)
            if member.ready or member.why is not None or mesh is None:
                return
            member.ready = True
            if not mesh.ready:
                return
            # The first order of all: since their welcomes steps may have ended.
            mesh.tell(functools.partial(Update, worker=TRAINER, step=last, update=0))
            self._calls.submit(self._tell_joined, mesh)
            self._changed.notify_all()

    # --------------------------------------------------------------------------- in other threads

    def _tell_joined(self, mesh: Mesh) -> None:
        try:
            self._joined(mesh)
        except Exception as error:  # such as files of TLS that cannot be read any more
            traceback.print_exception(error)
            mesh.lose(f"cannot be used ({error!r})")

    def _tell_lost(self, mesh: Mesh, why: str) -> None:
        mesh.end(why)
        self._lost(mesh, mesh.why)

    def _left(self, member: Member, why: str) -> None:
        """A process's stream ends, and with it its mesh, unless that has ended or is dismissed."""
        member.end(why)
        with self._changed:
            mesh = self.meshes.get(member.mesh)
            if mesh is None or mesh.members.get(member.process) is not member:
                return
            if mesh.dismissed is not None and len(mesh.members) > 1:
                del mesh.members[member.process]
                return
        if mesh.processes > 1:
            self._ended(mesh, f"has lost process {member.process}, which {member.why}")
        else:
            self._ended(mesh, member.why)

    def _ended(self, mesh: Mesh, why: str, known: bool = False) -> None:
        """A mesh ends, unless it has; `known`: whoever calls knows it."""
        with self._changed:
            # Whoever comes first ends it: its processes' streams, too, notice that it ends.
            if self.meshes.get(mesh.name) is not mesh:
                return
            del self.meshes[mesh.name]
            self._has_ended(mesh)
            if mesh.ready and not known and mesh.dismissed is None:
                # Before another mesh can get its name, whose coming is told after this.
                self._calls.submit(self._tell_lost, mesh, why)
            self._changed.notify_all()
        mesh.end(why)
        # Their streams end with a sentence, unless a process does not read.
        for member in mesh.members.values():
            loop().call_soon_threadsafe(
                loop().call_later, self._keepalive.ping, self._break_off, member
            )

    def _break_off(self, member: Member) -> None:
        stream = self._streams.get(member)
        if stream is not None:
            stream.cancel()

    def _watch(self) -> None:
        """Pings members, and ends silent ones. Time in which this process was suspended does not count."""
        ping, silence = self._keepalive.ping, self._keepalive.silence
        every = min(ping, silence) / 16  # so short that it pings few members at the same time
        before = time.monotonic()
        while not self._closed.wait(every):
            now = time.monotonic()
            slept, before = max(0.0, now - before - 2 * every), now
            with self._changed:
                members = [one for mesh in self.meshes.values() for one in mesh.members.values()]
            for member in members:
                member.heard += slept
                if member.why is not None:  # it does not read
                    self._left(member, member.why)
                elif now - member.heard > silence:
                    self._left(member, f"has been silent for {silence:g} seconds")
                elif now - member.pinged >= ping:
                    member.ping()


async def _unbroken(reports: AsyncIterator[pb.Report]) -> AsyncIterator[pb.Report]:
    """A stream's reports, to its end or to where it breaks."""
    with suppress(Exception):  # gRPC's are of many types
        async for report in reports:
            yield report
