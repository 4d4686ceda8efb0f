import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.losses import (
    check_clip_range,
    check_dual_clip,
    check_kl_threshold,
    check_topr_weights,
    cispo,
    clipped,
    divergence_masked,
    dual_clipped,
    mask_rows,
    topr,
    weighted_sum,
)
from tests.algorithms.packing import check_junk, check_split, close

LOW, HIGH, DUAL, THRESHOLD = 0.2, 0.35, 3.0, 0.5


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


def inputs(n=60):
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
    log_prob, old, advantages, kl = inputs()
    rest = [np.float64(a) for a in (log_prob, old, advantages, kl)]  # frozen first
    term = np.vectorize(paper, otypes=[float])
    close(ours(log_prob, log_prob - old, advantages, kl), term(np.float64(log_prob), *rest))
    h = 1e-6
    slope = term(rest[0] + h, *rest) / (2 * h) - term(rest[0] - h, *rest) / (2 * h)
    gradient = jax.grad(total_of(ours), argnums=1)(jnp.ones(60), log_prob, old, advantages, kl)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-7)
    assert name in ("cispo", "topr", "weighted_topr") or (slope[2:] == 0).any()


@pytest.mark.parametrize("name", CASES)
def test_packing_and_padding(name):
    total = total_of(CASES[name][0])
    check_split(total, inputs(), 1)
    check_junk(total, inputs(), 1)


@pytest.mark.parametrize("name", CASES)
def test_only_log_prob_has_a_gradient(name):
    log_prob, old, advantages, kl = inputs()
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


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (check_clip_range, (1e-7, 0.2), "clip_low is 1e-07; .* float32 cannot resolve"),
        (check_clip_range, (-0.2, 0.2), "clip_low is -0.2"),
        (check_clip_range, (1.1, 0.2), "clip_low is 1.1"),
        (check_clip_range, (0.2, -0.2), "clip_high is -0.2"),
        (check_clip_range, (0.2, 1e-7), "clip_high is 1e-07; .* float32 cannot resolve"),
        (check_clip_range, (0.2, math.inf), "clip_high is inf"),
        (check_clip_range, (math.nan, 0.2), "clip_low is nan"),
        (check_clip_range, (0.2, 0.0, ("low_end", "high_end")), "high_end is 0.0"),
        (check_dual_clip, (1.0,), "dual_clip is 1.0; it must be finite and above 1"),
        (check_dual_clip, (math.inf,), "dual_clip is inf"),
        (check_topr_weights, (-1.0, 1.0), "positive_weight is -1.0"),
        (check_topr_weights, (1.0, math.nan), "negative_weight is nan"),
        (check_topr_weights, (0.0, 0.0), "both 0"),
        (check_kl_threshold, (0.0,), "kl_threshold is 0.0"),
        (check_kl_threshold, (math.inf,), "kl_threshold is inf"),
    ],
)
def test_refused_settings(check, arguments, message):
    with pytest.raises(ValueError, match=message):
        check(*arguments)


def test_good_settings_pass():
    check_clip_range(0.2, 0.28)
    check_clip_range(1.0, 5.0)
    check_dual_clip(3.0)
    check_topr_weights(1.0, 0.0)
    check_kl_threshold(1e-5)
