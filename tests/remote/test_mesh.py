"""A mesh of several processes: they get the same commands, answer together, and are lost together."""

import contextlib
import threading
import time

import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.ending import Stopped
from digen_jax.remote import control_pb2 as pb
from digen_jax.remote.following import Following
from digen_jax.remote.identity import Identity
from digen_jax.remote.meeting import Meeting, meet
from digen_jax.remote.member import Gone
from digen_jax.remote.mesh import Mesh
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import Wire
from tests.remote import mesh_process
from tests.remote.mesh_process import FAST, IDENTITY, TOKEN, WAITS, encode
from tests.remote.rooms import Room, room, soon  # noqa: F401


class Process:
    """A process of a mesh, in a thread."""

    def __init__(self, room, number: int, of: int = 2, mesh: str = "rollout 0"):  # noqa: F811
        hello = pb.Hello(mesh=mesh, process=number, processes=of, devices=4)
        self.free = threading.Event()
        self.work = mesh_process.Pretends(self.free)
        self.stream = Following(Wire(IDENTITY), room.address, hello, 20)
        self.raised: list[Exception] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def begin(self) -> "Process":
        self.thread.start()
        return self

    def _serve(self) -> None:
        try:
            serve(self.stream, self.work, in_order=True)
            self.stream.close("the run has ended")
        except Exception as error:
            self.raised.append(error)

    def close(self) -> None:
        self.free.set()
        self.stream.close("the test has ended", 5)
        self.thread.join(30)


@pytest.fixture
def two(room):  # noqa: F811
    """(the mesh, its processes)."""
    with contextlib.ExitStack() as stack:
        first, second = Process(room, 0), Process(room, 1)
        for one in (first, second):
            stack.callback(one.close)
        second.begin()
        assert room.leader.wait_for({"rollout 0"}, 0.3) == {"rollout 0"} and room.said.empty()
        first.begin()
        yield room.joined(), first, second


def test_all_processes_get_the_same_commands_in_order(room, two):  # noqa: F811
    mesh, first, second = two
    assert (mesh.name, mesh.devices, mesh.processes) == ("rollout 0", 4, 2)
    asked = [mesh.ask(encode(step)) for step in range(20)]
    alone = mesh.ask_first(encode(33))
    assert [one.result(30).command.step for one in asked] == [*range(20)]
    assert alone.result(30).command.step == 33
    assert first.work.steps == [*range(20), 33] and second.work.steps == [*range(20)]


def test_what_fails_in_one_process_loses_the_mesh(room, two):  # noqa: F811
    """The other one waits for it in common work, for ever."""
    mesh, first, second = two
    first.work.do = lambda command: mesh_process.Pretends().do(
        encode(-3)(command.serial) if command.step == WAITS else command
    )
    begin = time.monotonic()
    assert isinstance(mesh.ask(encode(WAITS)).exception(30), Gone)
    assert FAST.silence <= time.monotonic() - begin < 50
    name, why = room.lost()
    assert name == "rollout 0" and "has failed in one of its processes" in why
    second.free.set()
    for one in (first, second):
        one.thread.join(10)
        assert isinstance(one.raised[0], Stopped)


def test_the_loss_of_one_process_is_that_of_the_mesh(room, two):  # noqa: F811
    mesh, first, second = two
    slow = mesh.ask(encode(WAITS))
    second.stream.close("it is broken", 5)
    assert room.lost() == (
        "rollout 0",
        "has lost process 1, which has left: it is broken",
    )
    assert isinstance(slow.exception(5), Gone) and not room.leader.meshes
    with pytest.raises(Gone):
        mesh.ask(encode(1))
    first.free.set()
    first.thread.join(10)
    assert "counts rollout 0, process 0, as lost" in str(first.raised[0])


def test_a_process_that_does_not_fit_its_mesh_is_refused(room, two):  # noqa: F811
    with pytest.raises(ConfigError, match="rollout 0 has 2 processes, not 3"):
        Process(room, 2, 3)
    with pytest.raises(ConfigError, match="its mesh has no process 2"):
        Process(room, 2)


def test_processes_of_a_mesh_meet_where_its_first_one_says():
    meeting = Meeting(IDENTITY)
    server, port = Wire(IDENTITY).server("localhost:0", [meeting.service])
    leader, found = f"localhost:{port}", []

    def of(process: int, job: str = "", identity: Identity = IDENTITY, seconds: float = 20):
        hello = pb.Hello(mesh="rollout 0", process=process)
        return meet(Wire(identity), leader, hello, job, seconds)

    second = threading.Thread(target=lambda: found.append(of(1)), daemon=True)
    second.start()
    time.sleep(0.2)
    assert not found and of(0, "10.0.0.1:99") == "10.0.0.1:99"
    second.join(10)
    assert found == ["10.0.0.1:99"]
    before = Mesh("rollout 0", 2, 1.0, lambda mesh, why: None)
    meeting.note("rollout 0", "10.0.0.1:100")
    meeting.forget(before)
    assert of(1) == "10.0.0.1:100"
    meeting.forget(Mesh("rollout 0", 2, 1.0, lambda mesh, why: None))
    with pytest.raises(ConfigError, match=r"the first process of rollout 0 has not come in 3 s"):
        of(1, seconds=3)
    with pytest.raises(ConfigError, match="refuses process 1 of rollout 0: its config is"):
        of(1, identity=Identity(TOKEN, "other", "v"))
    server.stop(0).wait(10)
