"""Gradients and ratios with stored, recomputed and current log-probabilities, against a plain loop."""

import functools

import jax
import numpy as np
import pytest

from tests.parallel import chunks, toy
from tests.parallel.test_trainer import CLIP

pytestmark = pytest.mark.usefixtures("exact_and_split")

ALL = slice(0, 12)


def built(tuning, old_log_probs, mesh=(2, 2, 1)):
    settings = dict(algorithm__old_log_probs=old_log_probs, trainer__pack=2, trainer__updates=1)
    parts = chunks.system(chunks.config(tuning, mesh, **settings))
    return parts, parts.trainer.init(chunks.tuned(tuning))


@functools.cache
def with_wrong_stored():
    """Stored log-probabilities as if the sampler's arithmetic were much coarser than the trainer's."""
    stored = chunks.sampled()[1].samples.log_prob
    return stored + np.float32(0.02) * np.random.default_rng(5).normal(size=stored.shape)


def train_batch(parts):
    given = chunks.train_batch(parts, ALL)
    stored = jax.device_put(np.float32(with_wrong_stored()), given.samples.log_prob.sharding)
    return given._replace(samples=given.samples._replace(log_prob=stored))


def test_recomputed_ones_are_those_of_the_version_that_sampled():
    """After an update of the state: the arrays that it consumed are not the kept ones."""
    tuning, by = "full", 0.02
    parts, state = built(tuning, "recomputed")
    behavior = parts.trainer.init(chunks.tuned(tuning, by)).tuned
    totals = parts.trainer.accumulate(state, parts.base, train_batch(parts), None, behavior)
    old = chunks.log_probs(tuning, by).astype(np.float32)
    expected, ratios = chunks.plain(tuning, old)
    clipped = np.abs(ratios - 1) > CLIP
    assert 5 < clipped.sum() < clipped.size - 5
    assert toy.difference(chunks.mean(totals), expected) < 1e-5
    assert toy.difference(chunks.scaled(chunks.mean(totals), 1.01), expected) > 5e-3
    assert int(totals.sums["clip_fraction"]) == clipped.sum()
    np.testing.assert_allclose(totals.sums["approx_kl"], (np.log(ratios) ** 2).sum() / 2, rtol=1e-3)
    assert_ratios_are_to_what_is_stored(tuning, totals)


def assert_ratios_are_to_what_is_stored(tuning, totals):
    ratios = np.exp(chunks.log_probs(tuning, 0.05) - with_wrong_stored())
    np.testing.assert_allclose(totals.sums["ratio"], ratios.sum(), rtol=1e-5)
    deviation = np.abs(ratios - 1).sum()
    np.testing.assert_allclose(totals.sums["ratio_deviation"], deviation, rtol=1e-4)


def test_with_current_ones_nothing_is_clipped_and_the_deviation_is_still_seen():
    parts, state = built(tuning := "lora", "current", (1, 2, 2))
    totals = parts.trainer.accumulate(state, parts.base, train_batch(parts), None)
    expected, ratios = chunks.plain(tuning, chunks.log_probs(tuning, 0.05).astype(np.float32))
    np.testing.assert_allclose(ratios, 1, atol=1e-6)
    assert toy.difference(chunks.mean(totals), expected) < 1e-5
    assert int(totals.sums["clip_fraction"]) == 0 and float(totals.sums["approx_kl"]) == 0
    assert_ratios_are_to_what_is_stored(tuning, totals)


def test_without_the_version_that_sampled_nothing_is_recomputed():
    parts, state = built("lora", "recomputed")
    with pytest.raises(ValueError, match="accumulate needs behavior"):
        parts.trainer.accumulate(state, parts.base, train_batch(parts), None)
