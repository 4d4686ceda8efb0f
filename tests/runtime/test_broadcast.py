"""Waits of several processes for one another."""

import json
import math
import types

import jax
import pytest

from digen_jax.config.load import load_config
from digen_jax.errors import ConfigError
from digen_jax.logging.workdir import own_claim
from digen_jax.policies import place_here
from digen_jax.process import job
from digen_jax.process.shutdown import Stopped
from digen_jax.runtime import opening
from tests.run.test_train import config


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ("DEADLINE_EXCEEDED: Barrier timed out", "5 seconds .config.runtime.deadline."),
        ("UNAVAILABLE: the service has ended", "has ended"),
    ],
)
def test_a_barrier_that_a_process_does_not_reach_stops_the_run(monkeypatch, status, why):
    waits = []

    def wait(name, milliseconds, process_ids):
        assert process_ids is None
        waits.append((name, milliseconds))
        if milliseconds == 5000:
            raise jax.errors.JaxRuntimeError(status)

    state = types.SimpleNamespace(
        client=types.SimpleNamespace(wait_at_barrier=wait), num_processes=2, process_id=1
    )
    monkeypatch.setattr(opening.distributed, "global_state", state)
    job.barrier("storing prompts", math.inf)
    with pytest.raises(Stopped, match=why):
        job.barrier("storing prompts", 5)
    assert waits[0][1] == 10**9 and waits[0][0] != waits[1][0]
    state.num_processes = 1
    job.barrier("storing prompts", 5)
    assert len(waits) == 2


@pytest.fixture
def answers(monkeypatch):
    """The answers that are there, by process, of a job of four."""
    found = {}

    def get(key, milliseconds):
        number = int(key.rpartition("/")[2])
        if number not in found:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED after {milliseconds} ms")
        return found[number]

    def put(key, text):
        found[int(key.rpartition("/")[2])] = text

    client = types.SimpleNamespace(blocking_key_value_get=get, key_value_set=put)
    state = types.SimpleNamespace(client=client, num_processes=4, process_id=0)
    monkeypatch.setattr(opening.distributed, "global_state", state)
    return found, state


def test_the_first_process_waits_for_the_answers_of_all_others(answers):
    found, state = answers
    first = opening.CommandBroadcast()
    for state.process_id in (1, 2):
        opening.answer("")
    with pytest.raises(Stopped, match=r"process 3 .* 5 seconds"):
        first.wait_for_answers(5)
    state.process_id = 3
    opening.answer("another folder")
    with pytest.raises(ConfigError, match="another folder"):
        first.wait_for_answers(5)
    found[3] = ""
    first.wait_for_answers(5)


def test_workers_that_share_a_job_do_not_wait_for_one_another(answers, monkeypatch):
    """Of four processes two train and two sample."""
    found, state = answers
    for name in ("_first", "_count"):
        monkeypatch.setattr(job, name, getattr(job, name))
    count = jax.process_count
    monkeypatch.setattr(jax, "process_count", count)
    job.set_group(0, 2)
    assert job.several() and job.is_first() and job.members() == [0, 1]
    found[1] = ""
    opening.CommandBroadcast().wait_for_answers(5)
    waits = []
    state.client.wait_at_barrier = lambda *_, process_ids: waits.append(process_ids)
    job.barrier("storing prompts", 5)
    assert waits == [[0, 1]]
    state.process_id = 2
    assert not job.is_first()
    job.set_group(2, 2)
    assert job.is_first()
    # The mesh of one process: there is nobody to wait for, also not for libraries.
    assert jax.process_count is count
    job.set_group(0, 1)
    assert not job.several() and jax.process_count() == 1
    job.barrier("storing prompts", 5)
    assert len(waits) == 1


@pytest.mark.parametrize(("steps", "lock", "named"), [(2, True, "config"), (1, False, "--workdir")])
def test_another_config_or_workdir_is_answered(tmp_path, monkeypatch, steps, lock, named):
    """A process that follows the first one reports what differs, and ends with the first one's error."""
    first, own = (place_here(load_config(config(tmp_path, steps=n))) for n in (1, steps))
    if lock:
        (tmp_path / ".lock").write_text(own_claim())
    begin, answers = json.dumps([first.as_json(), own_claim()]), []
    monkeypatch.setattr(opening, "answer", answers.append)
    log = opening.FollowedLog(iter([("begin", begin), ("end", ("refused", None))]))
    with pytest.raises(opening.RunEnded) as end:
        opening._follow(own, tmp_path, log, None)
    assert end.value.args == ("refused", None) and len(answers) == 1 and named in answers[0]
