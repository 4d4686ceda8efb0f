"""Reward servers under load, with faults and a kill: each image gets one score, its own."""

import pytest

from benchmarks.rewards import Requests, compare


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
