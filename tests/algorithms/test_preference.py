import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.preference import DiffusionDPO, diffusion_dpo_loss, preference_pairs

SETTINGS = DiffusionDPO(beta=3.0)
NAMES = "v", "v_reference", "target"


def pairs(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return {name: np.float64(np.float32(rng.normal(size=(n, 2, 3, 2)))) for name in NAMES}


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradient(arrays, trained, settings):
    def total(arrays):
        terms = diffusion_dpo_loss(settings, **arrays, trained=trained)
        return jnp.sum(terms["loss"]), terms

    return jax.value_and_grad(total, has_aux=True)(arrays)


def loss_of(fields, settings=SETTINGS, trained=None):
    arrays = {name: jnp.asarray(fields[name], jnp.float32) for name in NAMES}
    trained = jnp.ones(len(arrays["v"]), bool) if trained is None else trained
    (_, terms), gradient = value_and_gradient(arrays, trained, settings)
    return terms, gradient


def transcription(v, reference, target, beta):
    """One pair in float64, as in the paper's equation 14."""
    w, lose = (
        np.mean((v[k] - target[k]) ** 2) - np.mean((reference[k] - target[k]) ** 2) for k in (0, 1)
    )
    return -math.log(1 / (1 + math.exp(beta / 2 * (w - lose))))


def test_loss_and_gradient_equal_float64_transcription():
    fields, h = pairs(), 1e-5
    terms, gradient = loss_of(fields)
    assert set(terms) == set(SETTINGS.terms)
    for n in range(6):
        v, *rest = (fields[name][n] for name in NAMES)
        assert float(terms["loss"][n]) == pytest.approx(transcription(v, *rest, 3.0), rel=1e-5)
        slopes = np.zeros_like(v)
        for i in np.ndindex(v.shape):
            step = np.zeros_like(v)
            step[i] = h
            above, below = (transcription(v + s * step, *rest, 3.0) for s in (1, -1))
            slopes[i] = (above - below) / (2 * h)
        np.testing.assert_allclose(gradient["v"][n], slopes, rtol=0, atol=1e-5 * abs(slopes).max())
    np.testing.assert_array_equal(gradient["v_reference"], 0)


def test_diagnostics():
    fields = pairs(seed=1)
    terms, _ = loss_of(fields)
    np.testing.assert_allclose(np.log1p(np.exp(-terms["margin"])), terms["loss"], rtol=1e-5)
    np.testing.assert_array_equal(terms["accuracy"], terms["loss"] < math.log(2))
    assert 0 < np.mean(terms["accuracy"]) < 1
    error = ((fields["v"] - fields["target"]) ** 2).mean((2, 3))
    np.testing.assert_allclose(terms["preferred_error"], error[:, 0], rtol=1e-6)
    np.testing.assert_allclose(terms["dispreferred_error"], error[:, 1], rtol=1e-6)


def test_at_the_reference_it_pulls_to_the_preferred_image_and_away_from_the_other():
    fields = pairs()
    fields["v_reference"] = fields["v"]
    terms, gradient = loss_of(fields)
    np.testing.assert_allclose(terms["loss"], math.log(2), rtol=1e-6)
    np.testing.assert_allclose(terms["margin"], 0, atol=1e-6)
    pull = 3.0 / 4 * 2 * (fields["v"] - fields["target"]) / 6
    np.testing.assert_allclose(gradient["v"][:, 0], pull[:, 0], rtol=1e-5)
    np.testing.assert_allclose(gradient["v"][:, 1], -pull[:, 1], rtol=1e-5)


def test_a_large_beta_does_not_overflow():
    terms, gradient = loss_of(pairs(seed=1), DiffusionDPO(beta=1e6))
    margin = np.asarray(terms["margin"])
    np.testing.assert_allclose(terms["loss"], np.maximum(-margin, 0), rtol=1e-5)
    assert (margin < -100).any() and np.isfinite(gradient["v"]).all()


def test_a_pair_does_not_depend_on_its_batch_and_padding_adds_nothing():
    fields = pairs()
    terms, gradient = loss_of(fields)
    junk = {name: np.full_like(a[:3], np.nan) for name, a in fields.items()}
    for name in NAMES:
        junk[name][1], junk[name][2] = np.inf, 1e30
    order = np.array([3, 5, 0])
    packed = {name: np.concatenate([junk[name], a[order]]) for name, a in fields.items()}
    ours, our_gradient = loss_of(packed, trained=jnp.array([False] * 3 + [True] * 3))
    for name in terms:
        np.testing.assert_allclose(ours[name][3:], terms[name][order], rtol=1e-6)
        np.testing.assert_array_equal(ours[name][:3], 0)
    np.testing.assert_allclose(our_gradient["v"][3:], gradient["v"][order], rtol=1e-5, atol=1e-8)
    for name in NAMES:
        np.testing.assert_array_equal(our_gradient[name][:3], 0)


def by_brute_force(rewards, group_ids):
    """Among all ordered pairs within a group, the first with the largest difference, if that is not 0."""
    found = []
    for group in sorted(set(group_ids.tolist())):
        members = [i for i, g in enumerate(group_ids) if g == group]
        candidates = [(rewards[i] - rewards[j], -i, -j) for i in members for j in members]
        difference, i, j = max(candidates)
        if difference > 0:
            found.append((-i, -j))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_preference_pairs_equal_brute_force(seed):
    """With ties, groups of one, groups that agree, groups that are absent, in any order."""
    rng = np.random.default_rng(seed)
    rewards, group_ids = rng.integers(0, 4, 40) / 3, rng.integers(0, 12, 40)
    rewards[group_ids == 2] = 1 / 3
    found = preference_pairs(rewards, group_ids, 15)
    assert found.tolist() == [list(pair) for pair in by_brute_force(rewards, group_ids)]
    assert 2 not in group_ids[found]


def test_no_pair_at_all():
    found = preference_pairs(np.ones(3), np.array([0, 0, 1]), 2)
    assert found.shape == (0, 2)


def test_broken_rewards_are_refused():
    with pytest.raises(ValueError, match="image 1 is nan"):
        preference_pairs(np.array([0.0, np.nan]), np.array([0, 0]), 1)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.inf, math.nan])
def test_refused_settings(beta):
    with pytest.raises(ValueError, match=f"beta is {beta}"):
        DiffusionDPO(beta=beta).check()


def test_good_settings_pass():
    DiffusionDPO().check()
