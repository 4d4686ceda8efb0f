import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.decay import LinearDecay
from digen_jax.algorithms.diffusion_nft import (
    DiffusionNFT,
    diffusion_nft_loss,
    reward_probabilities,
)

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "flow_rl.npz")
SETTINGS = DiffusionNFT(beta=0.3, adv_clip=4.0, kl_coefficient=0.2, weight_floor=1e-5)
NAMES = "x0", "x", "sigma", "v", "v_old", "v_reference", "reward_prob"


def samples(n=6, seed=0):
    """Random inputs by name, in float64 rounded to float32."""
    rng = np.random.default_rng(seed)
    fields = {name: rng.normal(size=(n, 2, 3, 2)) for name in NAMES}
    fields |= {"sigma": rng.uniform(0.02, 1, n), "reward_prob": rng.uniform(0, 1, n)}
    return {name: np.float32(field).astype(np.float64) for name, field in fields.items()}


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradient(arrays, trained, settings):
    def total(arrays):
        terms = diffusion_nft_loss(settings, **arrays, trained=trained)
        return jnp.sum(terms["loss"]), terms

    return jax.value_and_grad(total, has_aux=True)(arrays)


def loss_of(inputs, settings=SETTINGS, trained=None):
    arrays = {name: jnp.asarray(inputs[name], jnp.float32) for name in NAMES}
    trained = jnp.ones(len(arrays["sigma"]), bool) if trained is None else trained
    (_, terms), gradient = value_and_gradient(arrays, trained, settings)
    return terms, gradient


def transcription(x0, x, sigma, v, v_old, v_reference, r, settings, weights):
    """One sample in float64, element by element; `weights` of (v+, v-), or None to compute them."""
    beta, elements = settings.beta, range(x0.size)
    flat = [a.ravel() for a in (x0, x, v, v_old, v_reference)]
    x0, x, v, v_old, v_reference = flat
    positive = [(1 - beta) * v_old[i] + beta * v[i] for i in elements]
    negative = [(1 + beta) * v_old[i] - beta * v[i] for i in elements]
    losses, used = [], []
    for k, u in enumerate((positive, negative)):
        off = [x[i] - sigma * u[i] - x0[i] for i in elements]
        mean_off = sum(abs(o) for o in off) / len(off)
        used.append(max(mean_off, settings.weight_floor) if weights is None else weights[k])
        losses.append(sum(o * o for o in off) / len(off) / used[k])
    policy = r * losses[0] / beta + (1 - r) * losses[1] / beta
    kl = sum((v[i] - v_reference[i]) ** 2 for i in elements) / len(v)
    return policy * settings.adv_clip + settings.kl_coefficient * kl, used


def test_golden():
    settings = DiffusionNFT(
        beta=float(GOLDEN["nft_beta"]),
        adv_clip=5.0,
        kl_coefficient=float(GOLDEN["nft_ref_kl_coef"]),
        weight_floor=1e-5,
    )
    keys = "x0", "xt", "t", "new", "old", "ref", "reward_prob"
    inputs = {name: GOLDEN[f"nft_{key}"] for name, key in zip(NAMES, keys, strict=True)}
    terms, gradient = loss_of(inputs, settings)
    assert float(terms["loss"].mean()) == pytest.approx(float(GOLDEN["nft_loss"]), rel=1e-5)
    reference = GOLDEN["nft_grad"]
    assert np.abs(gradient["v"] / 8 - reference).max() <= 1e-5 * np.abs(reference).max()


def test_loss_and_gradient_equal_float64_transcription():
    """The slope is taken with the adaptive weights fixed: they have no gradient."""
    inputs, h = samples(), 1e-5
    terms, gradient = loss_of(inputs)
    assert set(terms) == set(SETTINGS.terms)
    for n in range(6):
        one = [inputs[name][n] for name in NAMES]
        expected, weights = transcription(*one, SETTINGS, None)
        assert float(terms["loss"][n]) == pytest.approx(expected, rel=1e-5)
        slopes = np.zeros_like(one[3])
        for i in np.ndindex(slopes.shape):
            ends = []
            for sign in (1, -1):
                moved = one[3].copy()
                moved[i] += sign * h
                ends.append(transcription(*one[:3], moved, *one[4:], SETTINGS, weights)[0])
            slopes[i] = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose(gradient["v"][n], slopes, rtol=0, atol=1e-5 * abs(slopes).max())


def test_only_the_trained_policy_gets_a_gradient():
    _, gradient = loss_of(samples())
    for name in ("v_old", "v_reference"):
        np.testing.assert_array_equal(gradient[name], 0)
    assert np.abs(gradient["v"]).min() > 0


def test_terms_add_up():
    inputs = samples()
    terms, _ = loss_of(inputs)
    r = inputs["reward_prob"]
    mixed = (r * terms["positive_loss"] + (1 - r) * terms["negative_loss"]) / 0.3 * 4
    np.testing.assert_allclose(terms["policy_loss"], mixed, rtol=1e-5)
    np.testing.assert_allclose(terms["loss"], terms["policy_loss"] + 0.2 * terms["kl"], rtol=1e-6)
    deviation = ((inputs["v"] - inputs["v_old"]) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(terms["old_deviation"], deviation, rtol=1e-5)


def test_an_even_reward_holds_the_old_policy_and_a_good_one_pulls_to_its_image():
    """At v = v_old the gradient is (2r - 1) times that of plain matching, up to a positive factor."""
    inputs = samples(3)
    inputs["x"] = inputs["x0"] + inputs["sigma"][:, None, None, None] * inputs["x"]
    inputs["v"] = inputs["v_reference"] = inputs["v_old"]
    inputs["reward_prob"] = np.array([0.5, 0.9, 0.1])
    _, gradient = loss_of(inputs)
    sigma = inputs["sigma"][:, None, None, None]
    matching = inputs["x0"] - (inputs["x"] - sigma * inputs["v"])
    assert np.abs(gradient["v"][0]).max() < 1e-6
    for n, sign in ((1, 1), (2, -1)):
        ratio = np.asarray(gradient["v"][n]) / matching[n]
        np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-3)
        assert np.sign(ratio.mean()) == sign


def test_a_sample_does_not_depend_on_its_batch_and_padding_adds_nothing():
    inputs = samples()
    terms, gradient = loss_of(inputs)
    junk = {name: np.full_like(a[:3], np.nan) for name, a in inputs.items()}
    for name in NAMES:
        junk[name][1], junk[name][2] = np.inf, 1e30
    order = np.array([4, 1, 0])
    packed = {name: np.concatenate([a[order], junk[name]]) for name, a in inputs.items()}
    trained = jnp.array([True] * 3 + [False] * 3)
    ours, our_gradient = loss_of(packed, trained=trained)
    for name in terms:
        np.testing.assert_allclose(ours[name][:3], terms[name][order], rtol=1e-6)
        np.testing.assert_array_equal(ours[name][3:], 0)
    np.testing.assert_allclose(our_gradient["v"][:3], gradient["v"][order], rtol=1e-5, atol=1e-7)
    for name in NAMES:
        np.testing.assert_array_equal(our_gradient[name][3:], 0)


def test_the_weight_has_a_floor():
    """An exact prediction causes no division by 0, and a nearly exact one a small loss."""
    inputs = {name: array[:2] for name, array in samples().items()}
    inputs["sigma"] = np.array([0.5, 0.5])
    inputs["v"] = inputs["v_old"] = np.ones_like(inputs["v"])
    inputs["x0"] = np.zeros_like(inputs["x0"])
    inputs["x"] = np.full_like(inputs["x"], 0.5)
    inputs["x"][1] += 2**-14
    floor = 1e-3
    terms, gradient = loss_of(inputs, dataclasses.replace(SETTINGS, weight_floor=floor, beta=0.5))
    assert float(terms["policy_loss"][0]) == 0
    assert float(terms["positive_loss"][1]) == pytest.approx(2**-28 / floor, rel=1e-4)
    assert np.isfinite(gradient["v"]).all()


def test_low_precision_inputs_are_computed_in_float32():
    arrays = {name: jnp.asarray(a, jnp.bfloat16) for name, a in samples().items()}
    terms = diffusion_nft_loss(SETTINGS, **arrays, trained=jnp.ones(6, bool))
    rounded = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    for n in range(6):
        expected, _ = transcription(*(rounded[name][n] for name in NAMES), SETTINGS, None)
        assert float(terms["loss"][n]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0, 0, 0.3, 0.5, 0.8, 1, 1]),
        ("positive_only", [0.5, 0.5, 0.5, 0.5, 0.8, 1, 1]),
        ("negative_only", [0, 0, 0.3, 0.5, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.4, 0.5, 0.6, 0.6, 0.6]),
    ],
)
def test_advantage_modes(mode, expected):
    advantages = np.array([-9.0, -5, -2, 0, 3, 5, 7], np.float32)
    settings = DiffusionNFT(adv_clip=5.0, advantage_mode=mode)
    r = reward_probabilities(settings, advantages)
    np.testing.assert_allclose(r, expected, rtol=1e-6, atol=0)
    assert r.dtype == np.float32


def test_probabilities_follow_the_clip():
    """A clip below 1 would put the modes that count A = 1 outside [0, 1]."""
    advantages = np.array([-2.0, -0.2, 0.1, 3.0])
    all_of = reward_probabilities(DiffusionNFT(adv_clip=0.4), advantages)
    np.testing.assert_allclose(all_of, [0, 0.25, 0.625, 1], rtol=1e-6)
    binary = DiffusionNFT(adv_clip=0.4, advantage_mode="binary")
    np.testing.assert_array_equal(reward_probabilities(binary, advantages), [0, 0, 1, 1])


def test_reference_is_needed_only_with_a_kl():
    inputs = {name: jnp.asarray(a, jnp.float32) for name, a in samples().items()}
    inputs["v_reference"] = None
    with pytest.raises(ValueError, match="but no v_reference was given"):
        diffusion_nft_loss(SETTINGS, **inputs, trained=jnp.ones(6, bool))
    without = dataclasses.replace(SETTINGS, kl_coefficient=0.0)
    terms = diffusion_nft_loss(without, **inputs, trained=jnp.ones(6, bool))
    assert set(terms) == set(without.terms) == set(SETTINGS.terms) - {"kl"}


def test_declarations():
    assert DiffusionNFT(decay_type=2).slow_copy == LinearDecay(75, 0.0075, 0.999)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; it must be positive"),
        ({"beta": math.nan}, "beta is nan"),
        ({"adv_clip": -1.0}, "adv_clip is -1.0"),
        ({"weight_floor": 0.0}, "weight_floor is 0.0"),
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"kl_coefficient": math.inf}, "kl_coefficient is inf"),
    ],
)
def test_refused_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        DiffusionNFT(**setting).check()


def test_good_settings_pass():
    DiffusionNFT().check()
    DiffusionNFT(beta=0.1, decay_type=2, kl_coefficient=0.0, advantage_mode="one_only").check()
