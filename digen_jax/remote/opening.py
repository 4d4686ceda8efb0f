"""Opens the two ends: the leader's, where its processes join, and that of a mesh's process."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import grpc

from digen_jax.errors import ConfigError, check_choice
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.fanout import MOST, Fanout
from digen_jax.remote.following import MEETING, Following
from digen_jax.remote.leader import ENDED, Leader
from digen_jax.remote.link import PATIENCE, RemoteLink
from digen_jax.remote.member import Keepalive
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.pull import Pulls
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.wire import GRACE, Wire
from digen_jax.scheduling.commands import TRAINER

BYTES, TRANSFER = "bytes", "transfer"


def open_pulls(kind: str, host: str, patience: float = PATIENCE) -> Pulls | None:
    """Transfers between devices where `kind` is "transfer"; None: bytes over gRPC.

    Raises:
      ConfigError: there are none here, or `kind` is neither.
    """
    check_choice("the link", kind, (BYTES, TRANSFER))
    if kind == BYTES:
        return None
    try:
        return Pulls(host, patience)
    # jaxlib's errors are of several types, by the platform.
    except Exception as error:
        raise ConfigError(
            f"there is no jax.experimental.transfer here ({error}): choose {BYTES!r} as link"
        ) from error


@contextmanager
def lead(
    wire: Wire,
    address: str,
    known: Mapping[str, type],
    pulls: Pulls | None = None,
    joined: Callable[[RemoteSampler], None] = lambda sampler: None,
    lost: Callable[[Mesh, str], None] = lambda mesh, why: None,
    keepalive: Keepalive | None = None,
    step: Callable[[], int] = lambda: 0,
    others: Sequence[grpc.GenericRpcHandler] = (),
    ended: Callable[[Mesh], None] = lambda mesh: None,
    most: int = MOST,
    trainers: int = 1,
) -> Iterator[tuple[Leader, RemoteLink, str]]:
    """The leader's end: (who has joined, its link, the address at which it listens).

    Args:
      wire: how to connect.
      address: host:port to listen at; the port 0 chooses a free one.
      known: the named tuples that may be nodes of a tree.
      pulls: transfers between devices; None: bytes.
      joined: as in `Leader`, called with the executor of a sampling mesh.
      lost: as in `Leader`.
      keepalive: None: the usual one.
      step: the present one.
      others: more services of its server.
      ended: as in `Leader`.
      most: meshes that take published weights from one giver at a time: see `Fanout`. Between devices all may.
      trainers: as in `Leader`.

    Raises:
      ConfigError: it cannot listen there.
    """
    link = RemoteLink(wire, known, pulls)
    fanout = Fanout(most) if pulls is None else None  # between devices the trainer gives to all

    def met(mesh: Mesh) -> None:
        if mesh.name == TRAINER:
            return
        link.meet(mesh.name, mesh.first.address, mesh.first.transfer, mesh.sessions)
        print(f"{mesh.name} joins: its arrays come as {link.describe(mesh.name)}", flush=True)
        joined(RemoteSampler(mesh, link, fanout))

    transfer = "" if pulls is None else pulls.address
    missed = (lambda *_: None) if fanout is None else fanout.missed
    leader = Leader(wire.identity, met, lost, keepalive, transfer, step, missed, ended, trainers)
    server, reason = None, ENDED
    try:
        server, port = wire.server(address, [leader.service, link.lending.service, *others])
        yield leader, link, f"{address.rpartition(':')[0]}:{port}"
    except BaseException:
        reason = "the leader has failed"
        raise
    finally:
        leader.close(reason)
        link.close()
        if server is not None:
            server.stop(GRACE).wait(2 * GRACE)


@contextmanager
def join(
    wire: Wire,
    leader: str,
    mesh: str,
    devices: int,
    host: str,
    known: Mapping[str, type],
    pulls: Pulls | None = None,
    seconds: float = MEETING,
    process: int = 0,
    processes: int = 1,
) -> Iterator[tuple[Following, RemoteLink]]:
    """A mesh's end: (the stream to the leader, its link). What is slow, such as reading a model, comes after.

    Args:
      wire: how to connect.
      leader: its host:port.
      mesh: the name of this process's mesh.
      devices: of the mesh.
      host: the address of this host at which the leader reaches it.
      known: as in `lead`.
      pulls: as in `lead`.
      seconds: for the leader to come.
      process: of the mesh, this one's number.
      processes: of the mesh.

    Raises:
      ConfigError: the leader refuses this process, or does not come.
    """
    link = RemoteLink(wire, known, pulls)
    server, port = wire.server(f"{host}:0", [link.lending.service])
    following = None
    try:
        transfer = "" if pulls is None else pulls.address
        address = f"{host}:{port}"
        hello = pb.Hello(mesh=mesh, address=address, transfer=transfer, devices=devices)
        hello.process, hello.processes, hello.session = process, processes, link.session
        hello.pid = os.getpid()
        following = Following(wire, leader, hello, seconds)
        link.meet(TRAINER, leader, following.welcome.transfer)
        print(f"{mesh} joins {leader}: weights come as {link.describe(TRAINER)}", flush=True)
        yield following, link
    finally:
        if following is not None:
            following.close("it has ended")
        link.close()
        server.stop(0)
