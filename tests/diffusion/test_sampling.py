import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.diffusion.sampling import (
    check_window,
    flatten,
    image_keys,
    replay,
    sample,
    start_noise,
)
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.diffusion.steps import CappedFlowSde, Cps, DanceSde, Dpm2, FlowSde, Ode

SDES = [FlowSde(0.7), DanceSde(0.3), Cps(0.8), CappedFlowSde(0.7)]
SIGMAS = make_sigmas(SchedulerConfig(shift=3.0), 6)
SHAPE = (4, 4, 2)


def velocity(x, sigma):
    """Not linear, and different at every sigma."""
    sigma = sigma[:, None, None, None]
    return jnp.tanh(x * (1 + sigma)) - 0.3 * jnp.cos(3 * sigma) * jnp.roll(x, 1, axis=1)


def keys_of(images, root=0):
    images = np.asarray(images)
    return image_keys(jax.random.key(root), images // 2, images % 2)


@functools.partial(jax.jit, static_argnames=("step", "length", "store_dtype", "means"))
def run(keys, step, start, length, store_dtype=jnp.float32, sigmas=SIGMAS, means=False):
    x = start_noise(keys, SHAPE)
    return sample(velocity, x, sigmas, step, keys, (start, length), store_dtype, means)


replay_jitted = jax.jit(functools.partial(replay, velocity), static_argnames="step")


def replayed(transitions, step):
    return replay_jitted(transitions, step=step, sigma_max=SIGMAS[1])


@jax.jit
def ode_by_hand(x, sigmas):
    for sigma, sigma_next in itertools.pairwise(sigmas):
        x = x + velocity(x, jnp.full(x.shape[0], sigma)) * (sigma_next - sigma)
    return x


def assert_images_equal(ours, theirs, images, others):
    """Images of one trajectory against those of another, in any batches."""
    np.testing.assert_allclose(ours.latents[images], theirs.latents[others], rtol=0, atol=1e-6)
    for name in ("x", "x_next", "log_prob"):
        mine, other = getattr(ours.transitions, name), getattr(theirs.transitions, name)
        np.testing.assert_allclose(mine[:, images], other[:, others], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("step", "length"), [(FlowSde(0.7), 3), (Dpm2(), 0)])
def test_an_image_is_the_same_in_any_batch(step, length):
    together = run(keys_of([0, 1, 2, 3]), step, 1, length)
    alone = run(keys_of([3, 0, 7]), step, 1, length)
    assert_images_equal(together, alone, np.array([3, 0]), np.array([0, 1]))


def test_randomness_follows_the_documented_folds():
    root, (serial, image) = jax.random.key(7), (5, 3)
    keys = image_keys(root, np.array([serial, 1, 2]), np.array([image, 0, 1]))
    fold = jax.random.fold_in
    key = fold(fold(root, serial), image)
    start = jax.random.normal(fold(key, 0), SHAPE)
    np.testing.assert_array_equal(start_noise(keys, SHAPE)[0], start)
    transitions = run(keys, FlowSde(0.7), 2, 3).transitions
    for slot, i in enumerate([2, 3, 4]):
        one = jax.tree.map(lambda a, slot=slot: a[slot], transitions)
        result = replayed(one, FlowSde(0.7))
        noise = (one.x_next - result.mean)[0] / result.std[0]
        expected = jax.random.normal(fold(fold(key, 1), i), SHAPE)
        np.testing.assert_allclose(noise, expected, rtol=0, atol=2e-5)


def test_window_stores_the_trained_transitions_only():
    trajectory = run(keys_of([0, 1, 2]), FlowSde(0.7), 2, 3)
    stored = trajectory.transitions
    assert stored.x.shape == stored.x_next.shape == (3, 3, *SHAPE)
    np.testing.assert_array_equal(stored.sigma, SIGMAS[2:5])
    np.testing.assert_array_equal(stored.sigma_next, SIGMAS[3:6])
    np.testing.assert_array_equal(trajectory.sigmas, SIGMAS)
    np.testing.assert_array_equal(stored.x[1:], stored.x_next[:-1])
    start = start_noise(keys_of([0, 1, 2]), SHAPE)
    before = ode_by_hand(start, SIGMAS[:3])
    np.testing.assert_allclose(stored.x[0], before, rtol=0, atol=1e-6)
    after = ode_by_hand(stored.x_next[-1], SIGMAS[5:])
    np.testing.assert_allclose(trajectory.latents, after, rtol=0, atol=1e-6)
    for s in range(3):
        ode = ode_by_hand(stored.x[s], SIGMAS[2 + s : 4 + s])
        assert np.std(stored.x_next[s] - ode) > 0.1


def test_window_may_be_traced_and_touch_both_ends():
    for start in (0, 3):
        trajectory = run(keys_of([0, 1, 2]), FlowSde(0.7), start, 3)
        np.testing.assert_array_equal(trajectory.transitions.sigma, SIGMAS[start : start + 3])
    np.testing.assert_array_equal(trajectory.transitions.x_next[-1], trajectory.latents)


def test_without_a_window_it_is_the_ode():
    trajectory = run(keys_of([0, 1]), Ode(), 0, 0)
    expected = ode_by_hand(start_noise(keys_of([0, 1]), SHAPE), SIGMAS)
    np.testing.assert_allclose(trajectory.latents, expected, rtol=0, atol=1e-6)
    assert trajectory.transitions.x.shape == (0, 2, *SHAPE)


@pytest.mark.parametrize(
    ("step", "store_dtype"), [*((step, jnp.float32) for step in SDES), (SDES[2], jnp.bfloat16)]
)
def test_replay_gives_the_sampled_log_prob(step, store_dtype):
    """In another program and batch shape; and a sigma that differs by 1e-3 is detected."""
    trajectory = run(keys_of([0, 1, 2]), step, 0, 3, store_dtype)
    assert trajectory.transitions.x.dtype == trajectory.latents.dtype == store_dtype
    flat = jax.tree.map(lambda a: a[np.array([8, 0, 7, 4, 2])], flatten(trajectory.transitions))
    result = replayed(flat, step)
    np.testing.assert_allclose(result.log_prob, flat.log_prob, rtol=0, atol=1e-6)
    for shifted in ("sigma", "sigma_next"):
        other = flat._replace(**{shifted: getattr(flat, shifted) - 1e-3})
        log_prob = replayed(other, step).log_prob
        assert np.abs(log_prob - flat.log_prob).max() > 1e-5


@pytest.mark.parametrize(("step", "store_dtype"), [(SDES[0], jnp.float32), (SDES[2], jnp.bfloat16)])
def test_means_are_stored_as_sampled_where_asked_for(step, store_dtype):
    keys = keys_of([0, 1, 2])
    plain = run(keys, step, 1, 3, store_dtype)
    stored = run(keys, step, 1, 3, store_dtype, means=True)
    assert plain.transitions.mean is None and flatten(plain.transitions).mean is None
    without = stored._replace(transitions=stored.transitions._replace(mean=None))
    for mine, other in zip(jax.tree.leaves(without), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(mine, other)
    mean = stored.transitions.mean
    assert mean.dtype == jnp.float32 and mean.shape == (3, 3, *SHAPE)
    flat = flatten(stored.transitions)
    np.testing.assert_array_equal(flat.mean.reshape(mean.shape), mean)
    np.testing.assert_allclose(replayed(flat, step).mean, flat.mean, rtol=0, atol=2e-6)
    one = jax.tree.map(lambda a: a[1], stored.transitions)
    np.testing.assert_array_equal(one.mean, mean[1])
    np.testing.assert_allclose(replayed(one, step).mean, one.mean, rtol=0, atol=2e-6)


def gaussian_velocity(variance, x, sigma):
    """E[eps - x0 | x] for data N(0, variance)."""
    sigma = sigma[:, None]
    return (sigma - (1 - sigma) * variance) / ((1 - sigma) ** 2 * variance + sigma**2) * x


@pytest.mark.parametrize("step", [FlowSde(0.7), DanceSde(0.3), Cps(0.08)])
def test_reverse_steps_keep_the_marginals(step):
    """Data N(0, 0.3^2) with its exact velocity: the variance follows the forward process.

    Cps keeps it where its noise is little: it redraws predicted noise, which varies less than the
    noise itself, and loses (1 - cos(a pi/2))^2 of it in every step.
    """
    variance = 0.3**2
    keys = keys_of(range(4))
    sigmas = make_sigmas(SchedulerConfig(shift=3.0), 250)
    window = (0, 0 if isinstance(step, Ode) else 249)
    run_gaussian = jax.jit(
        lambda x: sample(
            functools.partial(gaussian_velocity, variance), x, sigmas, step, keys, window
        )
    )
    trajectory = run_gaussian(start_noise(keys, (10_000,)))
    assert np.mean(trajectory.latents**2) == pytest.approx(variance, rel=0.05)
    assert np.mean(trajectory.latents) == pytest.approx(0, abs=0.01)
    for i in range(60, window[1], 60):
        sigma = sigmas[i]
        expected = (1 - sigma) ** 2 * variance + sigma**2
        assert np.mean(trajectory.transitions.x[i] ** 2) == pytest.approx(expected, rel=0.05)


def test_log_prob_is_of_the_rounded_x_next():
    """bfloat16 rounding moves the density by far more than the tolerance of the replay."""
    step, keys = FlowSde(0.1), keys_of([0, 1])
    transitions = run(keys, step, 1, 1, jnp.bfloat16).transitions
    one = jax.tree.map(lambda a: a[0], transitions)
    result = replayed(one, step)
    noise = jax.vmap(
        lambda k: jax.random.normal(jax.random.fold_in(jax.random.fold_in(k, 1), 1), SHAPE)
    )
    unrounded = result.mean + result.std[:, None, None, None] * noise(keys)
    np.testing.assert_array_equal(one.x_next, unrounded.astype(jnp.bfloat16))
    of_unrounded = step.log_prob(unrounded, result.mean, result.std)
    assert np.abs(of_unrounded - one.log_prob).min() > 1e-4
    np.testing.assert_allclose(result.log_prob, one.log_prob, rtol=0, atol=1e-6)


def test_the_compiler_may_not_undo_the_rounding():
    """XLA may keep the excess precision of a cast down and up; CPU does not, accelerators do."""
    lowered = run.lower(keys_of([0, 1]), FlowSde(0.1), 1, 1, jnp.bfloat16)
    assert "reduce_precision" in lowered.as_text() and "e8m7" in lowered.as_text()


@pytest.mark.parametrize(
    ("step", "window", "message"),
    [
        (FlowSde(0.7), (0, 0), "train at least 1 step"),
        (FlowSde(0.7), (-1, 2), "outside the schedule's 6 steps"),
        (FlowSde(0.7), (4, 3), "outside the schedule's 6 steps"),
        (Ode(), (0, 2), "ode steps"),
        (Cps(0.8), (4, 2), "step 5 of the window"),
    ],
)
def test_windows_that_cannot_be_trained(step, window, message):
    with pytest.raises(ValueError, match=message):
        check_window(step, SIGMAS, *window)


def test_refused():
    keys = keys_of([0, 1])
    with pytest.raises(ValueError, match="outside the schedule's 6 steps"):
        sample(velocity, start_noise(keys, SHAPE), SIGMAS, FlowSde(0.7), keys, (4, 3))
    with pytest.raises(ValueError, match="flatten"):
        replay(velocity, run(keys, FlowSde(0.7), 0, 2).transitions, FlowSde(0.7), 0.9)
    with pytest.raises(ValueError, match="threefry"):
        image_keys(jax.random.key(0, impl="rbg"), np.array([0]), np.array([0]))
    for solver in (Ode(), Dpm2()):
        with pytest.raises(ValueError, match="log_prob"):
            run(keys, solver, 0, 2)
