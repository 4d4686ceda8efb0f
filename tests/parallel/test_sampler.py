import itertools

import jax
import numpy as np
import pytest

from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from tests.cases import said
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

PROMPTS = ["red", "a blue", "green!"]
ROWS = np.array([0, 0, 0, 1, 1, 2, 2, 2], np.int32)
KEYS = image_keys(jax.random.key(5), 7 + ROWS, np.arange(8))
STEPS, GUIDANCE = 4, 3.0


@pytest.fixture(scope="module")
def split(exact_and_split):
    """Rollout worker of 1 x 4, parameters split over it."""
    return toy.system(
        toy.config(
            **toy.meshes((1, 4), (2, 2)),
            sampler__window=dict(first=1, length=2),
            sampler__steps=STEPS,
            sampler__guidance=GUIDANCE,
            evaluation__guidance=GUIDANCE,
        )
    )


@pytest.fixture(scope="module")
def alone(exact_and_split):
    """One device."""
    config = toy.config(
        sampler__window=dict(first=1, length=2), sampler__steps=STEPS, sampler__guidance=GUIDANCE
    )
    return toy.system(config, devices=1)


def generate(system, cut=slice(None), tuned=None):
    weights = system.rollout_weights(system.start if tuned is None else tuned)
    prompts = system.sampler.encode(weights, said(*PROMPTS))
    given = weights, prompts, ROWS[cut], KEYS[cut]
    return jax.device_get(toy.draw_and_show(system.sampler, *given, start=1))


@pytest.fixture(scope="module")
def whole(split):
    return generate(split)


def images_of(trajectory, cut):
    """The images of a trajectory: latents, and the transitions' x, x_next, log_prob."""
    return (trajectory.latents[cut], *(part[:, cut] for part in trajectory.transitions[:3]))


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("part", [slice(0, 4), slice(4, 8), np.array([6, 2, 5, 0, 7, 1, 3, 4])])
def test_an_image_does_not_depend_on_its_chunk_or_its_place_in_it(split, whole, part):
    images, trajectory = generate(split, part)
    close(images, whole[0][part])
    close(images_of(trajectory, slice(None)), images_of(whole[1], part))


def test_an_image_does_not_depend_on_the_mesh(alone, whole):
    images, trajectory = generate(alone)
    close(images, whole[0])
    close(images_of(trajectory, slice(None)), images_of(whole[1], slice(None)))


def test_a_chunk_stays_split_over_the_mesh(split):
    weights = split.rollout_weights(split.start)
    prompts = split.sampler.encode(weights, said(*PROMPTS))
    images, trajectory = toy.draw_and_show(split.sampler, weights, prompts, ROWS, KEYS)
    x, log_prob = trajectory.transitions.x, trajectory.transitions.log_prob
    assert {shard.data.shape for shard in images.addressable_shards} == {(2, 4, 4, 3)}
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 2, 4, 4, 4)}
    assert {shard.data.shape for shard in log_prob.addressable_shards} == {(2, 2)}


def test_without_noise_it_is_eulers_method_on_the_published_weights(split):
    tuned = toy.moved(split.start)
    weights = split.rollout_weights(tuned)
    prompts = split.evaluator.encode(weights, said(*PROMPTS))
    images, trajectory = toy.draw_and_show(split.evaluator, weights, prompts, ROWS, KEYS)
    assert trajectory.transitions.x.shape[0] == 0

    family, params = toy.ToyFamily(), toy.ToyFamily().params()
    network = {**params["transformer"], **jax.device_get(tuned["transformer"])}
    prompts = [part[ROWS] for part in family.encode(params, family.tokenize(said(*PROMPTS)))]
    null = [part[0 * ROWS] for part in family.encode(params, family.tokenize_null([]))]
    x, sigmas = np.asarray(start_noise(KEYS, family.size)), make_sigmas(SchedulerConfig(), STEPS)
    for sigma, sigma_next in itertools.pairwise(sigmas):
        v, v_null = (
            np.asarray(family.network.apply({"params": network}, x, np.full(8, sigma), *c))
            for c in (prompts, null)
        )
        x = x + (v_null + GUIDANCE * (v - v_null)) * (sigma_next - sigma)
    close(images, 1 / (1 + np.exp(-x @ params["vae"]["kernel"])))
