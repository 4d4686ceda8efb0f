import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.losses import (
    check_importance_cap,
    check_rejection_bound,
    clipped,
    decoupled_log_ratios,
    importance_weight,
    mask_rows,
    sequence_log_ratio,
    topr,
    weighted_sum,
    within_bound,
)
from tests.algorithms.packing import check_junk, check_split, close

CAP, EPSILON = 1.5, 0.2


def inputs(n=50):
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


@pytest.mark.parametrize("cap", [CAP, math.inf])
def test_decoupled_ppo_equals_float64_transcription(cap):
    """The paper's objective with cap = inf; with a cap, truncated importance sampling."""

    def paper(log_prob, proximal, behavior, advantage):
        ratio = math.exp(log_prob - proximal)
        bounded = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
        stale = min(math.exp(proximal - behavior), cap)
        return -stale * min(ratio * advantage, bounded * advantage)

    arrays = inputs()
    exact, *rest = (np.float64(a) for a in arrays)
    value, gradients = jax.value_and_grad(decoupled_total(cap), argnums=(1, 2, 3))(
        jnp.ones(50), *arrays
    )
    term = np.vectorize(paper)
    assert float(value) == pytest.approx(term(exact, *rest).sum(), rel=1e-5)
    slope = (term(exact + 1e-6, *rest) - term(exact - 1e-6, *rest)) / 2e-6
    np.testing.assert_allclose(gradients[0], slope, rtol=1e-4, atol=1e-6)
    assert (slope == 0).any()
    for of_other_policy in gradients[1:]:
        np.testing.assert_array_equal(of_other_policy, 0)


def test_packing_and_padding():
    check_split(decoupled_total(CAP), inputs(), 1)
    check_junk(decoupled_total(CAP), inputs(), 1)


def test_a_fresh_sample_is_not_corrected():
    log_prob, proximal, _, _ = inputs()
    log_ratio, stale = decoupled_log_ratios(log_prob, proximal, proximal)
    close(log_ratio, np.float64(log_prob) - np.float64(proximal))
    np.testing.assert_array_equal(importance_weight(stale, CAP), 1)


def test_importance_weight_is_capped_and_does_not_overflow():
    log_ratio = jnp.array([-200.0, -1.0, 0.0, 0.3, 1.0, 200.0])
    expected = [0, math.exp(-1), 1, math.exp(0.3), CAP, CAP]
    np.testing.assert_allclose(importance_weight(log_ratio, CAP), expected, rtol=1e-6)
    assert float(importance_weight(jnp.array([1.0]))[0]) == pytest.approx(math.e)
    np.testing.assert_array_equal(jax.grad(lambda a: importance_weight(a, CAP).sum())(log_ratio), 0)


def rejecting_total(bound):
    def total(weight, log_prob, behavior, advantages):
        weight = weight * within_bound(log_prob - behavior, bound)
        log_prob, behavior = mask_rows(weight > 0, log_prob, behavior)
        loss = topr(log_prob, log_prob - behavior, advantages)
        return weighted_sum(weight, loss), jnp.sum(weight)

    return total


def test_rejected_samples_never_dilute_a_mean():
    log_prob, _, behavior, advantages = inputs()
    difference = np.abs(np.float64(log_prob) - np.float64(behavior))
    kept = np.flatnonzero(difference <= 0.5)
    assert 0 < len(kept) < 50
    # rejected values may be too large for exp
    log_prob = log_prob.at[np.argmax(difference)].set(jnp.inf).at[49].set(jnp.nan)
    kept = kept[kept != 49]
    (loss, count), gradient = jax.value_and_grad(rejecting_total(0.5), argnums=1, has_aux=True)(
        jnp.ones(50), log_prob, behavior, advantages
    )
    (alone, all_kept), of_alone = jax.value_and_grad(rejecting_total(1e9), argnums=1, has_aux=True)(
        jnp.ones(len(kept)), log_prob[kept], behavior[kept], advantages[kept]
    )
    assert float(count) == float(all_kept) == len(kept)
    assert float(loss / count) == pytest.approx(float(alone / all_kept), rel=1e-5)
    np.testing.assert_allclose(gradient[kept], of_alone, rtol=1e-6)
    rejected = np.setdiff1d(np.arange(50), kept)
    np.testing.assert_array_equal(gradient[rejected], 0)


def test_rejection_is_the_same_on_both_sides():
    log_ratio = jnp.array([-0.6, -0.5, 0.0, 0.5, 0.6, jnp.nan, jnp.inf, -jnp.inf])
    expected = [False, True, True, True, False, False, False, False]
    np.testing.assert_array_equal(within_bound(log_ratio, 0.5), expected)


def test_a_whole_trajectory_is_corrected_by_its_path():
    """OP-GRPO's composition: per-step ratios to the proximal policy, one weight for the trajectory."""
    log_prob, proximal, behavior, advantages = (a[:6] for a in inputs())
    ids = jnp.array([1, 0, 1, 1, 0, 1])
    log_ratio, stale = decoupled_log_ratios(log_prob, proximal, behavior)
    weight = importance_weight(sequence_log_ratio(stale, jnp.ones(6), ids, 2, "sum"), CAP)
    ours = weight * clipped(log_ratio, advantages, EPSILON, EPSILON)
    p, b = np.float64(proximal), np.float64(behavior)
    for i, mine in enumerate(ids):
        path = np.prod([np.exp(p[j] - b[j]) for j in range(6) if ids[j] == mine])
        ratio, a = math.exp(float(log_prob[i]) - p[i]), float(advantages[i])
        bounded = min(max(ratio, 1 - EPSILON), 1 + EPSILON)
        assert float(ours[i]) == pytest.approx(
            -min(path, CAP) * min(ratio * a, bounded * a), rel=1e-5
        )


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (check_importance_cap, 0.9, "importance_cap is 0.9; it must be at least 1"),
        (check_importance_cap, math.nan, "importance_cap is nan"),
        (check_rejection_bound, 0.0, "rejection_bound is 0.0"),
        (check_rejection_bound, -1.0, "rejection_bound is -1.0"),
        (check_rejection_bound, 1e-8, "rounding alone"),
        (check_rejection_bound, math.inf, "rejection_bound is inf"),
    ],
)
def test_refused_settings(check, value, message):
    with pytest.raises(ValueError, match=message):
        check(value)


def test_good_settings_pass():
    check_importance_cap(1.0)
    check_importance_cap(math.inf)
    check_rejection_bound(0.01)
