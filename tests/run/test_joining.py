"""How the processes of a mesh find one another where one of them is lost meanwhile."""

import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.launching import Place
from digen_jax.run import joining
from digen_jax.run.roles import Apart, Role

ROLE = Role("rollout 0", "rollout", devices=4, process=1, processes=2)
APART = Apart(ROLE, Place("leader", 1, 4, 3), "", "here", "bytes")


@pytest.fixture
def found(monkeypatch):
    """(the addresses that the leader names, those at which somebody listens, the jobs that were joined)."""
    named, listening, joined = [], set(), []

    def reach(host, port, seconds):
        assert 0 < seconds <= joining.LISTENING
        if (host, port) not in listening:
            raise ConfigError(f"{host}:{port} was not reached")

    monkeypatch.setattr(joining, "meet", lambda *_: named.pop(0) if len(named) > 1 else named[0])
    monkeypatch.setattr(joining, "reach", reach)
    monkeypatch.setattr(joining, "join_own", lambda job, apart: joined.append(job))
    return named, listening, joined


def test_a_first_process_that_comes_again_elsewhere_is_found(found):
    named, listening, joined = found
    named += ["dead:7", "dead:7", "[::1]:8"]
    listening.add(("::1", 8))
    joining.become_one(None, APART)
    assert joined == [Place("::1", 8, 2, 1)]


def test_a_first_process_that_does_not_come_is_not_waited_for_for_ever(found, monkeypatch):
    named, _, joined = found
    named.append("dead:7")
    monkeypatch.setattr(joining, "MEETING", 0.5)
    with pytest.raises(ConfigError, match="dead:7 was not reached"):
        joining.become_one(None, APART)
    assert not joined
