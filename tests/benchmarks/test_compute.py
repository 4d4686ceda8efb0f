"""Sampling and training in separate processes: the same step, on any division of its halves."""

import dataclasses
import multiprocessing
import threading

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
def test_chunks_by_a_link_train_as_chunks_at_hand(config):
    alone = load_config(config).with_meshes(ONE_DEVICE)
    system = build(alone, jax.devices()[:1])  # compiled once for both
    starts = system, system._replace(start=toy.moved(system.start, 0.0))
    at_hand, apart = (Roles(alone, lambda *_, found=one: found) for one in starts)
    start = jax.device_get(at_hand.state.tuned)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    at_hand.both(sending)
    sampler = threading.Thread(target=apart.sample, args=(sending,))
    sampler.start()
    apart.train(receiving)
    sampler.join()
    before, one, other = map(jax.tree.leaves, (start, at_hand.state.tuned, apart.state.tuned))
    assert max(np.abs(a - b).max() for a, b in zip(before, one, strict=True)) > 0
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_processes_on_a_core_each(config):
    rounds = []
    speed = compare(load_config(config), 1, lambda: rounds.append(1), build)
    assert len(rounds) == 1
    times = dataclasses.asdict(speed)
    assert all(len(found) == 1 and found[0] > 0 for found in times.values())
    assert speed.in_turn[0] >= speed.sampling[0] + speed.training[0]


def test_the_ideal_hides_the_shorter_part():
    speed = Speed((1.0, 9.0, 1.0), (3.0, 3.0, 3.0), (4.0, 4.1, 12.0), (3.2, 3.3, 3.0))
    assert speed.ideal == pytest.approx(4 / 3)
    assert speed.speed_up == pytest.approx(4.1 / 3.2)
    assert "1.28x of at most (G + T) / max(G, T) = 1.33x" in speed.describe()
