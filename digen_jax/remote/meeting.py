"""How the processes of a mesh find one another: the leader tells them where the mesh's first process listens.

Each mesh of several processes is a job of `jax.distributed` of its own, which they form before JAX starts.
"""

import math
import threading
import time

import grpc

from digen_jax.errors import ConfigError
from digen_jax.process.terminal import complain
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.identity import Identity
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.server import Context
from digen_jax.remote.wire import PACKAGE, Wire, service, unary

LOOK = 0.5  # seconds between two questions


class Meeting:
    """The service Meeting: the newest address of each mesh's job."""

    def __init__(self, identity: Identity):
        self._identity = identity
        self._jobs: dict[str, tuple[str, float]] = {}  # and when it was noted
        self._lock = threading.Lock()

    @property
    def service(self) -> grpc.GenericRpcHandler:
        """For this process's server."""
        return service("Meeting", {"Meet": unary(self._meet, pb.Coming)})

    def note(self, mesh: str, job: str) -> None:
        """Where a mesh's first process listens."""
        with self._lock:
            self._jobs[mesh] = job, time.monotonic()

    def forget(self, mesh: Mesh) -> None:
        """A mesh has ended: its processes have to meet again, unless its successor's first one has come already."""
        with self._lock:
            _, noted = self._jobs.get(mesh.name, ("", math.inf))
            if noted < mesh.began:
                del self._jobs[mesh.name]

    def _meet(self, coming: pb.Coming, context: Context) -> pb.Met:
        hello = coming.hello
        if sentence := self._identity.difference(hello.config, hello.code):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        if coming.job:
            self.note(hello.mesh, coming.job)
        with self._lock:
            return pb.Met(job=self._jobs.get(hello.mesh, ("", 0.0))[0])


def meet(wire: Wire, leader: str, hello: pb.Hello, job: str, seconds: float) -> str:
    """Where the first process of this one's mesh listens; the leader must have started.

    Args:
      wire: how to connect.
      leader: its host:port.
      hello: what this process is; the hashes are filled in.
      job: where this process will listen, if it is the mesh's first; "": it is not.
      seconds: for the first process to come.

    Raises:
      ConfigError: the leader refuses this process, or the mesh's first process does not come.
    """
    hello.config, hello.code = wire.identity.config, wire.identity.code
    begin, waits = time.monotonic(), False
    with wire.channel(leader) as channel:
        call = channel.unary_unary(
            f"/{PACKAGE}.Meeting/Meet",
            request_serializer=pb.Coming.SerializeToString,
            response_deserializer=pb.Met.FromString,
        )
        while (left := begin + seconds - time.monotonic()) > 0:
            try:
                request = pb.Coming(hello=hello, job=job)
                found = call(request, timeout=left, metadata=wire.metadata).job
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:  # about to start, or gone
                    if not waits:
                        complain(f"waiting for the leader at {leader}, at most {left:.0f} s")
                    waits = True
                    time.sleep(LOOK)
                    continue
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    break
                raise ConfigError(
                    f"the leader at {leader} refuses process {hello.process} of {hello.mesh}: {error.details()}"
                ) from error
            if found:
                return found
            waits = False
            time.sleep(LOOK)
    raise ConfigError(
        f"the leader at {leader} was not reached in {seconds:g} s: start the whole job again"
        if waits
        else f"the first process of {hello.mesh} has not come in {seconds:g} s: start all processes of the job"
    )
