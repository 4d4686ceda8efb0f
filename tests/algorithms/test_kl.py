import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.losses import gaussian_kl, mask_rows, velocity_mse, weighted_sum
from digen_jax.diffusion.steps import DanceSde, FlowSde
from tests.algorithms.packing import check_junk, check_split, close

RNG = np.random.default_rng(3)
MEAN, REFERENCE = (jnp.asarray(a, jnp.float32) for a in RNG.normal(size=(2, 6, 4, 5)))
STD = jnp.asarray(RNG.uniform(0.1, 2, 6), jnp.float32)


def test_gaussian_kl_equals_the_kl_of_two_gaussians():
    """Monte Carlo of E_p[log p - log q], a sum over elements where ours is their mean."""
    mean, reference, std = np.array([0.3, -0.2]), np.array([0.0, 0.1]), 0.5
    x = mean + std * np.random.default_rng(3).normal(size=(400_000, 2))
    log_ratio = ((x - reference) ** 2 - (x - mean) ** 2) / (2 * std**2)
    ours = gaussian_kl(jnp.asarray(mean)[None], jnp.asarray(reference)[None], jnp.array([std]))
    assert float(ours[0]) * 2 == pytest.approx(log_ratio.sum(1).mean(), rel=0.02)


def test_values_and_gradients_equal_float64_transcription():
    kl, of_kl = jax.vjp(lambda *means: gaussian_kl(*means, STD), MEAN, REFERENCE)
    mse, of_mse = jax.vjp(velocity_mse, MEAN, REFERENCE)
    for i in range(6):
        difference = np.float64(MEAN[i]) - np.float64(REFERENCE[i])
        square, slope = (difference**2).sum() / 20, difference / 10
        assert float(mse[i]) == pytest.approx(square, rel=1e-6)
        assert float(kl[i]) == pytest.approx(square / (2 * float(STD[i]) ** 2), rel=1e-6)
        close(of_mse(jnp.ones(6))[0][i], slope)
        close(of_kl(jnp.ones(6))[0][i], slope / (2 * float(STD[i]) ** 2))
    for pullback in (of_kl, of_mse):
        np.testing.assert_array_equal(pullback(jnp.ones(6))[1], 0)


@pytest.mark.parametrize("step", [FlowSde(0.7), DanceSde(0.3)])
def test_kl_is_the_velocity_mse_times_flow_grpo_s_factor(step):
    """The paper's closed form, against the means and stds of the steps themselves."""
    sigma, sigma_next = jnp.linspace(0.9, 0.2, 6), jnp.linspace(0.75, 0.1, 6)
    x = jnp.asarray(RNG.normal(size=(6, 4, 5)), jnp.float32)
    mean, std = step.mean_std(x, MEAN, sigma, sigma_next, 0.95)
    reference, _ = step.mean_std(x, REFERENCE, sigma, sigma_next, 0.95)
    g = np.float64(step.diffusion(sigma, sigma_next, 0.95))
    s, dt = np.float64(sigma), np.float64(sigma_next) - np.float64(sigma)
    factor = -dt / 2 * (1 / g + g * (1 - s) / (2 * s)) ** 2
    mse = np.float64(velocity_mse(MEAN, REFERENCE))
    np.testing.assert_allclose(gaussian_kl(mean, reference, std), factor * mse, rtol=1e-4)
    without_dt = gaussian_kl(mean, reference, jnp.asarray(g, jnp.float32))
    np.testing.assert_allclose(without_dt, factor * mse * -dt, rtol=1e-4)


def test_kl_of_padding_without_noise_is_finite():
    value, gradient = jax.value_and_grad(
        lambda mean: gaussian_kl(mean, jnp.zeros((1, 2)), jnp.zeros(1)).sum()
    )(jnp.ones((1, 2)))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "form", [gaussian_kl, lambda mean, reference, _: velocity_mse(mean, reference)]
)
def test_packing_and_padding(form):
    def total(weight, mean, reference, std):
        mean, reference = mask_rows(weight > 0, mean, reference)
        return weighted_sum(weight, form(mean, reference, std))

    check_split(total, [MEAN, REFERENCE, STD], 1)
    check_junk(total, [MEAN, REFERENCE, STD], 1)


def test_velocity_mse_is_float32_whatever_comes_in():
    v = jnp.array([[1.0, 2.0]], jnp.bfloat16)
    error = velocity_mse(v, jnp.array([[1.0078125, 2.0]], jnp.bfloat16))
    assert error.dtype == jnp.float32
    np.testing.assert_allclose(error, [0.0078125**2 / 2], rtol=1e-6)
