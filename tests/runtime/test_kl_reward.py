"""The KL in the reward: of the policy that sampled, at each of its noisy steps, against float64 numpy."""

import json
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from digen_jax.planning.flops import RunFlops
from digen_jax.runtime import opening, training
from digen_jax.scheduling.commands import pack, unpack
from tests.parallel import toy
from tests.parallel.chunks import LORA, SCALE, adapted

pytestmark = pytest.mark.usefixtures("exact_and_split")

WEIGHT, GUIDANCE, NOISE = 3.0, 3.0, 0.7  # as in `toy.config`
GROUPS, IMAGES, STEPS = 2, 4, 2


class Recorder(opening.CommandBroadcast):
    """Keeps the scores that the coordinator sends to other processes."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, kind, value=None):
        self.sent += [value] * (kind == "scored")


def config(tuning, **fields):
    lora = LORA if tuning == "lora" else {}
    meshes = toy.meshes((0, 1), (2, 2)) if tuning == "full" else toy.meshes((2, 1), (1, 2))
    return toy.config(**dict(advantages__kl_reward=WEIGHT) | lora | meshes | fields)


def kl_of(tuned, reference, x, sigma, sigma_next, sigma_max, prompt, null):
    """KL of one step of Flow-GRPO's SDE: of Gaussians of equal std, whose means differ by a multiple of v."""

    def v(params):
        given, without = (toy.in_float64(params, x, sigma, *one) for one in (prompt, null))
        return without + GUIDANCE * (given - without)

    dt = sigma_next - sigma
    g = NOISE * np.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
    change = (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt * (v(tuned) - v(reference))
    return np.mean(change**2) / (2 * g**2 * -dt)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_runs_advantages_are_those_of_rewards_minus_the_kl_by_hand(monkeypatch, tuning):
    seen, rewards, real = [], [], training.make_train_batch

    def noted(system, prompts, images, advantages, weight, records):
        batch = real(system, prompts, images, advantages, weight, records)
        seen.append(jax.device_get((prompts, images.samples, images.sigmas, advantages)))
        return batch

    def brightness(*batch):
        rewards.append(toy.brightness(*batch))
        return rewards[-1]

    monkeypatch.setattr(training, "make_train_batch", noted)
    parts = toy.system(c := config(tuning))
    state = parts.updater.init(toy.moved(parts.start, 0.3))
    tuned = jax.device_get(state.tuned)
    _, (metrics,), _ = toy.drive(parts, c, 1, brightness, state=state)

    (((conditioning, null), t, sigmas, advantages),) = seen
    start = toy.ToyFamily().params()["transformer"]
    tuned = adapted(jax.tree.map(np.copy, start), tuned, SCALE)
    kl = np.zeros((GROUPS * IMAGES, STEPS))
    for step, image in np.ndindex(STEPS, GROUPS * IMAGES):
        prompt = [part[image // IMAGES].astype(float) for part in conditioning]
        given = t.x[step, image], t.sigma[step], t.sigma_next[step], sigmas[1]
        nothing = [part[0].astype(float) for part in null]
        kl[image, step] = kl_of(tuned, start, *map(np.float64, given), prompt, nothing)
    assert kl.min() > 1e-4
    # GenRL's stat_tracking: of each step alone, over the images of a group.
    reward = rewards[0][:, None] - WEIGHT * kl
    expected = np.zeros_like(reward)
    for group in np.split(np.arange(GROUPS * IMAGES), GROUPS):
        own = reward[group]
        expected[group] = (own - own.mean(axis=0)) / (own.std(axis=0) + 1e-4)
    assert advantages.shape == (GROUPS * IMAGES, STEPS)
    np.testing.assert_allclose(advantages, expected, rtol=2e-3, atol=2e-3)
    assert np.abs(expected[:, 0] - expected[:, 1]).max() > 0.1
    assert metrics["reward_kl"] == pytest.approx(kl.mean(), rel=1e-4)
    assert metrics["reward"] == pytest.approx(rewards[0].mean(), rel=1e-5)


def test_the_kl_leaves_samples_and_their_rewards_as_they_are_and_counts_its_passes():
    rewards = []
    for fields in (dict(), dict(advantages__kl_reward=0.0)):
        parts = toy.system(c := config("lora", **fields))
        broadcast, other = Recorder(), Mock()
        _, (metrics,), _ = toy.drive(parts, c, 1, broadcast=broadcast)
        for value in broadcast.sent:
            opening._execute(other, None, "scored", unpack(json.loads(json.dumps(pack(value)))))
        # The next step's chunk may have been scored, too.
        calls = (call.args for call in other.scored.call_args_list)
        scored = {command.chunk.step: one for command, one in calls}
        received = scored[0]
        assert (received.kl is None) == bool(fields)
        if not fields:
            assert received.kl.mean() == pytest.approx(metrics["reward_kl"], rel=1e-6)
        rewards.append(metrics["reward"])
        flops = RunFlops.of(toy.opened(c), parts.policy)
        forward = sum(parts.policy.family.flops(None)["transformer"].values())
        steps = c.sampler.steps + (STEPS if not fields else 0)
        assert flops.image == 2 * steps * forward  # with an unconditional pass
        assert ("reward_kl" in metrics) == (not fields)
    assert rewards[0] == rewards[1]
