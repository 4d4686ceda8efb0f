"""The leader under load: many streams, commands and events a second, how long each takes, and the leader's memory.

The meshes are pretended: each has a connection and a stream of its own, but a few processes hold them all, and answer
every command at once. These processes are this module, too.
"""

import asyncio
import collections
import dataclasses
import queue
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc

from digen_jax.errors import ConfigError, check_positive, check_range
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.identity import Identity
from digen_jax.remote.leader import Leader
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.messages import write
from digen_jax.remote.server import STREAMS
from digen_jax.remote.wire import GRACE, HELLO, OPTIONS, PACKAGE, Wire
from digen_jax.scheduling.commands import Encode
from digen_jax.scheduling.events import Completed

HOST = "127.0.0.1"
PROCESSES = 4  # that hold the pretended meshes
LONGEST = 120.0  # seconds for all meshes to join, and for an answer
MIB = 2**20
# An event is this text with the command's own in the middle.
COMMAND = Encode(0, "rollout 0", 0)
BEFORE, AFTER = write(Completed(0.0, COMMAND, 0.0)).split(write(COMMAND))
READY = pb.Report(ready=pb.Nothing())
PONG = pb.Report(pong=pb.Pong())


@dataclasses.dataclass(frozen=True)
class Rate:
    """Commands with their events a second, and milliseconds from a command to its event."""

    rate: float
    median: float
    worst: float  # of a hundred: the 99th percentile
    cpu: float  # milliseconds of the leader's processor for a command with its event

    def describe(self) -> str:
        """The end of a line."""
        return (
            f"{self.rate:,.0f} a second, {self.median:.1f} ms there and back in the median, {self.worst:.1f} ms at the "
            f"99th percentile, {self.cpu:.2f} ms of the leader's processor each"
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """The result.

    Attributes:
      meshes: their number.
      seconds: until all had joined.
      threads: of the leader, for them.
      memory: MiB of the leader's resident memory, for them.
      idle: the share of a processor that the leader needs for them without any command.
      all_at_once: seconds from a command to every mesh to the last event.
      paced: at a given rate.
      full: as many as there can be, one for each mesh on its way.
    """

    meshes: int
    seconds: float
    threads: int
    memory: float
    idle: float
    all_at_once: float
    paced: Rate
    full: Rate

    def describe(self) -> str:
        """A few lines for the console."""
        return "\n".join(
            [
                f"{self.meshes} pretended meshes of {PROCESSES} processes joined in {self.seconds:.1f} s; they cost "
                f"the leader {self.memory:.0f} MiB and {self.threads} threads, and {100 * self.idle:.0f}% of a "
                "processor for pings alone",
                f"a command to each of them at once: all events after {1000 * self.all_at_once:.0f} ms",
                f"paced: {self.paced.describe()}",
                f"one for each mesh on its way: {self.full.describe()}",
            ]
        )


def check(meshes: int, rate: float) -> None:
    """Refuses what cannot be measured.

    Raises:
      ConfigError: names the flag and what to change.
    """
    check_range("--meshes", meshes, 1, STREAMS)
    check_positive("--rate", rate)


def measure(meshes: int, rate: float, seconds: float = 10.0) -> Load:
    """Measures a leader with so many meshes: idle, with `rate` commands a second, and with as many as there can be.

    Each of the three takes `seconds`.
    """
    wire = Wire(Identity(secrets.token_hex(16), "", ""))
    memory, threads = _resident(), threading.active_count()
    with _led(wire, meshes) as (members, joined):
        memory, threads = _resident() - memory, threading.active_count() - threads
        used, begin = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        idle = (time.process_time() - used) / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for asked in [mesh.ask(_encode(mesh)) for mesh in members]:
            asked.result(LONGEST)
        at_once = time.perf_counter() - begin
        paced = _timed(members, rate, seconds)
        full = _timed(members, None, seconds)
    return Load(meshes, joined, threads, memory / MIB, idle, at_once, paced, full)


@contextmanager
def _led(wire: Wire, meshes: int) -> Iterator[tuple[list[Mesh], float]]:
    """(the members of a leader, seconds until they had joined)."""
    ready: queue.SimpleQueue[Mesh] = queue.SimpleQueue()
    leader = Leader(wire.identity, ready.put)
    server, port = wire.server(f"{HOST}:0", [leader.service])
    begin = time.perf_counter()
    shares = [range(i, meshes, PROCESSES) for i in range(min(PROCESSES, meshes))]
    processes = [_begin(wire, f"{HOST}:{port}", share) for share in shares]
    try:
        members = [ready.get(timeout=LONGEST) for _ in range(meshes)]
        yield members, time.perf_counter() - begin
    except queue.Empty:
        raise ConfigError(
            f"{len(leader.meshes)} of {meshes} meshes joined in {LONGEST:g} s: allow more open files (ulimit -n), or "
            "choose fewer by --meshes"
        ) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
        leader.close(seconds=0)
        server.stop(0).wait(GRACE)


def _begin(wire: Wire, address: str, share: range) -> subprocess.Popen:
    numbers = [str(n) for n in (share.start, share.stop, share.step)]
    command = [sys.executable, "-m", __name__, address, *numbers]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    process.stdin.write(f"{wire.identity.token}\n")
    process.stdin.flush()
    return process


def _encode(mesh: Mesh) -> Callable[[int], Encode]:
    return lambda serial: Encode(serial, mesh.name, 0)


def _timed(members: Sequence[Mesh], rate: float | None, seconds: float) -> Rate:
    """Commands to the members in turn, at a rate; None: one for each of them on its way."""
    took: list[float] = []
    asked: collections.deque = collections.deque()
    used, begin = time.process_time(), time.perf_counter()
    count = 0
    while (now := time.perf_counter()) < begin + seconds:
        if rate is not None:
            time.sleep(max(0.0, begin + count / rate - now))
        elif len(asked) >= len(members):
            asked.popleft().result(LONGEST)
        asked.append(_ask(members[count % len(members)], took))
        count += 1
        while rate is not None and asked and asked[0].done():
            asked.popleft().result()
    for one in asked:
        one.result(LONGEST)
    elapsed, used = time.perf_counter() - begin, time.process_time() - used
    found = statistics.quantiles(took, n=100)
    return Rate(count / elapsed, 1000 * found[49], 1000 * found[98], 1000 * used / count)


def _ask(mesh: Mesh, took: list[float]) -> object:
    begin = time.perf_counter()
    asked = mesh.ask(_encode(mesh))
    asked.add_done_callback(lambda _: took.append(time.perf_counter() - begin))
    return asked


def _resident() -> int:
    """Bytes of this process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# ------------------------------------------------------------------ in the processes of the meshes


async def _pretend(address: str, token: str, numbers: range) -> None:
    await asyncio.gather(*(_one(address, token, number) for number in numbers))


async def _one(address: str, token: str, number: int) -> None:
    """A mesh: says that it is ready, answers pings and commands until the leader ends."""
    wire = Wire(Identity(token, "", ""))
    hello = pb.Hello(mesh=f"rollout {number}", devices=1)
    metadata = (*wire.metadata, (HELLO, hello.SerializeToString()))
    async with grpc.aio.insecure_channel(address, OPTIONS) as channel:
        follow = channel.stream_stream(
            f"/{PACKAGE}.Control/Follow", pb.Report.SerializeToString, pb.Order.FromString
        )
        call = follow(metadata=metadata)
        with suppress(grpc.RpcError):
            await call.write(READY)
            async for order in call:
                match order.WhichOneof("kind"):
                    case "ping":
                        await call.write(PONG)
                    case "command" if '"Encode"' in order.command:
                        await call.write(pb.Report(event=f"{BEFORE}{order.command}{AFTER}"))


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    asyncio.run(_pretend(where, sys.stdin.readline().strip(), range(*map(int, numbers))))
