import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.awm import AWM, awm_loss, matching_log_prob

WEIGHTINGS = "uniform", "sigma", "sigma_squared", "huber", "ghuber"
RECOMPUTED = AWM(
    old_log_probs="recomputed",
    clip_range=0.3,
    adv_clip=2.0,
    advantage_max=1.5,
    kl_coefficient=0.2,
    ema_kl_coefficient=0.7,
    ghuber_power=0.4,
)
CURRENT = dataclasses.replace(RECOMPUTED, old_log_probs="current")
IMAGES = "v", "target", "v_reference", "v_ema"
NAMES = *IMAGES, "sigma", "advantages", "old_log_prob"


def samples(settings, n=8, seed=0):
    """Random inputs by name, with ratios on both sides of both clip bounds."""
    rng = np.random.default_rng(seed)
    fields = {name: rng.normal(size=(n, 2, 3)) for name in IMAGES}
    fields |= {"sigma": rng.uniform(0.1, 1, n), "advantages": rng.normal(size=n) * 2}
    fields = {name: np.float32(field).astype(np.float64) for name, field in fields.items()}
    shift = np.linspace(-0.8, 0.8, n)
    own = [log_prob_of(fields["v"][i], fields, i, settings) for i in range(n)]
    return fields | {"old_log_prob": np.float64(np.float32(own + shift))}


def log_prob_of(v, fields, i, settings):
    """One sample in float64, as in the authors' code."""
    error = sum((a - b) ** 2 for a, b in zip(v.flat, fields["target"][i].flat, strict=True))
    error, sigma, p = error / v.size, fields["sigma"][i], settings.ghuber_power
    return {
        "uniform": -error,
        "sigma": -error * sigma,
        "sigma_squared": -error * sigma**2,
        "huber": -(math.sqrt(error + 1e-10) - 1e-5) * sigma,
        "ghuber": -((error + 1e-10) ** p - 1e-10**p) * sigma / p,
    }[settings.weighting]


def transcription(v, fields, i, settings, old):
    """One sample's loss in float64."""
    ratio = math.exp(log_prob_of(v, fields, i, settings) - old)
    advantage = min(max(fields["advantages"][i], -settings.adv_clip), settings.adv_clip)
    advantage *= settings.advantage_max / settings.adv_clip
    clipped = min(max(ratio, 1 - settings.clip_range), 1 + settings.clip_range)
    kl, ema_kl = (np.mean((v - fields[name][i]) ** 2) for name in ("v_reference", "v_ema"))
    policy = -min(advantage * ratio, advantage * clipped)
    return policy + settings.kl_coefficient * kl + settings.ema_kl_coefficient * ema_kl


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradient(arrays, trained, settings):
    def total(arrays):
        terms = awm_loss(settings, **arrays, trained=trained)
        return jnp.sum(terms["loss"]), terms

    return jax.value_and_grad(total, has_aux=True)(arrays)


def loss_of(fields, settings, trained=None):
    arrays = {name: jnp.asarray(fields[name], jnp.float32) for name in NAMES}
    trained = jnp.ones(len(arrays["sigma"]), bool) if trained is None else trained
    (_, terms), gradient = value_and_gradient(arrays, trained, settings)
    return terms, gradient


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("settings", [RECOMPUTED, CURRENT])
def test_loss_and_gradient_equal_float64_transcription(settings, weighting):
    """With current log-probabilities the slope is taken with the old ones fixed."""
    settings, h = dataclasses.replace(settings, weighting=weighting), 1e-5
    fields = samples(settings)
    terms, gradient = loss_of(fields, settings)
    assert set(terms) == set(settings.terms)
    for i in range(8):
        v, old = fields["v"][i], fields["old_log_prob"][i]
        if settings.old_log_probs == "current":
            old = log_prob_of(v, fields, i, settings)
        expected = transcription(v, fields, i, settings, old)
        assert float(terms["loss"][i]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        slopes = np.zeros_like(v)
        for j in np.ndindex(v.shape):
            step = np.zeros_like(v)
            step[j] = h
            above, below = (transcription(v + s * step, fields, i, settings, old) for s in (1, -1))
            slopes[j] = (above - below) / (2 * h)
        np.testing.assert_allclose(gradient["v"][i], slopes, rtol=0, atol=1e-5 * abs(slopes).max())
    clipped = np.asarray(terms["clip_fraction"]) == 1
    assert clipped.any() == (settings.old_log_probs == "recomputed") and not clipped.all()
    for name in ("old_log_prob", "v_reference", "v_ema"):
        np.testing.assert_array_equal(gradient[name], 0)


def test_a_clipped_ratio_has_no_policy_gradient():
    settings = dataclasses.replace(RECOMPUTED, kl_coefficient=0.0, ema_kl_coefficient=0.0)
    fields = samples(settings)
    fields["advantages"] = np.array([1.0, -1] * 4)
    terms, gradient = loss_of(fields, settings)
    ratio = np.asarray(terms["ratio"])
    flat = np.abs(gradient["v"]).max((1, 2)) == 0
    expected = ((ratio > 1.3) & (fields["advantages"] > 0)) | (
        (ratio < 0.7) & (fields["advantages"] < 0)
    )
    np.testing.assert_array_equal(flat, expected)
    assert expected.any() and (np.abs(ratio - 1)[~expected] > 0.3).any()


def test_diagnostics():
    fields = samples(RECOMPUTED)
    terms, _ = loss_of(fields, RECOMPUTED)
    log_ratio = (
        np.array([log_prob_of(fields["v"][i], fields, i, RECOMPUTED) for i in range(8)])
        - fields["old_log_prob"]
    )
    np.testing.assert_allclose(terms["ratio"], np.exp(log_ratio), rtol=1e-5)
    np.testing.assert_allclose(terms["approx_kl"], log_ratio**2 / 2, rtol=1e-4)
    np.testing.assert_array_equal(terms["clip_fraction"], np.abs(np.exp(log_ratio) - 1) > 0.3)
    error = ((fields["v"] - fields["target"]) ** 2).mean((1, 2))
    np.testing.assert_allclose(terms["matching_error"], error, rtol=1e-6)


def test_on_policy_it_is_matching_weighted_by_advantages():
    """The paper's objective: with weighting uniform, A times the gradient of the matching loss."""
    settings = AWM(
        weighting="uniform",
        adv_clip=10.0,
        advantage_max=10.0,
        kl_coefficient=0.0,
        ema_kl_coefficient=0.0,
    )
    fields = samples(settings)
    terms, gradient = loss_of(fields, settings)
    advantages = fields["advantages"][:, None, None]
    expected = advantages * 2 * (fields["v"] - fields["target"]) / 6
    np.testing.assert_allclose(gradient["v"], expected, rtol=1e-5)
    np.testing.assert_array_equal(terms["ratio"], 1)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_matching_log_prob(weighting):
    settings = dataclasses.replace(RECOMPUTED, weighting=weighting)
    fields = samples(settings)
    ours = matching_log_prob(
        settings, *(jnp.asarray(fields[name], jnp.float32) for name in ("v", "target", "sigma"))
    )
    expected = [log_prob_of(fields["v"][i], fields, i, settings) for i in range(8)]
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_perfect_match_has_a_finite_gradient(weighting):
    settings = dataclasses.replace(CURRENT, weighting=weighting)
    fields = samples(settings)
    fields["target"] = fields["v"]
    terms, gradient = loss_of(fields, settings)
    assert np.isfinite(terms["loss"]).all() and np.isfinite(gradient["v"]).all()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("settings", [RECOMPUTED, CURRENT])
def test_a_sample_does_not_depend_on_its_batch_and_padding_adds_nothing(settings, weighting):
    settings = dataclasses.replace(settings, weighting=weighting)
    fields = samples(settings)
    terms, gradient = loss_of(fields, settings)
    order = np.array([5, 0, 2, 6, 7])
    junk = {name: np.full_like(a[:3], np.nan) for name, a in fields.items()}
    for name in NAMES:
        junk[name][1], junk[name][2] = -np.inf, 1e30
    packed = {name: np.concatenate([a[order], junk[name]]) for name, a in fields.items()}
    ours, our_gradient = loss_of(packed, settings, jnp.array([True] * 5 + [False] * 3))
    for name in terms:
        np.testing.assert_allclose(ours[name][:5], terms[name][order], rtol=1e-6)
        np.testing.assert_array_equal(ours[name][5:], 0)
    np.testing.assert_allclose(our_gradient["v"][:5], gradient["v"][order], rtol=1e-5, atol=1e-7)
    for name in NAMES:
        np.testing.assert_array_equal(our_gradient[name][5:], 0)


@pytest.mark.parametrize(
    ("missing", "change"),
    [
        ("old_log_prob", {"old_log_probs": "current"}),
        ("v_reference", {"kl_coefficient": 0.0}),
        ("v_ema", {"ema_kl_coefficient": 0.0}),
    ],
)
def test_inputs_are_needed_only_where_the_settings_ask_for_them(missing, change):
    arrays = {name: jnp.asarray(a, jnp.float32) for name, a in samples(RECOMPUTED).items()}
    arrays[missing], trained = None, jnp.ones(8, bool)
    with pytest.raises(ValueError, match=f"{missing} is needed"):
        awm_loss(RECOMPUTED, **arrays, trained=trained)
    settings = dataclasses.replace(RECOMPUTED, **change)
    assert set(awm_loss(settings, **arrays, trained=trained)) == set(settings.terms)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ghuber_power": 0.0}, "ghuber_power is 0.0"),
        ({"ghuber_power": 1.5}, "ghuber_power is 1.5"),
        ({"clip_range": 1e-7}, "float32 cannot resolve"),
        ({"clip_range": 1.1}, "clip_range is 1.1"),
        ({"adv_clip": 0.0}, "adv_clip is 0.0"),
        ({"advantage_max": math.inf}, "advantage_max is inf"),
        ({"kl_coefficient": -1.0}, "kl_coefficient is -1.0"),
        ({"ema_kl_coefficient": math.nan}, "ema_kl_coefficient is nan"),
    ],
)
def test_refused_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        AWM(**setting).check()


def test_good_settings_pass():
    AWM().check()
    RECOMPUTED.check()
