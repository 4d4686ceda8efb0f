"""Training before groups are complete gives the gradient of training them when they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.advantages import AdvantageSettings, advantages
from digen_jax.parallel.accumulate import apply_global_std
from digen_jax.parallel.trainer import Trainer
from tests.cases import quick
from tests.parallel import chunks, toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

# Of three groups: far from 0, where float32 would lose many digits; all equal; and nearly equal.
REWARDS = np.array(
    [100.1, 100.9, 100.3, 100.2, 0.3, 0.3, 0.3, 0.3, -1.0, -1.0004, -1.0001, -0.9999]
)
# The order in which chunks (of two images, two a group) are trained; several groups are open at once.
ORDERS = [(0, 1, 2, 3, 4, 5), (5, 2, 0, 4, 1, 3), (3, 1, 5, 0, 2, 4)]


def built(tuning, mesh, kl, std, images=2, **fields):
    """(system, state) whose advantages are never clipped and whose ratios are 1."""
    settings = dict(trainer__pack=2, advantages__std=std) | fields
    config = chunks.config(tuning, mesh, images=images, **settings)
    config.algorithm.update(kl_coefficient=kl, adv_clip=6.0, old_log_probs="current")
    parts = chunks.system(config)
    parts.trainer.algorithm.check_early_training(parts.advantages, 4, 3)
    return parts, parts.trainer.init(chunks.tuned(tuning))


def ordinary(parts, state, std, rewards=REWARDS):
    """The step's totals with every advantage known beforehand."""
    known = advantages(AdvantageSettings(std=std), rewards, chunks.ROWS, 3)
    totals = None
    for chunk in range(6):
        cut = slice(2 * chunk, 2 * chunk + 2)
        train_batch = chunks.train_batch(parts, cut, advantages=known)
        totals = parts.trainer.accumulate(state, parts.base, train_batch, totals)
    return totals


def early(parts, state, order, rewards=REWARDS):
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


def updated(parts, state, totals, std):
    """(the gradient that an update takes, the update's metrics)."""
    given = REWARDS.std() if std == "global" and totals.unscaled is not None else None
    whole = totals if given is None else apply_global_std(totals, jnp.float32(1 / (given + 1e-4)))
    gradient = jax.device_get(chunks.mean(whole))
    copy = jax.tree.map(jnp.copy, state)
    _, metrics = parts.trainer.update(copy, totals, given)
    return gradient, metrics


CASES = [
    ("lora", (1, 2, 1), 0.3, "global"),
    ("full", (2, 1, 2), 0.3, "group"),
]


@pytest.mark.parametrize(("tuning", "mesh", "kl", "std"), quick(CASES, 1))
def test_the_update_is_that_of_training_complete_groups(tuning, mesh, kl, std):
    parts, state = built(tuning, mesh, kl, std, trainer__eps=1.0)
    expected, measured = updated(parts, state, ordinary(parts, state, std), std)
    assert float(measured["gradient_norm"]) > 1e-4
    for order in ORDERS:
        totals = early(parts, state, order)
        assert float(totals.sums["weight"]) == 48
        gradient, metrics = updated(parts, state, totals, std)
        assert toy.difference(gradient, expected) < 1e-5
        assert toy.difference(chunks.scaled(gradient, 1.01), expected) > 5e-3
        assert metrics.keys() == measured.keys()
        for name, value in measured.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_group_without_variance_gives_no_gradient_and_counts():
    parts, state = built("lora", (1, 2, 1), 0.0, "group")
    totals = early(parts, state, (0, 1, 2, 3, 4, 5), np.full(12, 0.1))
    assert float(totals.sums["weight"]) == 48
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(totals.gradient))
    assert largest < 1e-9


def test_groups_that_were_complete_and_groups_that_were_not_share_an_update():
    parts, state = built("lora", (1, 2, 1), 0.3, "group")
    trainer, known = parts.trainer, advantages(parts.advantages, REWARDS, chunks.ROWS, 3)
    expected, totals, group = ordinary(parts, state, "group"), None, None
    for chunk in (4, 0, 1, 5, 2, 3):
        cut = slice(2 * chunk, 2 * chunk + 2)
        train_batch = chunks.train_batch(parts, cut, advantages=known)
        if chunk < 4:
            totals = trainer.accumulate(state, parts.base, train_batch, totals)
        else:
            group = trainer.accumulate_early(state, parts.base, train_batch, REWARDS[cut], group)
        if chunk == 5:
            totals = trainer.close(group, totals, "group")
    assert toy.difference(chunks.mean(totals), chunks.mean(expected)) < 1e-5


# ------------------------------------------------------------------------------ what is refused


def test_a_clipped_advantage_is_refused_when_its_group_closes():
    parts, state = built("lora", (1, 2, 1), 0.0, "group")
    lower = dataclasses.replace(parts.trainer.algorithm, adv_clip=1.5)
    step, trainer = parts.sampler.settings.step, parts.trainer
    trainer = Trainer(trainer.policy, trainer.group, step, lower, trainer.settings)
    with pytest.raises(ValueError, match="clipped"):
        early(parts._replace(trainer=trainer), state, ORDERS[0])


def test_an_update_without_the_global_std_is_refused():
    parts, state = built("lora", (1, 2, 1), 0.3, "global")
    totals = early(parts, state, ORDERS[1])
    with pytest.raises(ValueError, match="reward_std"):
        parts.trainer.update(state, totals)
