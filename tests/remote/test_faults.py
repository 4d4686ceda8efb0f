"""Processes that are killed, stopped and continued, on both ends of the stream."""

import contextlib
import signal
import time

import pytest

from digen_jax.process.ending import STOPPED
from digen_jax.remote.member import Gone, Keepalive
from tests.remote.mesh_process import FAST, IDENTITY, WAITS, encode
from tests.remote.processes import begin  # noqa: F401
from tests.remote.rooms import Room

pytestmark = pytest.mark.slow
MESH = "tests.remote.mesh_process"


def test_a_killed_mesh_is_lost_and_may_come_again(room, begin):  # noqa: F811
    process = begin(MESH, LEADER=room.address)
    member = room.joined()
    assert member.ask(encode(1)).result(30).command.step == 1
    slow, killed = member.ask(encode(WAITS)), time.monotonic()
    process.signal(signal.SIGKILL)
    assert room.lost() == ("rollout 0", "has lost its connection")
    assert time.monotonic() - killed < 10
    with pytest.raises(Gone, match="rollout 0 has lost its connection"):
        slow.result(1)
    again = begin(MESH, LEADER=room.address)
    assert room.joined().ask(encode(2)).result(30).command.step == 2
    room.leader.close()
    assert again.ends(10)[0] == 0


def test_a_stopped_mesh_is_lost_and_ends_when_it_goes_on(room, begin):  # noqa: F811
    process = begin(MESH, LEADER=room.address)
    slow, stopped = room.joined().ask(encode(WAITS)), time.monotonic()
    process.signal(signal.SIGSTOP)
    assert room.lost() == ("rollout 0", f"has been silent for {FAST.silence:g} seconds")
    assert time.monotonic() - stopped < 10
    with pytest.raises(Gone):
        slow.result(1)
    time.sleep(1)
    process.signal(signal.SIGCONT)
    code, errors = process.ends(10)
    # Whichever it notices first.
    assert code == STOPPED and "Traceback" not in errors
    assert "counts rollout 0 as lost" in errors or "has been silent" in errors
    assert not room.leader.meshes


def test_a_mesh_that_is_started_again_beside_a_stopped_one_takes_its_place(begin):  # noqa: F811
    """The first one is not lost yet; it ends when it goes on."""
    with contextlib.closing(Room(Keepalive(ping=0.5, silence=16.0))) as room:
        first = begin(MESH, LEADER=room.address)
        room.joined()
        second = begin(MESH, LEADER=room.address)
        assert "still holds another process to be rollout 0" in second.line()
        first.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        name, why = room.lost()
        assert name == "rollout 0" and why.endswith("and another process comes in its place")
        member = room.joined()
        assert 7 < time.monotonic() - stopped < 30
        assert member.ask(encode(2)).result(30).command.step == 2
        first.signal(signal.SIGCONT)
        assert first.ends(10)[0] == STOPPED
        assert member.ask(encode(3)).result(30).command.step == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_mesh_ends_without_its_leader(begin, how):  # noqa: F811
    leader = begin(MESH)
    mesh = begin(MESH, LEADER=leader.line())
    assert leader.line() == "joined"
    lost = time.monotonic()
    leader.signal(how)
    code, errors = mesh.ends(10)
    assert code == STOPPED and time.monotonic() - lost < 10
    assert "rollout 0 ends with code 75; start the whole job again" in errors
    assert "Traceback" not in errors


def test_a_refused_process_prints_why_and_ends_with_code_2(room, begin):  # noqa: F811
    first = begin(MESH, LEADER=room.address)
    member = room.joined()
    code, errors = begin(MESH, LEADER=room.address).ends(60)
    assert code == 2 and "refuses rollout 0: rollout 0 has joined already" in errors
    assert "Traceback" not in errors and len(errors.splitlines()) == 1
    assert member.ask(encode(1)).result(30) and first.process.poll() is None
    assert IDENTITY.token not in errors
