"""Reward servers under load, with faults and a kill: each image gets one score, its own."""

import dataclasses

import numpy as np
import pytest

from benchmarks.rewards import Requests, compare, expected_scores, score_all
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


def test_a_wrong_score_is_found():
    def right(images, prompts, metadata):
        return expected_scores(images, prompts)

    assert score_all(REQUESTS, right).images == 24
    for wrong in (
        lambda images, prompts, metadata: expected_scores(images, prompts)[::-1],
        lambda images, prompts, metadata: expected_scores(images, prompts) * np.float32(np.nan),
    ):
        with pytest.raises(RuntimeError):
            score_all(REQUESTS, wrong)
    with pytest.raises(RuntimeError):
        score_all(REQUESTS, lambda images, prompts, metadata: expected_scores(images, prompts)[:1])


@pytest.mark.parametrize(("field", "value"), [("clients", 0), ("servers", 1)])
def test_too_few_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"--{field}"):
        dataclasses.replace(REQUESTS, **{field: value})
