"""Windows that move, shared start noise and random shares of the steps, in the running system."""

import itertools

import jax
import numpy as np
import pytest

from digen_jax.diffusion.sampling import image_keys
from digen_jax.diffusion.schedule import Window, random_timesteps
from digen_jax.parallel.sampler import SampleRng
from digen_jax.runtime.training import TrainingExecutor
from digen_jax.scheduling.commands import TRAINER, Generate
from tests.cases import said
from tests.parallel import chunks, toy
from tests.parallel.test_memory import sent_latents
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split")

GROUPS, IMAGES = 2, 4
ADVANTAGES = np.array([1.5, -0.4, -0.9, 0.2, -1.7, 0.3, 0.8, 0.6], np.float32)


def one_device(window, **fields):
    window = dict(length=2) | window
    return toy.system(toy.config(sampler__window=window, **fields), devices=1)


def steps_of(system, count, size=8):
    """The first steps of a run, all of the same groups, sampled with the initial weights."""
    same = itertools.repeat(toy.records(GROUPS))
    return list(toy.sampled_steps(system, same, IMAGES, size, count, system.start))


def gradient(system, step):
    """For a step whose only chunk is sampled and trained on different meshes."""
    state = system.trainer.init(toy.moved(system.start, 0.05))
    train_batch = receive(system, step.prompts, step.images[0], ADVANTAGES)
    return system.trainer.accumulate(state, system.base, train_batch, None)


# ------------------------------------------------------------------------------ windows


def test_at_every_place_a_moving_window_is_a_fixed_one_and_nothing_is_compiled_anew():
    system = one_device(dict(mode="progressive", first=0, end=4, stride=2))
    places, seen = [0, 2, 0], []
    for place, step in zip(places, steps_of(system, 3), strict=True):
        t, sigmas = step.images[0].samples, step.images[0].sigmas
        np.testing.assert_array_equal(t.sigma, sigmas[place : place + 2])
        made = step.pictures[0], t, gradient(system, step).gradient
        seen.append(jax.device_get(made))
    jax.tree.map(np.testing.assert_array_equal, seen[0], seen[2])
    assert np.abs(seen[0][0] - np.float32(seen[1][0])).max() > 0.01
    assert toy.difference(seen[0][2], seen[1][2]) > 0.01
    assert system.sampler._generate._cache_size() == system.trainer._accumulate._cache_size() == 1
    fixed = one_device(dict(first=2))
    (step,) = steps_of(fixed, 1)
    made = step.pictures[0], step.images[0].samples, gradient(fixed, step).gradient
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(made), seen[1])


def test_a_chunk_has_the_window_of_its_own_step_whoever_samples_it_and_when(monkeypatch):
    """Begun ahead of time with older weights, or by the trainer."""
    found, real = {}, TrainingExecutor.deliver

    def deliver(executor, command):
        real(executor, command)
        found[command.chunk] = np.asarray(executor.samples[command.chunk].samples.sigma)

    monkeypatch.setattr(TrainingExecutor, "deliver", deliver)
    config = toy.config(
        **toy.meshes((1, 1), (1, 1), workers=2, samples=True),
        batch__groups=4,
        sampler__chunk=4,
        sampler__window=dict(mode="random", length=1, end=4),
        runtime__max_policy_lag=1,
    )
    config.seed = 3
    system = toy.system(config)
    _, _, log = toy.drive(system, config, 5)
    made = [c for c in log if isinstance(c, Generate)]
    assert any(c.weights_version.version < c.chunk.step for c in made)
    assert any(c.worker == TRAINER for c in made)
    window = Window("random", 1, 0, 4)
    assert {f.step for f in found} >= set(range(5)) and len(
        {window.start(k, 3) for k in range(5)}
    ) > 2
    for chunk, sigma in found.items():
        np.testing.assert_array_equal(sigma, system.sampler.sigmas[[window.start(chunk.step, 3)]])


# ------------------------------------------------------------------------------ shared noise


def test_images_of_a_group_may_start_from_one_noise_whatever_the_chunk():
    system = one_device(dict(first=0), sampler__shared_noise=True)
    plain = system._replace(rng=SampleRng(system.rng.seed, system.rng.window))
    shared, halves, own = (
        [
            jax.device_get((one.samples.x, one.samples.x_next))
            for one in steps_of(parts, 1, size)[0].images
        ]
        for parts, size in ((system, 8), (system, 2), (plain, 8))
    )
    fold, root = jax.random.fold_in, jax.random.key(0)
    noise = [jax.random.normal(fold(fold(fold(root, 10 + g), 0), 0), (4, 4, 4)) for g in range(2)]
    ((x, x_next),), ((others, _),) = shared, own
    np.testing.assert_array_equal(x[0], np.repeat(np.stack(noise), IMAGES, axis=0))
    np.testing.assert_array_equal(np.concatenate([part[0] for part, _ in halves]), x[0])
    split = np.concatenate([part for _, part in halves], axis=1)
    np.testing.assert_allclose(split, x_next, rtol=1e-5, atol=1e-5)
    for i, j in itertools.combinations(range(GROUPS * IMAGES), 2):
        assert np.abs(others[0, i] - others[0, j]).max() > 0.5
        assert np.abs(x_next[-1, i] - x_next[-1, j]).max() > 0.5
    np.testing.assert_array_equal(x[0, ::IMAGES], others[0, ::IMAGES])  # those of the images 0


# ------------------------------------------------------------------------------ random steps


def test_what_is_drawn_does_not_depend_on_the_other_images():
    window = Window(length=7, timestep_fraction=0.5)
    serials, images = np.array([4, 4, 9, 12]), np.array([0, 1, 0, 3])
    drawn = SampleRng(5, window, shared_noise=True).draw(2, serials, images)
    assert drawn.trained.shape == (3, 4) and drawn.start == 0
    for column, serial, image in zip(drawn.trained.T, serials, images, strict=True):
        np.testing.assert_array_equal(
            column, random_timesteps([5, int(serial), int(image)], 7, 0.5)
        )
    part = drawn.subset(slice(1, 3))
    np.testing.assert_array_equal(part.trained, drawn.trained[:, 1:3])
    data = jax.random.key_data
    of_groups = image_keys(jax.random.key(5), serials[1:3], 0 * serials[1:3])
    np.testing.assert_array_equal(data(part.start_keys), data(of_groups))
    own = image_keys(jax.random.key(5), serials[1:3], images[1:3])
    np.testing.assert_array_equal(data(part.keys), data(own))
    plain = SampleRng(5, Window(length=7)).draw(2, serials, images)
    for none in (plain, plain.subset(slice(2))):
        assert none.trained is none.start_keys is None


def test_the_gradient_is_that_of_the_drawn_transitions():
    """Three of four steps, so that with two a pass one is padding."""
    window = dict(first=0, length=chunks.STEPS, timestep_fraction=0.75)
    fields = dict(sampler__window=window, trainer__pack=2)
    config = chunks.config("lora", (2, 2, 1), **fields)
    parts = chunks.system(config)
    whole = chunks.config("lora", (2, 2, 1), images=12, **fields)
    prompts, (images,) = toy.rollout(parts, whole, parts.start)

    chosen = np.stack(
        [random_timesteps((0, 10 + j // 4, j % 4), 4, 0.75) for j in range(12)], axis=1
    )
    assert len({tuple(steps) for steps in chosen.T}) > 2
    every, t = chunks.sampled()[1].samples, jax.device_get(images.samples)
    assert t.x.shape == (3, 12, *chunks.SIZE)
    np.testing.assert_array_equal(t.sigma, every.sigma[chosen])
    np.testing.assert_array_equal(t.sigma_next, every.sigma_next[chosen])
    for a, b in zip(t[:3], every[:3], strict=True):
        own = np.stack([b[chosen[:, j], j] for j in range(12)], axis=1)
        np.testing.assert_allclose(a, own, rtol=1e-5, atol=1e-5)

    state = parts.trainer.init(chunks.tuned("lora"))
    train_batch = receive(parts, prompts, images, chunks.ADVANTAGES)
    totals = parts.trainer.accumulate(state, parts.base, train_batch, None)
    drawn = np.zeros((chunks.STEPS, 12), bool)
    np.put_along_axis(drawn, chosen, True, axis=0)
    expected, ratios = chunks.plain("lora", every.log_prob, drawn=drawn)
    assert float(totals.sums["weight"]) == 36
    np.testing.assert_allclose(totals.sums["ratio"], ratios[drawn].sum(), rtol=1e-5)
    chunks.assert_gradient(totals, expected)


def test_to_choose_steps_no_trajectory_is_gathered():
    window = dict(first=0, length=chunks.STEPS, timestep_fraction=0.5)
    parts = chunks.system(chunks.config("lora", (1, 4, 1), sampler__window=window))
    weights = parts.rollout_weights(parts.start)
    prompts = parts.sampler.encode(weights, said("red") * chunks.GROUPS)
    drawn = parts.rng.draw(0, chunks.ROWS, np.tile(np.arange(4), chunks.GROUPS))
    given, program = [], parts.sampler._generate
    parts.sampler._generate = lambda *args: given.append(args) or program(*args)
    parts.sampler.generate(weights, prompts, chunks.ROWS, *drawn)
    text = program.lower(*given[0]).compile().as_text()
    assert "gather" in text and sent_latents(text) == []
