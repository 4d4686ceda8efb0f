"""Reward servers under load, with faults and a kill: each image gets one score, its own."""

import dataclasses

import numpy as np
import pytest

from benchmarks.rewards import Load, compare, drive, own_scores
from digen_jax.errors import ConfigError

LOAD = Load(clients=4, servers=2, requests=3, images=2, side=8)


@pytest.mark.slow
def test_each_image_gets_its_score_whatever_happens():
    load = Load(clients=32, servers=2, requests=8, images=2, side=32)
    said = []
    found = compare(load, said.append)
    assert found.faults.images == 512 and found.servers.attempts == 256
    assert set(found.faults.failures) == {"delay", "error", "disconnect", "lost", "spoilt"}
    assert (
        found.faults.attempts
        > 256 + sum(found.faults.failures[name] for name in ("error", "disconnect", "lost")) * 0.5
    )
    assert "512 images got exactly one score each" in found.describe()
    assert "ms an image" in said[0] and found.overhead == found.servers.each - found.local.each


def test_a_score_that_is_another_images_is_found():
    def right(images, prompts, metadata):
        return own_scores(images, prompts)

    assert drive(LOAD, right).images == 24
    for wrong in (
        lambda images, prompts, metadata: own_scores(images, prompts)[::-1],
        lambda images, prompts, metadata: own_scores(images, prompts) * np.float32(np.nan),
    ):
        with pytest.raises(RuntimeError, match="24 images have not their own score"):
            drive(LOAD, wrong)
    with pytest.raises(RuntimeError, match="an image got another score"):
        drive(LOAD, lambda images, prompts, metadata: own_scores(images, prompts)[:1])


def test_wrong_numbers_are_refused():
    with pytest.raises(ConfigError, match="--clients must be above 0"):
        dataclasses.replace(LOAD, clients=0).check()
    with pytest.raises(ConfigError, match="--servers=1 must be 2 or more"):
        dataclasses.replace(LOAD, servers=1).check()
