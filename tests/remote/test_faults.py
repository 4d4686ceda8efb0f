"""Processes that are killed, stopped and continued, on both ends of the stream."""

import signal
import time

import pytest

from digen_jax.process.ending import STOPPED
from digen_jax.remote.member import Gone
from tests.processes import begin  # noqa: F401
from tests.remote.mesh_process import FAST, WAITS, encode

pytestmark = pytest.mark.slow
MESH = "tests.remote.mesh_process"


def test_a_stopped_mesh_is_lost_and_ends_when_it_goes_on(room, begin):  # noqa: F811
    process = begin(MESH, LEADER=room.address)
    slow = room.joined().ask(encode(WAITS))
    process.signal(signal.SIGSTOP)
    assert room.lost() == ("rollout 0", f"has been silent for {FAST.silence:g} seconds")
    with pytest.raises(Gone):
        slow.result(1)
    time.sleep(1)
    process.signal(signal.SIGCONT)
    code, errors = process.ends(60)
    # Whichever it notices first.
    assert code == STOPPED and "Traceback" not in errors
    assert "counts rollout 0 as lost" in errors or "has been silent" in errors
    assert not room.leader.meshes


def test_a_mesh_ends_without_its_leader(begin):  # noqa: F811
    leader = begin(MESH)
    mesh = begin(MESH, LEADER=leader.line())
    assert leader.line() == "joined"
    leader.signal(signal.SIGSTOP)
    code, errors = mesh.ends(60)
    assert code == STOPPED
    assert "rollout 0 ends with code 75; start the whole job again" in errors
    assert "Traceback" not in errors
