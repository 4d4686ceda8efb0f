import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.losses import (
    check_smallest_sigma,
    clipped,
    guard_log_ratio,
    mask_rows,
    sequence_log_ratio,
    weighted_sum,
    well_conditioned,
)
from digen_jax.algorithms.policy_gradient import PolicyGradient, Samples, policy_gradient_loss
from digen_jax.diffusion.steps import DanceSde, FlowSde
from tests.algorithms.packing import check_junk, check_split


def guard_total(clip, adv_clip):
    """The whole loss of GRPO-Guard, summed."""
    settings = PolicyGradient(ratio="guard", clip_range=clip, adv_clip=adv_clip)

    def total(weight, log_prob, mean, old, old_mean, advantages, std, dt):
        sigma = jnp.full_like(dt, 0.5)
        samples = Samples(log_prob, old, old, advantages, weight, sigma, dt, mean, old_mean, std)
        return policy_gradient_loss(settings, samples)[0]

    return total


def mixed_steps(n=12):
    """Samples of many timesteps, each with a std and dt of its own."""
    rng = np.random.default_rng(1)
    log_prob, old, advantages = rng.normal(size=(3, n)) * np.array([[0.3], [0.3], [1.5]])
    mean, old_mean = rng.normal(size=(2, n, 3, 2)) * 0.1
    std, dt = rng.uniform(0.1, 0.9, n), -rng.uniform(0.02, 0.3, n)
    arrays = log_prob, mean, old, old_mean, advantages, std, dt
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def paper_guard(log_prob, mean, old, old_mean, advantage, std, dt, clip=0.05, adv_clip=1.4):
    """One sample of GRPO-Guard in float64: equations 8 and 12."""
    bias = ((mean - old_mean) ** 2).mean() / (2 * std**2)
    ratio = np.exp((log_prob - old + bias) * std)
    advantage = min(max(advantage, -adv_clip), adv_clip)
    return -min(advantage * ratio, advantage * min(max(ratio, 1 - clip), 1 + clip)) / -dt


def test_guard_equals_float64_transcription_with_timesteps_mixed():
    arrays = mixed_steps()
    value_and_grad = jax.jit(jax.value_and_grad(guard_total(0.05, 1.4), argnums=(1, 2)))
    loss, (of_log_prob, of_mean) = value_and_grad(jnp.ones(12), *arrays)
    exact = [np.float64(a) for a in arrays]
    rows = [[a[i] for a in exact] for i in range(12)]
    assert float(loss) == pytest.approx(sum(paper_guard(*row) for row in rows), rel=1e-5)
    h, bump = 1e-6, np.zeros((3, 2))
    bump[1, 1] = h

    def slope(row, of_log_prob, of_mean):
        up, down = (
            paper_guard(row[0] + sign * of_log_prob, row[1] + sign * of_mean, *row[2:])
            for sign in (1, -1)
        )
        return (up - down) / (2 * h)

    slopes = np.array([slope(row, h, 0.0) for row in rows])
    assert (slopes == 0).any() and (slopes != 0).any()
    np.testing.assert_allclose(of_log_prob, slopes, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        of_mean[:, 1, 1], [slope(row, 0.0, bump) for row in rows], rtol=1e-3, atol=1e-5
    )


def test_guard_packing_and_padding():
    check_split(guard_total(0.05, 1.4), mixed_steps(), 2)
    check_junk(guard_total(0.05, 1.4), mixed_steps(), 2)


@pytest.mark.parametrize("step", [FlowSde(0.7), DanceSde(0.3)])
def test_guard_leaves_the_noise_times_the_change_of_the_mean(step):
    """The claim of equation 8, at every step: no bias, no factor of the step's std."""
    rng = np.random.default_rng(2)
    sigma, sigma_next = jnp.linspace(0.95, 0.3, 5), jnp.linspace(0.8, 0.1, 5)
    x, v, noise, change = (jnp.asarray(a, jnp.float32) for a in rng.normal(size=(4, 5, 4, 3)))
    old_mean, std = step.mean_std(x, v, sigma, sigma_next, 0.97)
    mean = old_mean + 0.1 * change
    x_next = old_mean + std[:, None, None] * noise
    log_ratio = guard_log_ratio(
        step.log_prob(x_next, mean, std),
        step.log_prob(x_next, old_mean, std),
        mean,
        old_mean,
        std,
    )
    expected = (np.float64(noise) * np.float64(mean - old_mean)).mean((1, 2))
    np.testing.assert_allclose(log_ratio, expected, atol=1e-5)


IDS = jnp.array([2, 0, 2, 1, 0, 2, 0, 2, 4])  # trajectories of 3, 1, 4, 0 and 1 steps


def steps_of_trajectories():
    rng = np.random.default_rng(4)
    log_prob = rng.normal(size=9)
    old, advantages = log_prob - 0.15 * rng.normal(size=9), rng.normal(size=5)[IDS]
    return [jnp.asarray(a, jnp.float32) for a in (log_prob, old, advantages)]


def brute_force(log_prob, old, ids, reduce):
    """The log-ratio of each step's trajectory, with plain loops."""
    result = []
    for mine in ids:
        own = [a - b for a, b, other in zip(log_prob, old, ids, strict=True) if other == mine]
        result.append(sum(own) / (len(own) if reduce == "mean" else 1))
    return np.array(result)


def sequence_total(reduce):
    def total(weight, log_prob, old, advantages, ids):
        log_prob, old = mask_rows(weight > 0, log_prob, old)
        log_ratio = sequence_log_ratio(log_prob - old, weight, ids, 5, reduce)
        return weighted_sum(weight, clipped(log_ratio, advantages, 0.1, 0.1))

    return total


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sequence_ratio_equals_brute_force(reduce):
    log_prob, old, advantages = steps_of_trajectories()
    ours = sequence_log_ratio(log_prob - old, jnp.ones(9), IDS, 5, reduce)
    exact, exact_old, weights = (np.float64(a) for a in (log_prob, old, advantages))
    np.testing.assert_allclose(ours, brute_force(exact, exact_old, IDS, reduce), atol=1e-6)

    def loss(log_prob):
        ratio = np.exp(brute_force(log_prob, exact_old, IDS, reduce))
        bounded = np.clip(ratio, 0.9, 1.1)
        return -np.minimum(weights * ratio, weights * bounded).sum()

    gradient = jax.jit(jax.grad(sequence_total(reduce), argnums=1))
    gradient = gradient(jnp.ones(9), log_prob, old, advantages, IDS)
    slopes = [(loss(exact + 1e-6 * row) - loss(exact - 1e-6 * row)) / 2e-6 for row in np.eye(9)]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-5)
    assert np.abs(slopes).max() > 0


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sequence_ratio_depends_on_neither_order_nor_padding(reduce):
    arrays = [*steps_of_trajectories(), IDS]
    check_junk(sequence_total(reduce), arrays, 1)
    order = np.random.default_rng(5).permutation(9)
    gradient = jax.jit(jax.grad(sequence_total(reduce), argnums=1))
    shuffled = gradient(jnp.ones(9), *(a[order] for a in arrays))
    np.testing.assert_allclose(shuffled, gradient(jnp.ones(9), *arrays)[order], rtol=1e-5)


def test_late_steps_are_left_out_of_the_ratio_and_of_every_sum():
    log_prob, old, advantages = steps_of_trajectories()
    sigma = jnp.array([0.9, 0.5, 0.3, 0.05, 0.2, 0.1, 0.1, 0.8, 0.7])
    weight = well_conditioned(sigma, 0.2)
    np.testing.assert_array_equal(weight, [1, 1, 1, 0, 1, 0, 0, 1, 1])
    kept = np.flatnonzero(weight)
    log_prob = log_prob.at[6].set(jnp.nan)  # the last steps may contain anything
    value_and_grad = jax.jit(jax.value_and_grad(sequence_total("mean"), argnums=1))
    value, gradient = value_and_grad(weight, log_prob, old, advantages, IDS)
    short, of_short = value_and_grad(
        jnp.ones(6), log_prob[kept], old[kept], advantages[kept], IDS[kept]
    )
    assert float(value) == pytest.approx(float(short), rel=1e-6)
    np.testing.assert_allclose(gradient[kept], of_short, rtol=1e-6)
    np.testing.assert_array_equal(gradient[jnp.array([3, 5, 6])], 0)


@pytest.mark.parametrize("step", [FlowSde(0.7), DanceSde(0.3)])
def test_the_mean_answers_ever_more_to_the_velocity_as_sigma_falls(step):
    """In units of the step's std: why it is the last steps that are left out, at steps of one length."""
    sigma = jnp.linspace(0.9, 0.1, 9)
    zero, one = jnp.zeros((9, 1)), jnp.ones((9, 1))
    mean, std = step.mean_std(zero, one, sigma, sigma - 0.05, 0.95)
    assert (np.diff(jnp.abs(mean[:, 0]) / std) > 0).all()


@pytest.mark.parametrize("bound", [-0.1, 1.0, np.nan])
def test_refused_smallest_sigma(bound):
    with pytest.raises(ValueError, match="smallest_sigma is"):
        check_smallest_sigma(bound)
    check_smallest_sigma(0.0)
