"""From a step's rewards to its gradient: advantages, trained images, and images that are left out."""

import functools

import jax
import numpy as np
import pytest

from digen_jax.algorithms.advantages import AdvantageSettings
from digen_jax.parallel.system import SampledImages, move_to_trainer, select_images
from digen_jax.runtime.steps import Steps, StepScores
from tests.algorithms.test_advantages import oracle
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
    steps = Steps(iter([toy.records(GROUPS)]), IMAGES, size, parts.rng, 0)
    known = StepScores(steps[0], np.float32(scores), settings, np.ones(len(scores), bool))
    return toy.trained(parts, steps, state, known, chunks.sampled()[0], part_of)


# With best and worst 4 images of which 2 are kept, or 12 and 6; else 2 that are half a group, or 6
# that are of two: so that all share two programs.
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_is_the_sum_over_single_images(name, large):
    settings = SETTINGS[name]
    size = (12 if large else 4) if settings.best_and_worst else (6 if large else 2)
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
