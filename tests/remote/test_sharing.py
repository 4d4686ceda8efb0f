"""The trainer's link in several processes: what the first one has taken, the others take from it."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from digen_jax.remote.link import RemoteLink
from digen_jax.remote.sharing import TrainerLink
from digen_jax.remote.wire import Wire
from digen_jax.runtime.link import ConditioningOf, SamplesOf
from digen_jax.scheduling.commands import TRAINER, Fragment
from tests.remote.mesh_process import IDENTITY

PROMPTS, SAMPLES = np.arange(6.0, dtype=np.float32), np.arange(8.0, dtype=np.float32)
FRAGMENT = Fragment(3, 1)


def here(tree):
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)


@pytest.fixture
def processes():
    """(two rollout meshes' links, the trainer's two processes' own, what the first of these offers)."""
    with contextlib.ExitStack() as stack:
        links, addresses = [], []
        for _ in range(4):
            link = RemoteLink(Wire(IDENTITY), {})
            server, port = Wire(IDENTITY).server("localhost:0", [link.lending.service])
            stack.callback(server.stop, 0)
            stack.callback(link.close)
            links.append(link)
            addresses.append(f"localhost:{port}")
        *rollouts, first, second = links
        for number in range(2):
            first.meet(f"rollout {number}", addresses[number])
        second.meet(TRAINER, addresses[2])
        trainer = TrainerLink(first, 0, 2), TrainerLink(second, 1, 2)
        yield rollouts, trainer, first._here._offered


def test_a_steps_prompts_are_there_for_all_whichever_mesh_encoded_them(processes):
    """The first process took them with the first mesh's samples, and heard of the other one's samples before."""
    rollouts, (first, second), offered = processes
    for number, link in enumerate(rollouts):
        link.offer(ConditioningOf(f"rollout {number}", 3), {"context": PROMPTS})
        link.offer(SamplesOf(f"rollout {number}", FRAGMENT), (SAMPLES, PROMPTS))
    assert first.take(ConditioningOf("rollout 0", 3), here, TRAINER) is not None
    for one in (first, second):
        samples, _ = one.take(SamplesOf("rollout 1", FRAGMENT), here, TRAINER)
        np.testing.assert_array_equal(samples, SAMPLES)
    found = second.take(ConditioningOf("rollout 1", 3), here, TRAINER)
    np.testing.assert_array_equal(found["context"], PROMPTS)
    for _ in range(100):  # another process is told without waiting for it
        if not offered:
            break
        second._link.fetch(ConditioningOf(TRAINER, 0), TRAINER)
    assert not offered


def test_prompts_that_nobody_takes_end_with_their_step(processes):
    rollouts, (first, second), offered = processes
    rollouts[0].offer(ConditioningOf("rollout 0", 3), {"context": PROMPTS})
    first.take(ConditioningOf("rollout 0", 3), here, TRAINER)
    assert offered
    first.withdraw(ConditioningOf(TRAINER, 3))
    assert not offered and second.take(ConditioningOf("rollout 0", 3), here, TRAINER) is None
