"""Parts of the losses against float64 transcriptions of the papers; rows without weight have no effect."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.algorithm import Samples
from digen_jax.algorithms.losses import (
    cispo,
    clipped,
    decoupled_log_ratios,
    divergence_masked,
    dual_clipped,
    gaussian_kl,
    importance_weight,
    mask_rows,
    sequence_log_ratio,
    topr,
    velocity_mse,
    weighted_sum,
    well_conditioned,
    within_bound,
)
from digen_jax.algorithms.policy_gradient import PolicyGradient

JUNK = np.array([np.nan, np.inf, -np.inf, 1e4, -1e4], np.float32)


def check_packing(total, arrays, differentiated, parts=True):
    """Rows of weight 0 change nothing, whatever they hold, and get no gradient.

    With `parts` the sums over two parts add up to the whole's, and every row's gradient is the same.
    """
    rows = len(arrays[0])
    program = jax.jit(jax.value_and_grad(total, argnums=tuple(range(1, 1 + differentiated))))
    plain, expected = program(jnp.ones(rows), *arrays)

    def junked(part):
        """Of some rows and as many without weight as make one size, for which there is one program."""
        junk = rows + len(JUNK) - len(part)
        weight = jnp.concatenate([jnp.ones(len(part)), jnp.zeros(junk)])
        return program(weight, *(jnp.concatenate([a[part], junk_like(a, junk)]) for a in arrays))

    cuts = [np.arange(rows), *(np.split(np.arange(rows), [rows // 3]) if parts else ())]
    found = [junked(part) for part in cuts]
    sums = [value for value, _ in found]
    np.testing.assert_allclose(sums[0], plain, rtol=1e-5)
    np.testing.assert_allclose(sum(sums[1:]) if parts else plain, plain, rtol=1e-5)
    for part, (_, gradients) in zip(cuts, found, strict=True):
        for gradient, whole in zip(gradients, expected, strict=True):
            assert np.abs(whole).max() > 0
            np.testing.assert_allclose(gradient[: len(part)], whole[part], rtol=1e-6)
            np.testing.assert_array_equal(gradient[len(part) :], 0)


def junk_like(array, rows):
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.zeros(rows, array.dtype)
    column = np.resize(JUNK, (rows, *[1] * (array.ndim - 1)))
    return jnp.broadcast_to(jnp.asarray(column), (rows, *array.shape[1:]))


def close(ours, reference):
    """Within 1e-5 of the reference's largest element."""
    reference = np.asarray(reference)
    assert np.abs(np.asarray(ours) - reference).max() <= 1e-5 * np.abs(reference).max()


LOW, HIGH, DUAL, THRESHOLD = 0.2, 0.35, 3.0, 0.5
CAP, EPSILON = 1.5, 0.2

# ------------------------------------------------------------------------------ surrogates


def ppo(ratio, advantage):
    return min(advantage * ratio, advantage * min(max(ratio, 1 - LOW), 1 + HIGH))


def paper_dual(ratio, advantage):
    value = ppo(ratio, advantage)
    return max(value, DUAL * advantage) if advantage < 0 else value


def paper_topr(log_prob, frozen, old, advantage, good=1.0, bad=1.0):
    weight = good if advantage > 0 else bad * min(math.exp(frozen - old), 1.0)
    return -weight * advantage * log_prob


def paper_cispo(log_prob, frozen, old, advantage, kl):
    weight = min(max(math.exp(frozen - old), 1 - LOW), 1 + HIGH)
    return -weight * advantage * log_prob


def paper_dppo(log_prob, frozen, old, advantage, kl):
    ratio = math.exp(log_prob - old)
    if kl >= THRESHOLD and ((advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)):
        return 0.0
    return -advantage * ratio


# name: ours of (log_prob, log_ratio, advantages, kl); a sample's loss as the paper writes it, where
# `frozen` stands for log_prob under a stop-gradient
CASES = {
    "clipped": (
        lambda lp, lr, a, kl: clipped(lr, a, LOW, HIGH),
        lambda lp, frozen, old, a, kl: -ppo(math.exp(lp - old), a),
    ),
    "dual_clipped": (
        lambda lp, lr, a, kl: dual_clipped(lr, a, LOW, HIGH, DUAL),
        lambda lp, frozen, old, a, kl: -paper_dual(math.exp(lp - old), a),
    ),
    "cispo": (lambda lp, lr, a, kl: cispo(lp, lr, a, LOW, HIGH), paper_cispo),
    "topr": (
        lambda lp, lr, a, kl: topr(lp, lr, a),
        lambda lp, frozen, old, a, kl: paper_topr(lp, frozen, old, a),
    ),
    "weighted_topr": (
        lambda lp, lr, a, kl: topr(lp, lr, a, 0.7, 1.6),
        lambda lp, frozen, old, a, kl: paper_topr(lp, frozen, old, a, 0.7, 1.6),
    ),
    "divergence_masked": (
        lambda lp, lr, a, kl: divergence_masked(lr, a, kl, THRESHOLD),
        paper_dppo,
    ),
}


def ratio_inputs(n=60):
    rng = np.random.default_rng(0)
    log_prob = rng.normal(size=n)
    old = log_prob - rng.normal(size=n) * 0.8
    advantages, kl = 1.5 * rng.normal(size=n), rng.uniform(0, 1, n)
    advantages[:2] = 0
    return [jnp.asarray(a, jnp.float32) for a in (log_prob, old, advantages, kl)]


def total_of(ours):
    def total(weight, log_prob, old, advantages, kl):
        log_prob, old = mask_rows(weight > 0, log_prob, old)
        return weighted_sum(weight, ours(log_prob, log_prob - old, advantages, kl))

    return total


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_float64_transcription(name):
    ours, paper = CASES[name]
    log_prob, old, advantages, kl = ratio_inputs()
    rest = [np.float64(a) for a in (log_prob, old, advantages, kl)]  # frozen first
    term = np.vectorize(paper, otypes=[float])
    close(ours(log_prob, log_prob - old, advantages, kl), term(np.float64(log_prob), *rest))
    h = 1e-6
    slope = term(rest[0] + h, *rest) / (2 * h) - term(rest[0] - h, *rest) / (2 * h)
    gradient = jax.grad(total_of(ours), argnums=1)(jnp.ones(60), log_prob, old, advantages, kl)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-7)
    assert name in ("cispo", "topr", "weighted_topr") or (slope[2:] == 0).any()


@pytest.mark.parametrize("name", CASES)
def test_only_log_prob_has_a_gradient(name):
    log_prob, old, advantages, kl = ratio_inputs()
    gradient = jax.grad(total_of(CASES[name][0]), argnums=4)(
        jnp.ones(60), log_prob, old, advantages, kl
    )
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    ("name", "advantage", "log_ratio", "value"),
    [
        ("clipped", 2.0, 200.0, -2 * (1 + HIGH)),
        ("clipped", -2.0, -200.0, 2 * (1 - LOW)),
        ("dual_clipped", -2.0, 200.0, 2 * DUAL),
        ("divergence_masked", 2.0, 200.0, 0.0),
    ],
)
def test_a_sample_beyond_its_bound_has_no_gradient_even_where_exp_overflows(
    name, advantage, log_ratio, value
):
    def loss(log_ratio):
        ours = CASES[name][0]
        return ours(log_ratio, log_ratio, jnp.array([advantage]), jnp.array([1.0]))[0]

    ours, gradient = jax.value_and_grad(loss)(jnp.array([log_ratio]))
    assert (float(ours), float(gradient[0])) == (pytest.approx(value), 0.0)


def test_low_1_is_no_lower_bound():
    tiny = jnp.array([-30.0])
    assert float(cispo(jnp.ones(1), tiny, jnp.ones(1), 1.0, HIGH)[0]) == pytest.approx(
        -math.exp(-30)
    )
    assert float(clipped(tiny, -jnp.ones(1), 1.0, HIGH)[0]) == pytest.approx(math.exp(-30))


# ------------------------------------------------------------------------------ corrections


def policy_inputs(n=50):
    rng = np.random.default_rng(0)
    log_prob = rng.normal(size=n)
    proximal = log_prob - 0.3 * rng.normal(size=n)
    behavior = proximal - 0.5 * rng.normal(size=n)
    arrays = log_prob, proximal, behavior, rng.normal(size=n)
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def decoupled_total(cap):
    def total(weight, log_prob, proximal, behavior, advantages):
        policies = mask_rows(weight > 0, log_prob, proximal, behavior)
        log_ratio, stale = decoupled_log_ratios(*policies)
        loss = importance_weight(stale, cap) * clipped(log_ratio, advantages, EPSILON, EPSILON)
        return weighted_sum(weight, loss)

    return total


def test_importance_weight_is_capped_and_does_not_overflow():
    log_ratio = jnp.array([-200.0, -1.0, 0.0, 0.3, 1.0, 200.0])
    expected = [0, math.exp(-1), 1, math.exp(0.3), CAP, CAP]
    np.testing.assert_allclose(importance_weight(log_ratio, CAP), expected, rtol=1e-6)
    assert float(importance_weight(jnp.array([1.0]))[0]) == pytest.approx(math.e)
    np.testing.assert_array_equal(jax.grad(lambda a: importance_weight(a, CAP).sum())(log_ratio), 0)


def test_rejection_is_the_same_on_both_sides():
    log_ratio = jnp.array([-0.6, -0.5, 0.0, 0.5, 0.6, jnp.nan, jnp.inf, -jnp.inf])
    expected = [False, True, True, True, False, False, False, False]
    np.testing.assert_array_equal(within_bound(log_ratio, 0.5), expected)


# ------------------------------------------------------------------------------ ratios


def guard_total(clip, adv_clip):
    """The whole loss of GRPO-Guard, summed."""
    settings = PolicyGradient(ratio="guard", clip_range=clip, adv_clip=adv_clip)

    def total(weight, log_prob, mean, old, old_mean, advantages, std, dt):
        sigma = jnp.full_like(dt, 0.5)
        samples = Samples(log_prob, old, old, advantages, weight, sigma, dt, mean, old_mean, std)
        return settings.loss(samples)[0]

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


IDS = jnp.array([2, 0, 2, 1, 0, 2, 0, 2, 4])  # trajectories of 3, 1, 4, 0 and 1 steps


def steps_of_trajectories():
    rng = np.random.default_rng(4)
    log_prob = rng.normal(size=9)
    old, advantages = log_prob - 0.15 * rng.normal(size=9), rng.normal(size=5)[IDS]
    return [jnp.asarray(a, jnp.float32) for a in (log_prob, old, advantages)]


def sequence_total(reduce):
    def total(weight, log_prob, old, advantages, ids):
        log_prob, old = mask_rows(weight > 0, log_prob, old)
        log_ratio = sequence_log_ratio(log_prob - old, weight, ids, 5, reduce)
        return weighted_sum(weight, clipped(log_ratio, advantages, 0.1, 0.1))

    return total


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sequence_ratio_depends_on_neither_order_nor_padding(reduce):
    arrays = [*steps_of_trajectories(), IDS]
    check_packing(sequence_total(reduce), arrays, 1, parts=False)
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


# ------------------------------------------------------------------------------ KL and masking

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


def test_kls_and_their_gradients_equal_float64_transcription():
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


def test_kl_of_padding_without_noise_is_finite():
    value, gradient = jax.value_and_grad(
        lambda mean: gaussian_kl(mean, jnp.zeros((1, 2)), jnp.zeros(1)).sum()
    )(jnp.ones((1, 2)))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_velocity_mse_is_float32_whatever_comes_in():
    v = jnp.array([[1.0, 2.0]], jnp.bfloat16)
    error = velocity_mse(v, jnp.array([[1.0078125, 2.0]], jnp.bfloat16))
    assert error.dtype == jnp.float32
    np.testing.assert_allclose(error, [0.0078125**2 / 2], rtol=1e-6)


def test_masked_rows_are_zero_and_stop_the_gradient():
    weight = jnp.array([1.0, 0.0, 0.5, 0.0])
    a = jnp.array([1.0, jnp.nan, 2.0, 1e4])
    b = jnp.stack([a, 2 * a], 1)
    of_a, of_b = mask_rows(weight > 0, a, b)
    np.testing.assert_array_equal(of_a, [1, 0, 2, 0])
    np.testing.assert_array_equal(of_b, [[1, 2], [0, 0], [2, 4], [0, 0]])

    def total(a):
        (a,) = mask_rows(weight > 0, a)
        return weighted_sum(weight, jnp.exp(a) / jnp.array([1.0, 0.0, 1.0, jnp.nan]))

    np.testing.assert_allclose(jax.grad(total)(a), [np.e, 0, np.e**2 / 2, 0], rtol=1e-6)


# ------------------------------------------------------------------------------ packing


def kl_total(form):
    def total(weight, mean, reference, std):
        mean, reference = mask_rows(weight > 0, mean, reference)
        return weighted_sum(weight, form(mean, reference, std))

    return total


# name: a summed loss, its arrays, and how many of them are differentiated
TOTALS = {name: (total_of(ours), ratio_inputs(), 1) for name, (ours, _) in CASES.items()} | {
    "decoupled": (decoupled_total(CAP), policy_inputs(), 1),
    "guard": (guard_total(0.05, 1.4), mixed_steps(), 2),
    "gaussian_kl": (kl_total(gaussian_kl), [MEAN, REFERENCE, STD], 1),
    "velocity_mse": (
        kl_total(lambda v, target, _: velocity_mse(v, target)),
        [MEAN, REFERENCE, STD],
        1,
    ),
}


@pytest.mark.parametrize("name", TOTALS)
def test_sums_do_not_depend_on_packing_and_rows_without_weight_have_no_effect(name):
    check_packing(*TOTALS[name])
