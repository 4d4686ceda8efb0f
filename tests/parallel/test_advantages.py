"""From a step's rewards to its gradient: advantages, images that are left out, groups that are not complete."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.advantages import AdvantageSettings, advantages
from digen_jax.parallel.system import SampledImages, move_to_trainer, select_images
from digen_jax.runtime.steps import Steps, StepScores
from digen_jax.scheduling.settings import Settings
from tests.algorithms.test_advantages import oracle
from tests.cases import quick
from tests.parallel import chunks, toy
from tests.parallel.chunks import GROUPS, IMAGES, ROWS

pytestmark = pytest.mark.usefixtures("exact_and_split")

# Two rewards; in the second group the first one is constant, in the third one both agree.
REWARDS = np.float32(
    [
        *([0.9, 0.1], [0.2, 0.5], [0.4, 0.7], [0.1, 0.3]),
        *([0.3, 0.2], [0.3, 0.8], [0.3, 0.1], [0.3, 0.4]),
        *([0.5, 0.5], [0.7, 0.9], [0.1, 0.0], [0.2, 0.3]),
    ]
)


WEIGHTS = dict(reward_weights=(1.0, 0.5))
SETTINGS = {
    "best and worst": AdvantageSettings(std="group", best_and_worst=1),
    "best and worst, dropped": AdvantageSettings(best_and_worst=1, drop_zero_std=True),
    "dropped": AdvantageSettings(std="group", ddof=1, drop_zero_std=True),
    "rewards": AdvantageSettings("leave_one_out", "none", **WEIGHTS),
    "advantages": AdvantageSettings(std="group", combine="advantages", **WEIGHTS),
    "gdpo": AdvantageSettings(std="group", combine="gdpo", **WEIGHTS),
}


def advantages_by_hand(name):
    """Each image's advantage, NaN if it is left out, from the definitions in float64."""
    settings = SETTINGS[name]
    rewards = REWARDS[:, : len(settings.reward_weights)]
    found, kept = oracle(settings, rewards, ROWS.tolist()), set(range(12))
    if count := settings.best_and_worst:
        for group in range(GROUPS):
            order = sorted(range(4 * group, 4 * group + 4), key=lambda i: (rewards[i, 0], i))
            kept -= set(order[count:-count])
    if settings.drop_zero_std:
        kept -= {4, 5, 6, 7}
    return np.array([a if i in kept else np.nan for i, a in enumerate(found)], np.float32)


@functools.cache
def built():
    """(system, trainer state): two devices, passes of two images."""
    parts = chunks.system(chunks.config("lora", (1, 2, 1), images=2, trainer__pack=2))
    return parts, parts.trainer.init(chunks.tuned("lora"))


def part_of(images: slice):
    """Some images on the trainer mesh, in the form in which decoding leaves them."""
    _, whole = chunks.sampled()
    t = whole.samples
    t = t._replace(**{name: getattr(t, name)[:, images] for name in ("x", "x_next", "log_prob")})
    part = SampledImages(0, ROWS[images], t, whole.sigmas)
    return move_to_trainer(part, built()[0].placement.trainer)


def accumulated(settings, size, scores):
    """The totals of a step's chunks of `size` images, trained by a run's own executor."""
    parts, state = built()
    parts = parts._replace(advantages=settings)
    sizes = Settings(1, GROUPS, IMAGES, size)
    steps = Steps(sizes, iter([toy.records(GROUPS)]), parts.rng, 0)
    known = StepScores(steps[0], settings)
    known.scores[:], known.scored[:] = scores, True
    return toy.trained(parts, steps, state, known, chunks.sampled()[0], part_of)


# With best and worst 4 images of which 2 are kept, or 12 and 6; else 2 that are half a group, or 6
# that are of two: so that all share two programs.
SIZES = {"best and worst": (4, 12), "best and worst, dropped": (4, 12), "dropped": (2, 6)}


@pytest.mark.parametrize(("name", "size"), [(n, s) for n in SETTINGS for s in SIZES.get(n, (6,))])
def test_the_gradient_is_the_sum_over_single_images(name, size):
    settings = SETTINGS[name]
    scores = REWARDS[:, : len(settings.reward_weights)]
    totals = accumulated(settings, size, scores)
    by_hand = advantages_by_hand(name)
    old = chunks.sampled()[1].samples.log_prob
    expected, ratios = chunks.plain("lora", old, advantages=by_hand)
    count = int(np.isfinite(by_hand).sum())
    assert float(totals.sums["weight"]) == 4 * count
    assert count == {"best and worst": 6, "best and worst, dropped": 4, "dropped": 8}.get(name, 12)
    chunks.assert_gradient(totals, expected)
    np.testing.assert_allclose(totals.sums["ratio"], ratios.sum(), rtol=1e-5)


def test_where_all_groups_are_dropped_an_update_is_adams_for_no_gradient():
    """Such groups are in no sum or denominator, and metrics are finite."""
    totals = accumulated(SETTINGS["dropped"], 6, np.full((12, 1), 0.1))
    assert all(float(value) == 0 for value in totals.sums.values())
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(totals.gradient)))
    parts, state = built()
    before = jax.device_get(state.tuned)
    state = jax.tree.map(lambda leaf: leaf + 0, state)
    after, metrics = parts.trainer.update(state, totals)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.tuned), before)
    assert all(float(value) == 0 for value in metrics.values())


def test_images_are_taken_in_any_order_and_stay_split():
    """Pairs too, in which an image may occur twice."""
    images, trainer = part_of(slice(0, 12)), built()[0].placement.trainer
    places = np.array([7, 0, 0, 11])
    found = select_images(images, places, trainer)
    np.testing.assert_array_equal(found.rows, [1, 0, 0, 2])
    for name, array in found.samples._asdict().items():
        before = getattr(images.samples, name)
        if name in ("x", "x_next", "log_prob"):
            np.testing.assert_array_equal(array, np.asarray(before)[:, places])
            assert array.sharding.is_equivalent_to(trainer.batch_of_steps, array.ndim)
        elif array is not None:
            np.testing.assert_array_equal(array, before)


# ------------------------------------------------------------------------ before groups are complete


# Of three groups: far from 0, where float32 would lose many digits; all equal; and nearly equal.
EARLY_REWARDS = np.array(
    [100.1, 100.9, 100.3, 100.2, 0.3, 0.3, 0.3, 0.3, -1.0, -1.0004, -1.0001, -0.9999]
)
# The order in which chunks (of two images, two a group) are trained; several groups are open at once.
ORDERS = [(0, 1, 2, 3, 4, 5), (5, 2, 0, 4, 1, 3), (3, 1, 5, 0, 2, 4)]


@functools.cache
def built_early(tuning="lora", mesh=(1, 2, 1), kl=0.0):
    """(system, state) whose advantages are never clipped and whose ratios are 1."""
    config = chunks.config(tuning, mesh, images=2, trainer__pack=2, trainer__eps=1.0)
    config.algorithm.update(kl_coefficient=kl, adv_clip=6.0, old_log_probs="current")
    parts = chunks.system(config)
    return parts, parts.trainer.init(chunks.tuned(tuning))


def with_std(std, *given):
    """As `built_early`, with these advantages."""
    parts, state = built_early(*given)
    parts.trainer.algorithm.check_early_training(AdvantageSettings(std=std), 4, 3)
    return parts._replace(advantages=AdvantageSettings(std=std)), state


def ordinary(parts, state, rewards=EARLY_REWARDS):
    """The step's totals with every advantage known beforehand."""
    known = advantages(parts.advantages, rewards, chunks.ROWS, 3)
    totals = None
    for chunk in range(6):
        cut = slice(2 * chunk, 2 * chunk + 2)
        train_batch = chunks.train_batch(parts, cut, advantages=known)
        totals = parts.trainer.accumulate(state, parts.base, train_batch, totals)
    return totals


def early(parts, state, order, rewards=EARLY_REWARDS):
    """The step's totals, each group closed with its last chunk; an experience holds no advantage."""
    unknown, groups, totals = np.full(12, np.nan, np.float32), {}, None
    for chunk in order:
        cut, number = slice(2 * chunk, 2 * chunk + 2), chunk // 2
        train_batch = chunks.train_batch(parts, cut, advantages=unknown)
        args = (state, parts.base, train_batch, rewards[cut], groups.get(number))
        groups[number] = parts.trainer.accumulate_early(*args)
        if len(groups[number].rewards) == 4:
            std = parts.advantages.std
            totals = parts.trainer.close(groups.pop(number), totals, std)
    assert not groups
    return totals


def updated(parts, state, totals):
    """(the gradient that an update takes, the update's metrics)."""
    given = None if totals.unscaled is None else EARLY_REWARDS.std()
    gradient = jax.device_get(chunks.mean(totals, given))
    copy = jax.tree.map(jnp.copy, state)
    _, metrics = parts.trainer.update(copy, totals, given)
    return gradient, metrics


CASES = [("lora", (1, 2, 1), 0.3, "global"), ("full", (2, 1, 2), 0.3, "group")]


@pytest.mark.parametrize(("tuning", "mesh", "kl", "std"), quick(CASES, 1))
def test_the_update_is_that_of_training_complete_groups(tuning, mesh, kl, std):
    parts, state = with_std(std, tuning, mesh, kl)
    expected, measured = updated(parts, state, ordinary(parts, state))
    assert float(measured["gradient_norm"]) > 1e-4
    for order in ORDERS:
        totals = early(parts, state, order)
        assert float(totals.sums["weight"]) == 48
        gradient, metrics = updated(parts, state, totals)
        assert toy.difference(gradient, expected) < 1e-5
        assert toy.difference(chunks.scaled(gradient, 1.01), expected) > 5e-3
        assert metrics.keys() == measured.keys()
        for name, value in measured.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_group_without_variance_gives_no_gradient_and_counts():
    parts, state = with_std("group")
    totals = early(parts, state, (0, 1, 2, 3, 4, 5), np.full(12, 0.1))
    assert float(totals.sums["weight"]) == 48
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(totals.gradient))
    assert largest < 1e-9


def test_groups_that_were_complete_and_groups_that_were_not_share_an_update():
    parts, state = with_std("group")
    trainer, known = parts.trainer, advantages(parts.advantages, EARLY_REWARDS, chunks.ROWS, 3)
    expected, totals, group = ordinary(parts, state), None, None
    for chunk in (4, 0, 1, 5, 2, 3):
        cut = slice(2 * chunk, 2 * chunk + 2)
        train_batch = chunks.train_batch(parts, cut, advantages=known)
        if chunk < 4:
            totals = trainer.accumulate(state, parts.base, train_batch, totals)
        else:
            group = trainer.accumulate_early(
                state, parts.base, train_batch, EARLY_REWARDS[cut], group
            )
        if chunk == 5:
            totals = trainer.close(group, totals, "group")
    assert toy.difference(chunks.mean(totals), chunks.mean(expected)) < 1e-5


# ------------------------------------------------------------------------------ what is refused


def test_a_clipped_advantage_is_refused_when_its_group_closes(monkeypatch):
    parts, state = with_std("group")
    lower = dataclasses.replace(parts.trainer.algorithm, adv_clip=1.5)
    monkeypatch.setattr(parts.trainer, "algorithm", lower)
    with pytest.raises(ValueError, match="clipped"):
        early(parts, state, ORDERS[0])


def test_an_update_without_the_global_std_is_refused():
    parts, state = with_std("global")
    totals = early(parts, state, ORDERS[1])
    with pytest.raises(ValueError, match="reward_std"):
        parts.trainer.update(state, totals)
