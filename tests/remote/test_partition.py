"""A mesh on a host that is cut off: its process in a network namespace, whose cable is pulled and put back."""

import contextlib
import os
import shutil
import subprocess
import time

import pytest

from digen_jax.process.ending import STOPPED
from digen_jax.remote.member import Gone, Keepalive
from tests.processes import begin  # noqa: F401
from tests.remote.mesh_process import FAST, WAITS, encode
from tests.remote.rooms import Room

pytestmark = pytest.mark.slow
MESH = "tests.remote.mesh_process"


class Host:
    """A namespace with a cable to this host."""

    def __init__(self):
        self.name = f"digen{os.getpid()}"
        self._end = f"dg{os.getpid()}"
        # Test processes run at the same time.
        third, last = divmod(4 * os.getpid() % 2**16, 256)
        self.here, self._there = (f"10.213.{third}.{last + i}" for i in (1, 2))

    def open(self) -> None:
        self._ip("netns", "add", self.name)
        self._ip(
            *("link", "add", self._end, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        )
        self._ip("address", "add", f"{self.here}/30", "dev", self._end)
        self._ip("link", "set", self._end, "up")
        self._ip("-n", self.name, "address", "add", f"{self._there}/30", "dev", "eth0")
        self._ip("-n", self.name, "link", "set", "lo", "up")
        self.cable(True)

    def cable(self, there: bool) -> None:
        """What is on its way without a cable is lost; neither side is told."""
        self._ip("-n", self.name, "link", "set", "eth0", "up" if there else "down")

    def close(self) -> None:
        self._ip("netns", "delete", self.name)

    @property
    def inside(self) -> tuple[str, ...]:
        """The beginning of a command there."""
        return "ip", "netns", "exec", self.name

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def host():
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip (iproute2), which makes network namespaces")
    found = Host()
    try:
        found.open()
    except subprocess.CalledProcessError as error:
        with contextlib.suppress(subprocess.CalledProcessError):
            found.close()
        pytest.skip(f"network namespaces need root: {error.stderr.decode().strip()}")
    yield found
    found.close()


def test_a_mesh_that_is_cut_off_is_lost_ends_and_may_come_again(host, begin):  # noqa: F811
    with contextlib.closing(Room(host=host.here)) as room:
        process = begin(MESH, before=host.inside, LEADER=room.address)
        member = room.joined()
        assert member.ask(encode(1)).result(30).command.step == 1
        slow = member.ask(encode(WAITS))
        host.cable(False)
        assert room.lost() == ("rollout 0", f"has been silent for {FAST.silence:g} seconds")
        with pytest.raises(Gone):
            slow.result(1)
        code, errors = process.ends(60)
        assert code == STOPPED and "Traceback" not in errors
        assert "has been silent for 2 seconds: rollout 0 ends with code 75" in errors
        host.cable(True)
        begin(MESH, before=host.inside, LEADER=room.address)
        assert room.joined().ask(encode(2)).result(30).command.step == 2


def test_a_short_cut_costs_nothing(host, begin):  # noqa: F811
    with contextlib.closing(Room(Keepalive(ping=0.5, silence=20.0), host=host.here)) as room:
        process = begin(MESH, before=host.inside, LEADER=room.address)
        member = room.joined()
        host.cable(False)
        asked = [member.ask(encode(step)) for step in range(20)]
        time.sleep(1.5)
        assert not any(one.done() for one in asked)
        host.cable(True)
        assert [one.result(60).command.step for one in asked] == [*range(20)]
        assert room.said.empty() and process.process.poll() is None
