"""Losses of final images against float64 transcriptions of their papers and public code, and its numbers."""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.algorithm import Matching, MatchingSamples, Velocities
from digen_jax.algorithms.awm import AWM, awm_loss, matching_log_prob
from digen_jax.algorithms.crd import CRD, crd_loss
from digen_jax.algorithms.dgpo import DGPO, dgpo_loss
from digen_jax.algorithms.diffusion_nft import (
    DiffusionNFT,
    diffusion_nft_loss,
    reward_probabilities,
)
from digen_jax.algorithms.preference import DiffusionDPO, diffusion_dpo_loss, preference_pairs
from digen_jax.algorithms.sft import SFT

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLDEN, GROUPS = np.load(DATA / "flow_rl.npz"), np.load(DATA / "group_losses.npz")
WEIGHTINGS = "uniform", "sigma", "sigma_squared", "huber", "ghuber"
AWM_BASE = AWM(
    old_log_probs="recomputed",
    clip_range=0.3,
    adv_clip=2.0,
    advantage_max=1.5,
    kl_coefficient=0.2,
    ema_kl_coefficient=0.7,
    ghuber_power=0.4,
)
NFT = DiffusionNFT(beta=0.3, adv_clip=4.0, kl_coefficient=0.2, weight_floor=1e-5)
DPO = DiffusionDPO(beta=3.0)
GROUP_DPO = DGPO(beta=1.5, clip_range=0.5, adv_clip=2.0, kl_coefficient=0.2)
DISTILLED = CRD(beta=0.7, adv_clip=2.0, kl_coefficient=0.2)
SETTINGS = {
    "diffusion_nft": NFT,
    "diffusion_dpo": DPO,
    "dgpo": GROUP_DPO,
    "dgpo-copy": dataclasses.replace(GROUP_DPO, reference="copy", kl_coefficient=0.0),
    "crd": DISTILLED,
    "crd-plain": dataclasses.replace(DISTILLED, adaptive=False, adaptive_kl=False),
} | {
    f"awm-{weighting}-{old}": dataclasses.replace(AWM_BASE, weighting=weighting, old_log_probs=old)
    for weighting in WEIGHTINGS
    for old in ("recomputed", "current")
}
LOSSES = {
    AWM: awm_loss,
    DiffusionNFT: diffusion_nft_loss,
    DiffusionDPO: diffusion_dpo_loss,
    DGPO: dgpo_loss,
    CRD: crd_loss,
}
# The arrays shaped like images, and those with one number a sample.
IMAGES = {
    AWM: ("v", "target", "v_reference", "v_ema"),
    DiffusionNFT: ("v", "x0", "x", "v_old", "v_reference"),
    DiffusionDPO: ("v", "v_reference", "target"),
    DGPO: ("v", "target", "v_copy", "v_reference"),
    CRD: ("v", "target", "v_copy", "v_reference"),
}
# Arrays that get no gradient.
FIXED = "v_old", "v_reference", "v_ema", "old_log_prob", "v_copy"
N = 8


def samples(settings: Matching, n: int = N, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs by name, in float64 rounded to float32; AWM's ratios are on both sides of both clip bounds."""
    rng = np.random.default_rng(seed)
    fields = {name: rng.normal(size=(n, 2, 3, 2)) for name in IMAGES[type(settings)]}
    match settings:
        case AWM():
            fields |= {"sigma": rng.uniform(0.1, 1, n), "advantages": rng.normal(size=n) * 2}
        case DiffusionNFT():
            fields |= {"sigma": rng.uniform(0.02, 1, n), "reward_prob": rng.uniform(0, 1, n)}
        case DGPO() | CRD():
            fields |= {"advantages": rng.normal(size=(n, 2)) * 2}
    fields = {name: np.float32(field).astype(np.float64) for name, field in fields.items()}
    if isinstance(settings, AWM):
        own = [awm_log_prob(settings, sample(fields, i), fields["v"][i]) for i in range(n)]
        fields["old_log_prob"] = np.float64(np.float32(own + np.linspace(-0.8, 0.8, n)))
    return fields


def sample(fields, i):
    return {name: array[i] for name, array in fields.items()}


def awm_log_prob(settings, one, v):
    error = sum((a - b) ** 2 for a, b in zip(v.flat, one["target"].flat, strict=True)) / v.size
    sigma, p = one["sigma"], settings.ghuber_power
    return {
        "uniform": -error,
        "sigma": -error * sigma,
        "sigma_squared": -error * sigma**2,
        "huber": -(math.sqrt(error + 1e-10) - 1e-5) * sigma,
        "ghuber": -((error + 1e-10) ** p - 1e-10**p) * sigma / p,
    }[settings.weighting]


def transcription(settings, one, v, frozen):
    """One sample's loss in float64; `frozen` is the velocity where the paper or code stops the gradient."""
    match settings:
        case AWM():
            old = one["old_log_prob"]
            if settings.old_log_probs == "current":
                old = awm_log_prob(settings, one, frozen)
            ratio = math.exp(awm_log_prob(settings, one, v) - old)
            advantage = min(max(one["advantages"], -settings.adv_clip), settings.adv_clip)
            advantage *= settings.advantage_max / settings.adv_clip
            clipped = min(max(ratio, 1 - settings.clip_range), 1 + settings.clip_range)
            kl, ema_kl = (np.mean((v - one[name]) ** 2) for name in ("v_reference", "v_ema"))
            policy = -min(advantage * ratio, advantage * clipped)
            return policy + settings.kl_coefficient * kl + settings.ema_kl_coefficient * ema_kl
        case DiffusionNFT():
            losses = []
            for sign in (1, -1):

                def off(v, sign=sign):
                    u = (1 - sign * settings.beta) * one["v_old"] + sign * settings.beta * v
                    return (one["x"] - one["sigma"] * u - one["x0"]).ravel()

                weight = max(sum(map(abs, off(frozen))) / v.size, settings.weight_floor)
                losses.append(sum(o * o for o in off(v)) / v.size / weight)
            r = one["reward_prob"]
            policy = r * losses[0] / settings.beta + (1 - r) * losses[1] / settings.beta
            kl = np.mean((v - one["v_reference"]) ** 2)
            return policy * settings.adv_clip + settings.kl_coefficient * kl
        case DiffusionDPO():
            win, lose = (
                np.mean((v[k] - one["target"][k]) ** 2)
                - np.mean((one["v_reference"][k] - one["target"][k]) ** 2)
                for k in (0, 1)
            )
            return -math.log(1 / (1 + math.exp(settings.beta / 2 * (win - lose))))
        case DGPO():

            def errors(u):
                return [np.mean((u[k] - one["target"][k]) ** 2) for k in (0, 1)]

            now, fixed, old = errors(v), errors(frozen), errors(one["v_copy"])
            before = errors(one["v_reference"]) if settings.reference == "initial" else old
            advantages = [
                min(max(a, -settings.adv_clip), settings.adv_clip) for a in one["advantages"]
            ]
            change = sum(a * (f - b) for a, f, b in zip(advantages, fixed, before, strict=True)) / 2
            weight, total = 1 / (1 + math.exp(-settings.beta * change)), 0.0
            for k, advantage in enumerate(advantages):
                ratio, bound = math.exp(old[k] - fixed[k]), settings.clip_range
                beyond = ratio > 1 + bound if advantage > 0 else ratio < 1 - bound
                total += weight * advantage * (fixed[k] if beyond else now[k]) / 2
            kl = np.mean((v - one["v_reference"]) ** 2) if settings.kl_coefficient else 0.0
            return total + settings.kl_coefficient * kl
        case CRD():

            def error(u, k, weighted_by):
                scale = np.abs(weighted_by[k] - one["target"][k]).mean() if settings.adaptive else 1
                return ((u[k] - one["target"][k]) ** 2).mean() / scale

            clip = settings.adv_clip
            wanted = [0.5 + min(max(a, -clip), clip) / (2 * clip) for a in one["advantages"]]
            now, fixed = (
                [error(one["v_copy"], k, one["v_copy"]) - error(u, k, frozen) for k in (0, 1)]
                for u in (v, frozen)
            )
            total = 0.0
            for k in (0, 1):
                r, a = now[k] - sum(fixed) / 2, wanted[k] - sum(wanted) / 2
                weight = settings.kl_coefficient
                if settings.adaptive_kl:
                    weight = 1e-4 + wanted[k] * (settings.kl_coefficient - 1e-4)
                kl = ((v[k] - one["v_reference"][k]) ** 2).mean()
                total += (clip / settings.beta * (settings.beta * r - a) ** 2 + weight * kl) / 2
            return total


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradient(arrays, trained, settings):
    def total(arrays):
        terms = LOSSES[type(settings)](settings, **arrays, trained=trained)
        return jnp.sum(terms["loss"]), terms

    return jax.value_and_grad(total, has_aux=True)(arrays)


def loss_of(fields, settings, trained=None):
    """(terms, gradients by name)."""
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in fields.items()}
    trained = jnp.ones(len(arrays["v"]), bool) if trained is None else trained
    (_, terms), gradient = value_and_gradient(arrays, trained, settings)
    return terms, gradient


def test_sft_is_the_flow_matching_error_and_padding_adds_nothing():
    v, target = np.random.default_rng(0).normal(size=(2, 3, 4, 5, 2)).astype(np.float32)
    v[2], trained = np.inf, np.array([True, True, False])

    def total(v):
        given = target, target, target, np.ones(3), np.ones(3), trained
        samples = MatchingSamples(*map(jnp.asarray, given))
        terms = SFT().loss(samples, Velocities(v, None, None, None))
        return terms["loss"].sum(), terms

    (_, terms), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(v))
    off = np.where(trained[:, None, None, None], np.float64(v) - target, 0)
    np.testing.assert_allclose(terms["loss"], (off**2).mean((1, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * off / off[0].size, rtol=1e-5, atol=1e-8)
    assert tuple(terms) == SFT().terms


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_equal_float64_transcription(name):
    settings, h = SETTINGS[name], 1e-5
    fields = samples(settings)
    terms, gradient = loss_of(fields, settings)
    assert set(terms) == set(settings.terms)
    for i in range(N):
        one = sample(fields, i)
        v = one["v"]
        expected = transcription(settings, one, v, v)
        assert float(terms["loss"][i]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        slopes = np.zeros_like(v)
        for j in np.ndindex(v.shape):
            step = np.zeros_like(v)
            step[j] = h
            ends = [transcription(settings, one, v + s * step, v) for s in (1, -1)]
            slopes[j] = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose(gradient["v"][i], slopes, rtol=0, atol=1e-5 * abs(slopes).max())
    for fixed in set(FIXED) & set(gradient):
        np.testing.assert_array_equal(gradient[fixed], 0)
    if isinstance(settings, AWM | DGPO):
        clipped = np.asarray(terms["clip_fraction"]) > 0
        ratios = getattr(settings, "old_log_probs", "") != "current"
        assert clipped.any() == ratios and not clipped.all()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sample_does_not_depend_on_its_batch_and_padding_adds_nothing(name):
    settings = SETTINGS[name]
    fields, order = samples(settings), np.array([5, 0, 2, 6, 7])
    terms, gradient = loss_of(fields, settings)
    junk = {name: np.full_like(array[:3], np.nan) for name, array in fields.items()}
    for array in junk.values():
        array[1], array[2] = -np.inf, 1e30
    packed = {name: np.concatenate([array[order], junk[name]]) for name, array in fields.items()}
    found, found_gradient = loss_of(packed, settings, jnp.array([True] * 5 + [False] * 3))
    for term in terms:
        np.testing.assert_allclose(found[term][:5], terms[term][order], rtol=1e-6)
        np.testing.assert_array_equal(found[term][5:], 0)
    np.testing.assert_allclose(found_gradient["v"][:5], gradient["v"][order], rtol=1e-5, atol=1e-7)
    for array in found_gradient.values():
        np.testing.assert_array_equal(array[5:], 0)


@pytest.mark.parametrize(
    ("settings", "missing", "change"),
    [
        (AWM_BASE, "old_log_prob", {"old_log_probs": "current"}),
        (AWM_BASE, "v_reference", {"kl_coefficient": 0.0}),
        (AWM_BASE, "v_ema", {"ema_kl_coefficient": 0.0}),
        (NFT, "v_reference", {"kl_coefficient": 0.0}),
        (GROUP_DPO, "v_reference", {"kl_coefficient": 0.0, "reference": "copy"}),
        (DISTILLED, "v_reference", {"kl_coefficient": 0.0}),
    ],
)
def test_inputs_are_needed_only_if_the_settings_read_them(settings, missing, change):
    arrays = {name: jnp.asarray(a, jnp.float32) for name, a in samples(settings).items()}
    arrays[missing], loss = None, LOSSES[type(settings)]
    trained = jnp.ones(N, bool)
    with pytest.raises(ValueError, match=missing):
        loss(settings, **arrays, trained=trained)
    settings = dataclasses.replace(settings, **change)
    assert set(loss(settings, **arrays, trained=trained)) == set(settings.terms)


# ------------------------------------------------------------------------------ AWM


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_matching_log_prob_and_a_perfect_match(weighting):
    settings = dataclasses.replace(AWM_BASE, weighting=weighting, old_log_probs="current")
    fields = samples(settings)
    arrays = (jnp.asarray(fields[name], jnp.float32) for name in ("v", "target", "sigma"))
    expected = [awm_log_prob(settings, sample(fields, i), fields["v"][i]) for i in range(N)]
    np.testing.assert_allclose(matching_log_prob(settings, *arrays), expected, rtol=1e-5)
    terms, gradient = loss_of(fields | {"target": fields["v"]}, settings)
    assert np.isfinite(terms["loss"]).all() and np.isfinite(gradient["v"]).all()


# ------------------------------------------------------------------------------ DiffusionNFT


def test_golden_diffusion_nft():
    settings = DiffusionNFT(
        beta=float(GOLDEN["nft_beta"]),
        adv_clip=5.0,
        kl_coefficient=float(GOLDEN["nft_ref_kl_coef"]),
        weight_floor=1e-5,
    )
    names = "x0", "x", "sigma", "v", "v_old", "v_reference", "reward_prob"
    keys = "x0", "xt", "t", "new", "old", "ref", "reward_prob"
    fields = {name: GOLDEN[f"nft_{key}"] for name, key in zip(names, keys, strict=True)}
    terms, gradient = loss_of(fields, settings)
    assert float(terms["loss"].mean()) == pytest.approx(float(GOLDEN["nft_loss"]), rel=1e-5)
    reference = GOLDEN["nft_grad"]
    assert np.abs(gradient["v"] / 8 - reference).max() <= 1e-5 * np.abs(reference).max()


def test_the_weight_has_a_floor():
    """An exact prediction causes no division by 0, and a nearly exact one a small loss."""
    fields = samples(NFT, 2)
    fields["sigma"] = np.array([0.5, 0.5])
    fields["v"] = fields["v_old"] = np.ones_like(fields["v"])
    fields["x0"] = np.zeros_like(fields["x0"])
    fields["x"] = np.full_like(fields["x"], 0.5)
    fields["x"][1] += 2**-14
    floor = 1e-3
    terms, gradient = loss_of(fields, dataclasses.replace(NFT, weight_floor=floor, beta=0.5))
    assert float(terms["policy_loss"][0]) == 0
    assert float(terms["positive_loss"][1]) == pytest.approx(2**-28 / floor, rel=1e-4)
    assert np.isfinite(gradient["v"]).all()


def test_low_precision_inputs_are_computed_in_float32():
    arrays = {name: jnp.asarray(a, jnp.bfloat16) for name, a in samples(NFT).items()}
    terms = diffusion_nft_loss(NFT, **arrays, trained=jnp.ones(N, bool))
    rounded = {name: np.asarray(a, np.float64) for name, a in arrays.items()}
    for i in range(N):
        one = sample(rounded, i)
        expected = transcription(NFT, one, one["v"], one["v"])
        assert float(terms["loss"][i]) == pytest.approx(expected, rel=1e-5)


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
    r = reward_probabilities(DiffusionNFT(adv_clip=5.0, advantage_mode=mode), advantages)
    np.testing.assert_allclose(r, expected, rtol=1e-6, atol=0)
    assert r.dtype == np.float32


def test_probabilities_stay_in_their_range_with_a_clip_below_1():
    advantages = np.array([-2.0, -0.2, 0.1, 3.0])
    for mode, expected in (("all", [0, 0.25, 0.625, 1]), ("binary", [0, 0, 1, 1])):
        settings = DiffusionNFT(adv_clip=0.4, advantage_mode=mode)
        np.testing.assert_allclose(reward_probabilities(settings, advantages), expected, rtol=1e-6)


# ------------------------------------------------------------------------------ groups


@pytest.mark.parametrize(
    ("name", "settings", "case"),
    [
        ("dgpo", DGPO(beta=100.0, clip_range=1e-2, kl_coefficient=0.02), "initial"),
        (
            "dgpo",
            DGPO(beta=100.0, clip_range=1e-2, kl_coefficient=0.02, reference="copy"),
            "copy",
        ),
        ("crd", CRD(beta=0.5), "adaptive"),
        ("crd", CRD(beta=0.5, adaptive=False, adaptive_kl=False), "plain"),
    ],
)
def test_golden_groups(name, settings, case):
    """The authors' loss of three groups of four images: its mean, and its gradient."""
    keys = [key for key in GROUPS if key.startswith(f"{name}_")]
    fields = {key.removeprefix(f"{name}_"): GROUPS[key] for key in keys}
    fields = {key: fields[key] for key in ("v", "target", "v_copy", "v_reference", "advantages")}
    terms, gradient = loss_of(fields, settings)
    expected = float(GROUPS[f"{name}_{case}_loss"])
    assert float(terms["loss"].mean()) == pytest.approx(expected, rel=2e-5)
    reference = GROUPS[f"{name}_{case}_gradient"]
    assert np.abs(gradient["v"] / 3 - reference).max() <= 1e-5 * np.abs(reference).max()
    if name == "dgpo":
        clipped = float(GROUPS[f"dgpo_{case}_clipped"])
        assert float(terms["clip_fraction"].mean()) == pytest.approx(clipped) and 0 < clipped < 1


# ------------------------------------------------------------------------------ diffusion DPO


def test_a_large_beta_does_not_overflow():
    terms, gradient = loss_of(samples(DPO, seed=1), DiffusionDPO(beta=1e6))
    margin = np.asarray(terms["margin"])
    np.testing.assert_allclose(terms["loss"], np.maximum(-margin, 0), rtol=1e-5)
    assert (margin < -100).any() and np.isfinite(gradient["v"]).all()


@pytest.mark.parametrize("seed", range(5))
def test_preference_pairs_equal_brute_force(seed):
    """With ties, groups of one, groups that agree, groups that are absent, in any order."""
    rng = np.random.default_rng(seed)
    rewards, groups = rng.integers(0, 4, 40) / 3, rng.integers(0, 12, 40)
    rewards[groups == groups[0]] = 1 / 3
    pairs, weights = preference_pairs(rewards, groups)
    assert pairs.shape == (len(set(groups)), 2) and weights.dtype == np.float32
    for group, pair, weight in zip(sorted(set(groups)), pairs.tolist(), weights, strict=True):
        members = [i for i, other in enumerate(groups) if other == group]
        difference, i, j = max((rewards[i] - rewards[j], -i, -j) for i in members for j in members)
        expected = ([-i, -j], 1) if difference else ([members[0]] * 2, 0)
        assert (pair, weight) == expected
    assert {0, 1} == set(weights)
    with pytest.raises(ValueError, match=r"image 1 is nan"):
        preference_pairs(np.array([0.0, np.nan]), np.array([0, 0]))
