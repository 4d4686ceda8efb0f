"""A leader with its server and meshes in threads of one process, for tests of control."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from digen_jax.remote import control_pb2 as pb
from digen_jax.remote import following
from digen_jax.remote.following import Following
from digen_jax.remote.leader import Leader
from digen_jax.remote.member import Keepalive
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import Tls, Wire
from tests.remote import mesh_process
from tests.remote.mesh_process import FAST, IDENTITY

# A test that is late to hear of a loss must not end the process of all tests.
following.UNNOTICED = 60.0


class Room:
    """A leader with its server, and what became of its members."""

    def __init__(
        self,
        keepalive: Keepalive = FAST,
        tls: Tls | None = None,
        host: str = "localhost",
        trainers: int = 1,
    ):
        self.said: queue.Queue[tuple[str, str]] = queue.Queue()
        self.step = 0
        self.leader = Leader(
            IDENTITY,
            lambda member: self.said.put(("joined", member.name)),
            lambda member, why: self.said.put((member.name, why)),
            keepalive,
            step=lambda: self.step,
            trainers=trainers,
        )
        self.server, port = Wire(IDENTITY, tls).server(f"{host}:0", [self.leader.service])
        self.address = f"{host}:{port}"

    def joined(self, name: str = "rollout 0"):
        assert self.said.get(timeout=120) == ("joined", name)
        return self.leader.meshes[name]

    def lost(self) -> tuple[str, str]:
        return self.said.get(timeout=60)

    def close(self) -> None:
        self.leader.close(seconds=0.5)
        self.server.stop(0.1).wait(10)


def soon(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it is not so after {seconds:g} seconds"
        time.sleep(0.01)


@pytest.fixture
def room():
    found = Room()
    yield found
    found.close()


@contextlib.contextmanager
def mesh(room: Room, name: str = "rollout 0", executes=None, tls: Tls | None = None):
    """A mesh in a thread of this process: (its stream, what its loop has raised)."""
    stream = Following(Wire(IDENTITY, tls), room.address, pb.Hello(mesh=name, devices=2), 20)
    raised = []

    def work():
        try:
            serve(stream, executes or mesh_process.Pretends())
            stream.close("the run has ended")
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield stream, raised
    stream.close("the test has ended", 5)
    thread.join(30)
    assert not thread.is_alive()
