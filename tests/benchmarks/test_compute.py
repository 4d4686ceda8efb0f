"""Sampling and training in separate processes: the same step, on any division of its halves."""

import dataclasses
import queue
import types

import jax
import numpy as np
import pytest

from benchmarks.compute import Roles, Speed, compare
from digen_jax.config.load import load_config
from digen_jax.parallel.placement import ONE_DEVICE
from tests.parallel import toy
from tests.tiny_runs import prompt_file


@pytest.fixture
def config(base):
    file = str(prompt_file(base))
    return toy.config(prompts__file=file, evaluation__prompts=file, sampler__chunk=4)


def build(config, devices):
    return toy.system(config, len(devices))


@pytest.mark.slow
def test_chunks_through_a_link_train_to_the_same_bits(config):
    alone = load_config(config).with_meshes(ONE_DEVICE)
    system = build(alone, jax.devices()[:1])  # compiled once for both
    starts = system, system._replace(start=toy.moved(system.start, 0.0))
    chunks = queue.SimpleQueue()
    link = types.SimpleNamespace(send=chunks.put, recv=chunks.get)
    one, other = (Roles(alone, link, lambda *_, start=start: start) for start in starts)
    start = jax.device_get(one.step.state.tuned)
    one.both()
    other.sample()
    other.train()
    trees = start, one.step.state.tuned, other.step.state.tuned
    before, found, expected = map(jax.tree.leaves, trees)
    assert max(np.abs(a - b).max() for a, b in zip(before, found, strict=True)) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_processes_on_a_core_each(config):
    rounds = []
    speed = compare(load_config(config), 1, lambda: rounds.append(1), build)
    assert len(rounds) == 1
    assert all(len(found) == 1 and found[0] > 0 for found in dataclasses.asdict(speed).values())
    assert speed.alternating[0] >= speed.sampling[0] + speed.training[0]


def test_the_ideal_hides_the_shorter_part():
    speed = Speed((1.0, 9.0, 1.0), (3.0, 3.0, 3.0), (4.0, 4.1, 12.0), (3.2, 3.3, 3.0))
    assert speed.ideal == pytest.approx(4 / 3)
    assert speed.speed_up == pytest.approx(4.1 / 3.2)
