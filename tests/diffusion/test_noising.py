import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.diffusion.noising import (
    LogitNormalTimes,
    ScheduleTimes,
    forward_noise,
    noised,
    noised_together,
)
from digen_jax.diffusion.sampling import image_keys
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas

SIGMAS = make_sigmas(SchedulerConfig(shift=3.0), 10)
SHAPE = (4, 3)
KINDS = ScheduleTimes(6), LogitNormalTimes(6, mean=0.3, std=1.2, shift=3.0)


def keys_of(images, root=0):
    images = np.asarray(images)
    return image_keys(jax.random.key(root), images // 2, images % 2)


def random_images(n, seed=0):
    rng = np.random.default_rng(seed)
    x0, noise = (jnp.asarray(a, jnp.float32) for a in rng.normal(size=(2, n, *SHAPE)))
    return x0, noise, jnp.asarray(rng.uniform(0, 1, n), jnp.float32)


def test_noised_equals_float64():
    x0, noise, sigma = random_images(5)
    x, target = noised(x0, noise, sigma)
    for i in range(5):
        a, b, s = (np.float64(array[i]) for array in (x0, noise, sigma))
        np.testing.assert_allclose(x[i], (1 - s) * a + s * b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(target[i], b - a, rtol=1e-5, atol=1e-6)


def test_noised_is_float32_whatever_comes_in():
    x0, noise, sigma = random_images(5)
    x, target = noised(x0.astype(jnp.bfloat16), noise, sigma)
    assert x.dtype == target.dtype == jnp.float32
    rounded = np.asarray(x0.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(target, np.float64(noise) - rounded, rtol=1e-5, atol=1e-6)


def test_pairs_share_noise_and_noise_level():
    (a, noise, sigma), (b, *_) = random_images(3), random_images(3, seed=1)
    pairs = noised_together(jnp.stack([a, b], 1), noise, sigma)
    assert pairs.x.shape == pairs.target.shape == (3, 2, *SHAPE)
    for k, x0 in enumerate((a, b)):
        alone = noised(x0, noise, sigma)
        np.testing.assert_allclose(pairs.x[:, k], alone.x, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(pairs.target[:, k], alone.target, rtol=1e-6)


def test_noise_follows_the_documented_folds():
    root, fold = jax.random.key(7), jax.random.fold_in
    keys = image_keys(root, np.array([5, 2]), np.array([3, 0]))
    noise = forward_noise(keys, np.array([4, 0]), SHAPE)
    for i, (serial, image, draw) in enumerate([(5, 3, 4), (2, 0, 0)]):
        key = fold(fold(fold(fold(root, serial), image), 2), draw)
        np.testing.assert_array_equal(noise[i], jax.random.normal(key, SHAPE))


def test_noise_and_times_do_not_depend_on_the_batch():
    images, draws = np.array([0, 1, 2, 3]), np.array([0, 3, 1, 1])
    order = np.array([2, 0])
    together = forward_noise(keys_of(images), draws, SHAPE)
    apart = forward_noise(keys_of(images[order]), draws[order], SHAPE)
    np.testing.assert_array_equal(together[order], apart)
    for times in KINDS:
        whole = times.draw(keys_of(images), SIGMAS)
        part = jax.jit(lambda keys, times=times: times.draw(keys, SIGMAS))(keys_of(images[order]))
        np.testing.assert_allclose(whole[:, order], part, rtol=1e-6)


def test_schedule_times_are_steps_of_the_sampler_without_repetition():
    drawn = np.asarray(ScheduleTimes(10).draw(keys_of(range(50)), SIGMAS))
    for image in drawn.T:
        np.testing.assert_array_equal(np.sort(image), np.sort(SIGMAS[:-1]))
    fewer = np.asarray(ScheduleTimes(4).draw(keys_of(range(50)), SIGMAS))
    np.testing.assert_array_equal(fewer, drawn[:4])


def test_every_step_is_as_likely_in_every_place():
    count, images = 3, 4000
    drawn = np.asarray(ScheduleTimes(count).draw(keys_of(range(images)), SIGMAS))
    for sigma in SIGMAS[:-1]:
        share = (drawn == sigma).mean(1)
        np.testing.assert_allclose(share, 0.1, atol=5 * math.sqrt(0.09 / images))


def test_logit_normal_times_have_its_moments():
    mean, std, shift = 0.3, 1.2, 3.0
    times = LogitNormalTimes(6, mean, std, shift)
    drawn = np.float64(times.draw(keys_of(range(3000)), SIGMAS))
    assert drawn.min() > 0 and drawn.max() < 1
    # the shift is a translation of the logit by log(shift)
    logits = np.log(drawn / (1 - drawn)) - math.log(shift)
    n = logits.size
    assert logits.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(n))
    assert logits.std() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    z = (logits - mean) / std
    assert (np.abs(z) < 1).mean() == pytest.approx(0.6827, abs=0.02)
    assert np.abs(np.corrcoef(z) - np.eye(6)).max() < 0.1


def test_more_times_than_steps_are_refused():
    ScheduleTimes(10).check(10)
    with pytest.raises(ValueError, match=r"^count is 11"):
        ScheduleTimes(11).check(10)
    with pytest.raises(ValueError, match=r"^count is 11"):
        ScheduleTimes(11).draw(keys_of([0]), SIGMAS)
