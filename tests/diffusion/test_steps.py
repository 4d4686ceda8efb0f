import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.diffusion.steps import (
    CappedFlowSde,
    Cps,
    DanceSde,
    FlowSde,
    LinearSde,
    Ode,
    make_step,
)

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "flow_rl.npz")
IN_GOLDEN = [FlowSde(0.7), DanceSde(0.3), Cps(0.8)]
SDES = [*IN_GOLDEN, CappedFlowSde(0.7), LinearSde(1.0)]
NAMES = {FlowSde: "flow", DanceSde: "dance", Cps: "cps", CappedFlowSde: "flow_capped"}
NAMES |= {LinearSde: "linear"}


def golden_inputs():
    sigmas, steps = GOLDEN["sigmas"], GOLDEN["steps"]
    arrays = GOLDEN["x"], GOLDEN["v"], sigmas[steps], sigmas[steps + 1], sigmas[1]
    return [jnp.asarray(array) for array in arrays]


def assert_close(ours, reference, tolerance=1e-5):
    reference = np.asarray(reference, np.float64)
    difference = np.abs(np.asarray(ours, np.float64) - reference).max()
    assert difference <= tolerance * np.abs(reference).max()


def transcription(kind, a, x, v, s, s_next, s_max):
    """Mean and std in float64, as the papers write them: one sample, scalar sigmas."""
    dt = s_next - s
    if kind == "cps":
        std = s_next * math.sin(a * math.pi / 2)
        x0, x1 = x - s * v, x + (1 - s) * v
        return (1 - s_next) * x0 + math.sqrt(s_next**2 - std**2) * x1, std
    sigma_t = a if kind == "dance" else a * math.sqrt(s / (1 - (s_max if s == 1 else s)))
    if kind == "linear":
        sigma_t = a * s_max * s
    if kind == "flow_capped":
        sigma_t = min(sigma_t, 0.45 / math.sqrt(-dt))
    mean = x + (v + sigma_t**2 / (2 * s) * (x + (1 - s) * v)) * dt
    return mean, sigma_t * math.sqrt(-dt)


def log_density(kind, x_next, mean, std):
    if kind == "cps":
        return np.mean(-((x_next - mean) ** 2))
    return np.mean(
        -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
    )


@pytest.mark.parametrize("step", IN_GOLDEN)
def test_golden(step):
    name = NAMES[type(step)]
    assert step.noise_level == pytest.approx(float(GOLDEN[f"{name}_noise_level"]))
    mean, std = step.mean_std(*golden_inputs())
    assert_close(mean, GOLDEN[f"{name}_mean"])
    assert_close(std, GOLDEN[f"{name}_std"])
    log_prob = step.log_prob(jnp.asarray(GOLDEN["x_next"]), mean, std)
    assert_close(log_prob, GOLDEN[f"{name}_log_prob"])


@pytest.mark.parametrize("step", SDES)
def test_equals_float64_transcription(step):
    rng = np.random.default_rng(0)
    x, v, x_next = rng.normal(size=(3, 6, 4, 3, 2))
    sigma = np.float32([1.0, 0.9, 0.5, 0.2, 0.05, 0.01])
    sigma_next = np.float32([0.9, 0.5, 0.2, 0.05, 0.01, 0.0])
    kind, sigma_max = NAMES[type(step)], 0.9
    mean, std = step.mean_std(
        jnp.asarray(x, jnp.float32), jnp.asarray(v, jnp.float32), sigma, sigma_next, sigma_max
    )
    log_prob = step.log_prob(jnp.asarray(x_next, jnp.float32), mean, std)
    for i in range(6):
        s, s_next = float(sigma[i]), float(sigma_next[i])
        expected = transcription(kind, step.noise_level, x[i], v[i], s, s_next, sigma_max)
        assert_close(mean[i], expected[0], 2e-6)
        assert float(std[i]) == pytest.approx(expected[1], rel=2e-6)
        expected_log_prob = log_density(kind, x_next[i], *expected)
        assert float(log_prob[i]) == pytest.approx(expected_log_prob, rel=2e-5)


@pytest.mark.parametrize("step", SDES)
def test_little_noise_is_the_ode(step):
    x, v, *sigmas = golden_inputs()
    ode, zero = Ode().mean_std(x, v, *sigmas)
    mean, std = type(step)(1e-4).mean_std(x, v, *sigmas)
    assert_close(mean, ode, 1e-6)
    assert (zero == 0).all() and (std <= 2e-4).all()


@pytest.mark.parametrize("step", [Ode(), *SDES])
def test_all_arithmetic_is_float32(step):
    x, v, *sigmas = golden_inputs()
    half = x.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    mean, std = step.mean_std(*half, *sigmas)
    same, _ = step.mean_std(*(a.astype(jnp.float32) for a in half), *sigmas)
    assert mean.dtype == std.dtype == jnp.float32
    np.testing.assert_array_equal(mean, same)


@pytest.mark.parametrize("step", SDES)
def test_degenerate_points_are_finite(step):
    sigma, sigma_next = jnp.array([(0.1, 0.0), (0.0, 0.0), (1.0, 0.9), (0.5, 0.5)]).T

    def log_prob(x, v, sigma, sigma_next):
        mean, std = step.mean_std(x, v, sigma, sigma_next, 0.9)
        return step.log_prob(jnp.ones((2, 3)), mean, std).sum()

    arguments = jnp.ones((4, 2, 3)), jnp.full((4, 2, 3), 0.3), sigma, sigma_next
    found = jax.jit(jax.vmap(jax.value_and_grad(log_prob, argnums=(0, 1, 2, 3))))(*arguments)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("step", SDES)
def test_gradient_to_the_velocity(step):
    """Closed form: d log_prob / d v is affine in v, so the slope of the mean gives it."""
    rng = np.random.default_rng(1)
    x, v, x_next = rng.normal(size=(3, 2, 5))
    sigmas = 0.6, 0.45, 0.9

    def log_prob(v):
        mean, std = step.mean_std(jnp.asarray(x, jnp.float32), v, *sigmas)
        return step.log_prob(jnp.asarray(x_next, jnp.float32), mean, std).sum()

    gradient = jax.grad(log_prob)(jnp.asarray(v, jnp.float32))
    kind, a, h = NAMES[type(step)], step.noise_level, 1e-5
    for i, j in np.ndindex(v.shape):
        shifted = [v.copy(), v.copy()]
        shifted[0][i, j] += h
        shifted[1][i, j] -= h
        high, low = (
            log_density(kind, x_next[i], *transcription(kind, a, x[i], w[i], *sigmas))
            for w in shifted
        )
        assert float(gradient[i, j]) == pytest.approx((high - low) / (2 * h), rel=1e-4, abs=1e-5)


def test_diffusion_is_the_std_without_its_time_step():
    for step in (FlowSde(0.7), DanceSde(0.3)):
        _, std = step.mean_std(jnp.ones((2, 1)), jnp.ones((2, 1)), 0.8, 0.55, 0.9)
        assert float(step.diffusion(0.8, 0.55, 0.9)) == pytest.approx(float(std) / 0.5)
    assert float(FlowSde(0.7).diffusion(0.8, 0.55, 0.9)) == pytest.approx(0.7 * 2)
    assert float(Cps(1.0).diffusion(0.8, 0.55, 0.9)) == pytest.approx(0.55)


def test_the_cap_bounds_the_std_and_changes_nothing_below():
    """Scalar and per-sample sigmas; g sqrt(-dt) of these steps is 0.7, 0.44 and 1.32."""
    capped, flow = CappedFlowSde(0.7), FlowSde(0.7)
    x = jnp.ones((3, 2))
    sigma, sigma_next = jnp.array([1.0, 0.8, 0.9]), jnp.array([0.9, 0.7, 0.5])
    mean, std = capped.mean_std(x, 2 * x, sigma, sigma_next, 0.9)
    free_mean, free_std = flow.mean_std(x, 2 * x, sigma, sigma_next, 0.9)
    np.testing.assert_allclose(free_std, [0.7, 0.7 * 2 * 0.1**0.5, 2.1 * 0.4**0.5], rtol=1e-6)
    np.testing.assert_allclose(std, [0.45, free_std[1], 0.45], rtol=1e-6)
    np.testing.assert_array_equal(mean[1], free_mean[1])
    assert (np.abs(mean - free_mean)[np.array([0, 2])] > 0.01).all()
    for i in range(3):
        _, one = capped.mean_std(x, x, float(sigma[i]), float(sigma_next[i]), 0.9)
        assert one == std[i]


@pytest.mark.parametrize(
    ("kind", "noise_level", "message"),
    [
        ("ode", 0.7, "noise_level of ode"),
        ("dpm2", 0.7, "noise_level of dpm2"),
        ("flow_capped", 0.0, "noise_level of CappedFlowSde"),
        ("linear", 0.0, "noise_level of LinearSde"),
        ("flow", 0.0, "noise_level of FlowSde"),
        ("dance", -0.3, "noise_level of DanceSde"),
        ("flow", math.nan, "noise_level of FlowSde"),
        ("cps", 1.5, "at most 1"),
    ],
)
def test_refused(kind, noise_level, message):
    with pytest.raises(ValueError, match=message):
        make_step(kind, noise_level)
