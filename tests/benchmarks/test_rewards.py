"""Reward servers under load, with faults and a kill: each image gets one score, its own."""

import dataclasses

import pytest

from benchmarks.rewards import Requests, compare
from digen_jax.errors import ConfigError

REQUESTS = Requests(clients=4, servers=2, requests=3, images=2, side=8)


@pytest.mark.slow
def test_each_image_gets_its_score_despite_faults():
    requests, log = Requests(clients=32, servers=2, requests=8, images=2, side=32), []
    found = compare(requests, log.append)
    assert found.faults.images == 512 and found.servers.attempts == 256
    failures = found.faults.failures
    assert set(failures) == {"delay", "error", "disconnect", "lost", "corrupted"}
    retried = sum(failures[name] for name in ("error", "disconnect", "lost"))
    assert found.faults.attempts > 256 + 0.5 * retried
    assert len(log) == 2 and found.overhead == found.servers.milliseconds - found.local.milliseconds


@pytest.mark.parametrize(("field", "value"), [("clients", 0), ("servers", 1)])
def test_too_few_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"--{field}"):
        dataclasses.replace(REQUESTS, **{field: value})
