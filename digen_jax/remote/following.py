"""A mesh's process's end of control: joins the leader, yields its commands, reports events."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED, Stopped, last_word, leave
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.messages import Unreadable, read_command, write
from digen_jax.remote.wire import HELLO, PACKAGE, SILENCE, Wire
from digen_jax.runtime.clock import Stopwatch, measured
from digen_jax.scheduling.commands import Command, Publication, Publish
from digen_jax.scheduling.events import Completed, Failed

WAITING = 1024  # reports that the leader has not read
SILENCES = 3  # of the leader, until a name that another process has is refused
MEETING = 300.0  # seconds for the leader to come
# Seconds in which the main thread, which may read a model, notices that the leader is lost.
UNNOTICED = 1.0
Status = grpc.StatusCode
# The leader refuses this process, which can only be started differently.
REFUSED = {
    Status.UNAUTHENTICATED,
    Status.FAILED_PRECONDITION,
    Status.ALREADY_EXISTS,
    Status.INVALID_ARGUMENT,
    Status.UNIMPLEMENTED,
}


class Following:
    """The stream to the leader, which a thread reads. Its silence for some seconds, which it sets, means its loss.

    Args:
      wire: how to connect.
      leader: its host:port.
      hello: what this process is; the hashes are filled in.
      seconds: for the leader to come and to answer.

    Attributes:
      several: whether its mesh has more processes than this one.
      givers: by publication, who is to give weights that were ordered and not taken yet; without one: the trainer.

    Raises:
      ConfigError: the leader refuses this process, or does not come. Where another process has its name, which may be
        lost without the leader knowing it yet, that is so only after a while.
    """

    def __init__(self, wire: Wire, leader: str, hello: pb.Hello, seconds: float = MEETING):
        self.name, self._leader = hello.mesh, leader
        self.several = hello.processes > 1
        self.givers: dict[Publication, pb.Giver] = {}
        hello.config, hello.code = wire.identity.config, wire.identity.code
        self._reports: queue.Queue[pb.Report | None]
        # Commands, then None at the run's end, or the reason why there are no more.
        self._commands: queue.Queue[Command | Exception | None] = queue.Queue(WAITING)
        self._channel = wire.channel(leader)
        self._why = ""
        self._over, self._told = threading.Event(), threading.Event()
        self._leaving, self._signal = False, 0
        self._doing: dict[int, Stopwatch] = {}  # by the serials of the commands in progress
        self.reason = ""  # of the leader, for the end of its commands
        self.welcome = self._meet(wire, hello, seconds)
        self._heard = time.monotonic()
        for work in (self._watch, self._read):
            threading.Thread(target=work, name="leader", daemon=True).start()

    def _meet(self, wire: Wire, hello: pb.Hello, seconds: float) -> pb.Welcome:
        try:
            grpc.channel_ready_future(self._channel).result(seconds)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise ConfigError(
                f"the leader at {self._leader} was not reached in {seconds:g} s: check the address, that the leader "
                "has been started, and that both or neither use TLS"
            ) from None
        follow = self._channel.stream_stream(
            f"/{PACKAGE}.Control/Follow", pb.Report.SerializeToString, pb.Order.FromString
        )
        metadata = (*wire.metadata, (HELLO, hello.SerializeToString()))
        began, waits = time.monotonic(), False
        while True:
            try:
                return self._welcomed(follow, metadata, seconds)
            except (grpc.RpcError, StopIteration) as error:
                silence = _taken(error)
                if time.monotonic() - began >= SILENCES * silence:
                    self.close("")
                    raise self._ending(error) from None
            if not waits:
                waits = True
                print(
                    f"the leader at {self._leader} still holds another process to be {self.name}, perhaps one that is "
                    f"lost: this one waits for up to {SILENCES * silence:g} seconds",
                    flush=True,
                )
            time.sleep(silence / 4)

    def _welcomed(
        self, follow: grpc.StreamStreamMultiCallable, metadata: Any, seconds: float
    ) -> pb.Welcome:
        """The leader's first word; a stream that it refuses does not leave anything behind."""
        self._reports = reports = queue.Queue(WAITING)
        self._orders = follow(_outgoing(reports), metadata=metadata)
        late = threading.Timer(seconds, self._break_off, (f"did not answer in {seconds:g} s",))
        late.daemon = True
        late.start()
        try:
            return next(self._orders).welcome
        except (grpc.RpcError, StopIteration):
            reports.put(None)
            raise
        finally:
            late.cancel()

    def commands(self) -> Iterator[Command]:
        """Says that this process is ready, then yields the leader's commands, until it says that the run ends.

        Raises:
          Stopped: the leader is lost, counts this process as lost, or runs another version.
        """
        self._put(pb.Report(ready=pb.Nothing()))
        while (found := self._commands.get()) is not None:
            if isinstance(found, Exception):
                self._told.set()
                raise found
            yield found
        self._told.set()

    @contextmanager
    def does(self, command: Command) -> Iterator[Stopwatch]:
        """Times a block that executes a command, as `measured`; the leader hears how far it is."""
        with measured() as stopwatch:
            self._doing[command.serial] = stopwatch
            try:
                yield stopwatch
            finally:
                del self._doing[command.serial]

    def report(self, event: Completed | Failed) -> None:
        """Sends an event; nothing where the leader is lost. For any thread."""
        self._put(pb.Report(event=write(event)))

    def asked(self, signal: int) -> None:
        """Has the leader told soon that a signal asks this process to end. For a signal's handler, too."""
        self._signal = signal

    @property
    def ends(self) -> bool:
        """Whether this process was asked to end, by a signal or by the leader, has lost it, or has left it."""
        return bool(self._signal or self.reason or self._over.is_set())

    def ends_within(self, seconds: float) -> bool:
        """As `ends`, after so many seconds, or as soon as the leader is lost or has been left."""
        self._over.wait(seconds)
        return self.ends

    def missed(self, giver: str, failed: bool) -> None:
        """Tells the leader that weights are taken from the trainer: this giver has failed, or has them no longer."""
        self._put(pb.Report(missed=pb.Missed(giver=giver, failed=failed)))

    def close(self, reason: str, seconds: float = 1.0) -> None:
        """Leaves the leader, who is told why if it is still there; waits a little until it knows."""
        if reason and not self._over.is_set():
            self._leaving = True
            self._put(pb.Report(leaving=reason))
            self._put(None)
            ended = threading.Event()
            self._orders.add_done_callback(lambda _: ended.set())
            ended.wait(seconds)
        self._told.set()
        self._put(None)
        self._over.set()
        self._channel.close()

    # -------------------------------------------------------------------------- in other threads

    def _read(self) -> None:
        """Takes the leader's orders; if they end, and the main thread does not notice, so does the process."""
        try:
            found = self._read_all()
        except grpc.RpcError as error:
            found = self._ending(error)
        except Unreadable as error:
            found = Stopped(self._lost(f"sent what cannot be read ({error})"))
        except queue.Full:
            found = Stopped(self._lost("sends more commands than there are"))
        if self._leaving:  # then it is no loss
            found = None
        with suppress(queue.Full):
            self._commands.put_nowait(found)
        if found is not None and not self._told.wait(UNNOTICED):
            leave(last_word(str(found), STOPPED))

    def _read_all(self) -> Stopped | None:
        for order in self._orders:
            self._heard = time.monotonic()
            match order.WhichOneof("kind"):
                case "ping":
                    self._put(pb.Report(pong=self._progress()))
                case "command":
                    command = read_command(order.command)
                    if isinstance(command, Publish) and order.HasField("giver"):
                        self.givers[command.publication] = order.giver
                    self._commands.put_nowait(command)
                case "end":
                    self.reason = order.end
                    return None
        return Stopped(self._lost("has ended its connection"))

    def _progress(self) -> pb.Pong:
        doing = list(self._doing.items())
        return pb.Pong(doing=[pb.Doing(serial=n, seconds=one.so_far()) for n, one in doing])

    def _put(self, report: pb.Report | None) -> None:
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self._break_off("does not read the events of this process")

    def _watch(self) -> None:
        """Ends the stream where the leader is silent; tells it of a signal.

        Time in which this process was suspended does not count: what the leader has said may not be read yet.
        """
        silence, told = self.welcome.silence, 0
        every, before = silence / 16, time.monotonic()
        while not self._over.wait(every):
            now = time.monotonic()
            slept, before = max(0.0, now - before - 2 * every), now
            self._heard += slept
            if self._signal != told:
                told = self._signal
                self._put(pb.Report(asked=told))
            if now - self._heard > silence:
                self._break_off(f"has been silent for {silence:g} seconds")
                return

    def _break_off(self, why: str) -> None:
        self._why = self._why or why
        self._over.set()
        self._orders.cancel()

    def _ending(self, error: Exception) -> ConfigError | Stopped:
        """What the end of the stream means."""
        self._over.set()
        if self._why or not isinstance(error, grpc.RpcError):
            return Stopped(self._lost(self._why or "has ended its connection"))
        if error.code() in REFUSED:
            return ConfigError(
                f"the leader at {self._leader} refuses {self.name}: {error.details()}"
            )
        if error.code() == Status.ABORTED:
            return Stopped(f"{error.details()}: this process ends, start it again to join again")
        return Stopped(self._lost(f"is gone ({error.details()})"))

    def _lost(self, why: str) -> str:
        return (
            f"the leader at {self._leader} {why}: {self.name} ends with code {STOPPED}; start the whole job again, "
            "which continues from the last checkpoint"
        )


def _outgoing(reports: queue.Queue) -> Iterator[pb.Report]:
    while (report := reports.get()) is not None:
        yield report


def _taken(error: Exception) -> float:
    """The leader's silence where it refuses a name that another process has, who may be lost; else 0."""
    if not isinstance(error, grpc.RpcError) or error.code() != Status.ALREADY_EXISTS:
        return 0.0
    return float(dict(error.trailing_metadata() or ()).get(SILENCE, 0.0))
