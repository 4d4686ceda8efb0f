import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.advantages import AdvantageSettings, advantages
from digen_jax.algorithms.algorithm import Samples
from digen_jax.algorithms.losses import flash_weight
from digen_jax.algorithms.policy_gradient import PolicyGradient
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.diffusion.steps import FlowSde, LinearSde
from tests.algorithms.test_losses import close

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "flow_rl.npz")
SETTINGS = PolicyGradient(clip_range=1e-4, adv_clip=5.0)


def policy_loss(settings, log_prob, old, advantages, weight):
    sigma, dt = jnp.full_like(log_prob, 0.5), jnp.full_like(log_prob, -0.1)
    return settings.loss(Samples(log_prob, old, old, advantages, weight, sigma, dt))


@functools.partial(jax.jit, static_argnums=0)
def golden_loss(settings, log_prob, mean, advantages):
    """The mean of the full loss over the golden file's samples, with its gradient to log_prob and mean."""
    sqrt_dt = float(GOLDEN["sqrt_dt"])
    ones, old = jnp.ones(8), jnp.asarray(GOLDEN["loss_old_log_prob"])
    rest = dict(
        stored_log_prob=old,
        weight=ones,
        sigma=0.5 * ones,
        dt=-(sqrt_dt**2) * ones,
        old_mean=jnp.asarray(GOLDEN["old_mean"]),
        std=float(GOLDEN["diffusion_coefficient"]) * sqrt_dt * ones,
    )

    def loss(log_prob, mean):
        samples = Samples(log_prob, old, advantages=advantages, mean=mean, **rest)
        total, sums = settings.loss(samples)
        return total / sums["weight"]

    return jax.value_and_grad(loss, argnums=(0, 1))(log_prob, mean)


GOLDEN_CASES = {
    "flow_grpo": (SETTINGS, {"flow_grpo_grad": 0}),
    "guard": (
        dataclasses.replace(SETTINGS, ratio="guard"),
        {"guard_grad_log_prob": 0, "guard_grad_mean": 1},
    ),
    "dppo": (
        dataclasses.replace(SETTINGS, surrogate="divergence", kl_threshold=1e-5),
        {"dppo_grad_log_prob": 0},
    ),
}
GOLDEN_INPUTS = tuple(
    jnp.asarray(GOLDEN[name]) for name in ("loss_log_prob", "new_mean", "loss_advantages")
)


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden(name):
    """Uses the function that training calls; one advantage of the eight is beyond the clip."""
    assert (SETTINGS.clip_range, SETTINGS.adv_clip) == (GOLDEN["clip_range"], GOLDEN["adv_clip"])
    assert (np.abs(GOLDEN["loss_advantages"]) > SETTINGS.adv_clip).sum() == 1
    settings, references = GOLDEN_CASES[name]
    loss, gradients = golden_loss(settings, *GOLDEN_INPUTS)
    assert float(loss) == pytest.approx(float(GOLDEN[f"{name}_loss"]), rel=1e-5)
    for key, which in references.items():
        close(gradients[which], GOLDEN[key])


def test_flow_dppo_masks_what_is_too_far_and_moves_away():
    """The two golden samples that are too far both move back; with reversed advantages, both move away."""
    log_prob, mean, advantages = GOLDEN_INPUTS
    _, (away, _) = golden_loss(GOLDEN_CASES["dppo"][0], log_prob, mean, -advantages)
    np.testing.assert_array_equal(np.flatnonzero(away == 0), [0, 5])


def test_how_far_ratios_are_from_1_is_seen_beside_the_bound():
    """A tenth of the nearer bound, 0.2: the padding is further."""
    log_prob = jnp.log(jnp.array([1.0, 1.015, 0.97, 3.0]))
    settings = PolicyGradient(clip_range=0.3, clip_high=0.2)
    weight = jnp.array([1.0, 1, 1, 0])
    _, sums = policy_loss(settings, log_prob, jnp.zeros(4), jnp.ones(4), weight)
    assert settings.ratio_bound == 0.2
    assert float(sums["ratio_spread"]) == pytest.approx(0.045, rel=1e-4)
    assert float(sums["over_spread_limit"]) == 1
    wider = dataclasses.replace(settings, spread_limit=0.2)
    _, sums = policy_loss(wider, log_prob, jnp.zeros(4), jnp.ones(4), weight)
    assert float(sums["over_spread_limit"]) == 0


@pytest.mark.parametrize(
    "fields", [dict(old_log_probs="current"), dict(importance_cap=2.0), dict(surrogate="topr")]
)
def test_ratios_that_are_1_by_definition_or_not_bounded_have_no_spread(fields):
    settings = PolicyGradient(**fields)
    assert settings.ratio_bound is None and "ratio_spread" not in settings.terms


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ({"clip_high": 1e-8}, "clip_high"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"dual_clip": 3.0, "surrogate": "topr"}, "dual_clip"),
        ({"step_weight_scale": 2.25}, "step_weight_scale"),
        ({"positive_weight": 0.0, "negative_weight": 0.0}, "positive_weight"),
        ({"rejection_bound": 1e-8}, "rejection_bound"),
        ({"importance_cap": 0.5}, "importance_cap"),
        ({"importance_cap": 2.0, "old_log_probs": "current"}, "importance_cap"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting, field):
    with pytest.raises(ValueError, match=f"^{field} "):
        PolicyGradient(**setting).check()
    PolicyGradient(clip_range=0.2, kl_coefficient=0.04, dual_clip=3.0).check()


CURRENT = PolicyGradient(old_log_probs="current", adv_clip=3.0)
BY_GROUP, BY_STEP = AdvantageSettings(std="group"), AdvantageSettings(std="global")


def test_the_largest_advantages_are_those_that_the_check_assumes():
    """One image above all others of its group, and the other groups without variance at its mean."""
    rewards, groups = np.full(12, 1e6), np.repeat(np.arange(3), 4)
    rewards[4:8] = 4e6, 0, 0, 0
    for settings, square in ((BY_GROUP, 3), (BY_STEP, 9)):
        assert advantages(settings, rewards, groups, 3).max() == pytest.approx(square**0.5)


def test_early_training_is_allowed_where_no_advantage_can_be_clipped():
    CURRENT.check_early_training(BY_GROUP, images=10, groups=100)
    CURRENT.check_early_training(BY_STEP, images=4, groups=3)
    for settings, images, groups in ((BY_GROUP, 11, 1), (BY_STEP, 4, 4)):
        with pytest.raises(ValueError, match=r"^adv_clip is"):
            CURRENT.check_early_training(settings, images, groups)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"ratio": "guard"}, ["mean", "old_mean", "std"]),
        ({"kl_coefficient": 0.1}, ["kl"]),
        ({"step_weight": "tempflow"}, ["std"]),
        ({"step_weight": "flash"}, ["std"]),
        ({"importance_cap": 2.0}, ["behavior_log_prob"]),
        ({"ratio": "sequence_sum"}, ["trajectory"]),
    ],
)
def test_inputs_that_are_needed_must_be_given(settings, names):
    ones, means = jnp.ones(8), jnp.ones((8, 3))
    given = dict(mean=means, old_mean=means, std=ones, kl=ones, behavior_log_prob=ones)
    samples = Samples(*(ones,) * 7, **given, trajectory=jnp.zeros(8, int))
    settings = PolicyGradient(**settings)
    settings.loss(samples)
    for name in names:
        with pytest.raises(ValueError, match=f"^{name} is needed"):
            settings.loss(samples._replace(**{name: None}))


TRAJECTORY = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 2])  # the last one is padding
WEIGHT = np.array([1.0] * 9 + [0.0])


def corrected(log_prob, old, behavior, advantages, whole, cap):
    """The loss in float64: each sample's clipped surrogate by its trajectory's ratio, times the correction."""
    total = 0.0
    for i in range(9):
        mine = [j for j in range(9) if TRAJECTORY[j] == TRAJECTORY[i]] if whole else [i]
        put_together = np.mean if whole == "mean" else np.sum
        ratio = math.exp(put_together([log_prob[j] - old[j] for j in mine]))
        bounded = min(max(ratio, 0.8), 1.2)
        weight = 1.0
        if cap:
            weight = min(math.exp(put_together([old[j] - behavior[j] for j in mine])), cap)
        advantage = min(max(advantages[i], -1.5), 1.5)
        total -= weight * min(advantage * ratio, advantage * bounded)
    return total


@pytest.mark.parametrize(
    ("ratio", "whole", "cap"),
    [
        ("plain", "", 0.0),
        ("plain", "", 1.1),
        ("plain", "", math.inf),
        ("sequence_mean", "mean", 0.0),
        ("sequence_sum", "sum", 1.1),
    ],
)
def test_corrected_and_sequence_losses_equal_float64_transcription(ratio, whole, cap):
    rng = np.random.default_rng(3)
    log_prob, old, behavior, advantages = rng.normal(size=(4, 10)) * [[0.4], [0.2], [0.2], [1.5]]
    settings = PolicyGradient(clip_range=0.2, adv_clip=1.5, ratio=ratio, importance_cap=cap)
    settings.check()

    def loss(log_prob):
        f32 = [jnp.asarray(a, jnp.float32) for a in (old, old, advantages, WEIGHT, old, old)]
        samples = Samples(log_prob, *f32)
        if cap:
            samples = samples._replace(behavior_log_prob=jnp.asarray(behavior, jnp.float32))
        return settings.loss(samples._replace(trajectory=jnp.asarray(TRAJECTORY)))

    spoilt = log_prob.copy()
    spoilt[9] = np.nan
    value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, sums), gradient = value_and_grad(jnp.asarray(spoilt, jnp.float32))
    expected = functools.partial(
        corrected, old=old, behavior=behavior, advantages=advantages, whole=whole, cap=cap
    )
    assert float(value) == pytest.approx(expected(log_prob), rel=1e-5)
    h = 1e-6
    slopes = [
        (expected(log_prob + h * unit) - expected(log_prob - h * unit)) / (2 * h)
        for unit in np.eye(10)
    ]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-6)
    assert set(sums) == {*settings.terms, "weight"} and ("importance_weight" in sums) == (cap > 0)
    assert float(sums["clip_fraction"]) > 0 and np.abs(advantages[:9]).max() > 1.5


def authors_weight(name, sigma, dt, g):
    """(weight of the policy's loss, of the KL) in float64, as in the authors' code."""
    root = math.sqrt(-dt)
    match name:
        case "longcat":
            scale = math.sqrt(sigma / (1 - (0.9 if sigma > 0.95 else sigma))) / root
            return scale, scale**2
        case "tempflow":
            return 2.25 * g * root, 1.0
        case "flash":
            return 2.25 / (root / g + (g * root * (1 - sigma)) / (2 * sigma)), 1.0


@pytest.mark.parametrize("name", ["longcat", "tempflow", "flash"])
def test_step_weights_equal_a_float64_transcription_of_the_authors(name):
    """The policy's loss times the weight of its step, LongCat's KL times its square; padding has no weight.

    LongCat's first sigma of 1 takes 1 - 0.9 of the next, as that of the current UniPC, 1 - 1e-6.
    """
    rng = np.random.default_rng(4)
    sigma = np.float32([1.0, 1 - 1e-6, 0.9, 0.9, 0.4, 0.0])
    dt = np.float32([-0.1, -0.1, -0.3, -0.3, -0.4, 0.0])
    std = np.float32([0.3, 0.2, 0.5, 0.1, 0.4, 0.0])
    old, advantages = rng.normal(size=(2, 6)) * [[0.4], [1.5]]
    log_prob, kl, weight = old + 0.1 * rng.normal(size=6), rng.random(6), np.array([1.0] * 5 + [0])
    settings = PolicyGradient(clip_range=0.05, kl_coefficient=0.3, step_weight=name)
    if name != "longcat":
        settings = dataclasses.replace(settings, step_weight_scale=2.25)
    settings.check()

    def transcription(log_prob, kl):
        total = 0.0
        for i in range(5):
            g = float(std[i]) / math.sqrt(-float(dt[i]))
            scale, of_kl = authors_weight(name, float(sigma[i]), float(dt[i]), g)
            ratio = math.exp(log_prob[i] - old[i])
            bounded = min(max(ratio, 0.95), 1.05)
            policy = max(-advantages[i] * ratio, -advantages[i] * bounded)
            total += scale * policy + 0.3 * kl[i] * of_kl
        return total

    def loss(log_prob, kl):
        f32 = [jnp.asarray(a, jnp.float32) for a in (old, old, advantages, weight, sigma, dt)]
        return settings.loss(Samples(log_prob, *f32, std=jnp.asarray(std), kl=kl))[0]

    f32 = jnp.asarray(log_prob, jnp.float32), jnp.asarray(kl, jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*f32)
    assert float(value) == pytest.approx(transcription(log_prob, kl), rel=1e-5)
    h = 1e-6
    for place, gradient in enumerate(gradients):
        for i, unit in enumerate(h * np.eye(6)):
            ends = [
                (log_prob + s * unit, kl) if not place else (log_prob, kl + s * unit)
                for s in (1, -1)
            ]
            slope = (transcription(*ends[0]) - transcription(*ends[1])) / (2 * h)
            assert float(gradient[i]) == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_step_weights_equal_published_numbers():
    """The table of Flash-GRPO's code for Wan 2.1, and the factor of TempFlow-GRPO's for Stable Diffusion 3.5 M.

    Flash-GRPO's sigmas are those of UniPC in diffusers 0.33.
    """
    published = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    sigmas = np.linspace(0.999, 0, 21)
    sigmas = np.float32(3 * sigmas / (1 + 2 * sigmas))
    std = stds(LinearSde(1.0), sigmas)
    found = flash_weight(jnp.asarray(sigmas[:-1]), jnp.diff(sigmas), std)
    np.testing.assert_allclose(found[:10], published, rtol=1e-4)

    std = stds(FlowSde(0.7), make_sigmas(SchedulerConfig(shift=3.0), 10))
    assert 1 / np.mean(std[:9]) == pytest.approx(2.25, abs=0.005)


def stds(step, sigmas):
    x = jnp.zeros((len(sigmas) - 1, 1))
    return step.mean_std(x, x, sigmas[:-1], sigmas[1:], sigmas[1])[1]
