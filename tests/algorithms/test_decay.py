import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.algorithms.algorithm import OLD_POLICY_DECAYS, EmaDecay, update_average


@pytest.mark.parametrize(
    ("decay_type", "expected"),
    [
        (0, {0: 0, 1: 0, 1000: 0}),
        (1, {0: 0, 1: 0.001, 100: 0.1, 499: 0.499, 500: 0.5, 501: 0.5, 9000: 0.5}),
        (2, {0: 0, 74: 0, 75: 0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 9000: 0.999}),
    ],
)
def test_old_policy_decays(decay_type, expected):
    for updates, decay in expected.items():
        assert OLD_POLICY_DECAYS[decay_type].at(updates) == pytest.approx(decay, rel=1e-12)


def test_ema_is_constant_or_warmed_up():
    warmed, constant = EmaDecay(0.9, warm_up=True), EmaDecay(0.9)
    for updates, decay in {0: 0.1, 1: 2 / 11, 8: 0.5, 79: 80 / 89, 80: 0.9, 500: 0.9}.items():
        assert warmed.at(updates) == pytest.approx(decay, rel=1e-6)  # float32
        assert constant.at(updates) == 0.9


@pytest.mark.parametrize(
    ("given", "updates", "first_step", "decays"),
    [
        # Flow-GRPO, with two updates a step or one; DiffusionNFT; Flow-Factory; DanceGRPO; AWM
        (dict(every=8, step_updates=2), [7, 15, 23, 31], 4, [8 / 17, 16 / 25]),
        (dict(every=8), [7, 15, 23, 31], 7, [8 / 17, 16 / 25]),
        (dict(every=9, step_updates=2), [8, 17, 26], 4, [9 / 18, 18 / 27]),
        (dict(step_updates=2), [*range(1, 33)], 1, [2 / 11, 3 / 12]),
        (dict(every=4, unit="step", step_updates=2), [8, 16, 24, 32], 4, [4 / 13, 8 / 17]),
        (dict(unit="step", step_updates=2), [*range(2, 33, 2)], 1, [1 / 10, 2 / 11]),
        (dict(every=3, unit="step"), [*range(3, 33, 3)], 3, [3 / 12, 6 / 15]),
        (dict(unit="step"), [*range(1, 33)], 1, [1 / 10, 2 / 11]),
    ],
)
def test_an_average_is_mixed_after_the_sources_updates(given, updates, first_step, decays):
    decay, warmed = EmaDecay(0.9, **given), EmaDecay(0.9, warm_up=True, **given)
    assert [n for n in range(1, 33) if decay.at(n) != 1] == updates
    assert [n for n in range(1, 33) if warmed.at(n) != 1] == updates
    assert float(decay.at(updates[0])) == pytest.approx(0.9, rel=1e-6)
    assert [warmed.at(n) for n in updates[:2]] == pytest.approx(decays, rel=1e-6)
    assert decay.first_step == first_step


def flow_grpos_loop(weights, micro_batches):
    """scripts/train_sd3.py in float64: the average at the start of each epoch, of two updates.

    `weights` are those after 0, 1, 2, ... updates. The average is mixed after every micro-batch, by
    the number of updates that were made by then.
    """
    average, updates, seen = weights[0], 0, [weights[0]]
    for _ in range((len(weights) - 1) // 2):
        for micro_batch in range(1, micro_batches + 1):
            if micro_batch % (micro_batches // 2) == 0:
                updates += 1
            if (updates + 1) % 8 == 0:
                decay = min((1 + updates) / (10 + updates), 0.9)
                average += (1 - decay) * (weights[updates] - average)
        seen.append(average)
    return seen


# Flow-GRPO has 4 micro-batches an epoch on its 32 GPUs, so 16 on 8; the lag is in updates.
@pytest.mark.parametrize(("micro_batches", "lag"), [(4, 35.1), (16, 7.05), (2, 73.0)])
def test_an_average_with_repeats_is_flow_grpos(micro_batches, lag):
    decay = EmaDecay(0.9, warm_up=True, every=8, repeats=micro_batches // 2)

    def ours(weights):
        average, seen = weights[0], [weights[0]]
        for n in range(1, len(weights)):
            part = float(decay.at(n))
            average = part * average + (1 - part) * weights[n]
            seen += [average] if n % 2 == 0 else []
        return seen

    walk = np.random.default_rng(0).normal(size=401).cumsum()
    expected = flow_grpos_loop(walk, micro_batches)
    np.testing.assert_allclose(ours(walk), expected, rtol=0, atol=1e-6 * np.abs(walk).max())
    # With weights equal to the number of updates: the age of the evaluated weights after 60 n epochs.
    line = np.arange(1201.0)
    for seen in (ours(line), flow_grpos_loop(line, micro_batches)):
        assert 1200 - seen[600] == pytest.approx(lag, rel=1e-3)


@pytest.mark.parametrize(("updates", "interval"), [(2, 4), (1, 3), (4, 1)])
def test_an_average_that_counts_steps_is_flow_factorys(updates, interval):
    """`ema_step(step=epoch)` of src/flow_factory/trainers/grpo.py in float64, after the updates of an epoch."""
    walk = np.random.default_rng(0).normal(size=30 * updates + 1).cumsum()
    decay = EmaDecay(0.9, warm_up=True, every=interval, unit="step", step_updates=updates)
    ours = expected = walk[0]
    for epoch in range(30):
        for n in range(epoch * updates + 1, (epoch + 1) * updates + 1):
            part = float(decay.at(n))
            ours = part * ours + (1 - part) * walk[n]
        if (epoch + 1) % interval == 0:
            part = min(0.9, (1 + epoch) / (10 + epoch))
            expected = part * expected + (1 - part) * walk[(epoch + 1) * updates]
        assert ours == pytest.approx(expected, abs=1e-6 * np.abs(walk).max())


def test_dtypes_are_the_copys_and_the_mixing_is_float32():
    old = jnp.array([1.0, 2.0], jnp.bfloat16)
    current = jnp.array([1.0078125, 4.0], jnp.bfloat16)
    mixed = update_average(old, current, 0.25)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(mixed, jnp.array([1.005859375, 3.5]).astype(jnp.bfloat16))
    assert update_average(jnp.zeros(2), current, 0.5).dtype == jnp.float32


def test_an_average_is_the_sum_that_its_decays_say():
    decay, values = EmaDecay(0.8, warm_up=True), np.random.default_rng(1).normal(size=12)
    average = jnp.float32(values[0])
    for n, value in enumerate(values[1:], 1):
        average = update_average(average, jnp.float32(value), decay.at(n))
    decays = [min(0.8, (1 + n) / (10 + n)) for n in range(1, 12)]
    weights = [np.prod(decays)]
    weights += [(1 - decays[k]) * np.prod(decays[k + 1 :]) for k in range(11)]
    assert sum(weights) == pytest.approx(1)
    assert float(average) == pytest.approx(float(np.dot(weights, values)), rel=1e-5)
