import os
import signal

import jax
import numpy as np
import optax
import pytest

from digen_jax.flow.sampling import image_keys
from digen_jax.runtime import loop
from digen_jax.settings import ConfigError
from tests.runtime import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

# Adam with a large eps: its update is nearly proportional to the gradient, so that rounding stays rounding.
OPTIMIZER = dict(
    trainer__learning_rate=3.0, trainer__eps=1.0, trainer__clip_norm=1e3, trainer__ema=0.5
)
KL = dict(algorithm__kl_coefficient=0.1, algorithm__clip_range=0.2)


def small(rollout, trainer, fragment, micro, **fields):
    return toy.config(
        **toy.meshes(rollout, trainer),
        **OPTIMIZER,
        **KL,
        sampler__fragment=fragment,
        trainer__micro_batch=micro,
        **fields,
    )


@pytest.fixture(scope="module")
def alone(exact_and_split):
    """One device; a fragment is one group."""
    config = small((4, 1), (4, 1), fragment=4, micro=4)
    return config, toy.system(config, devices=1)


@pytest.fixture(scope="module")
def apart(exact_and_split):
    """Four devices sample, and four of another shape train; a fragment is the whole step."""
    config = small((4, 1), (2, 2), fragment=8, micro=4)
    return config, toy.system(config)


def fresh(system):
    """A state that may be consumed, as the fixtures' start must not be."""
    return system.trainer.init(jax.tree.map(lambda leaf: leaf + 0, system.start))


def run(parts, steps, reward=toy.brightness):
    """(state, weights, metrics of each step) after some steps with new prompts each."""
    config, system = parts
    state = fresh(system)
    weights, history = system.publish(state.tuned), []
    for step in range(steps):
        records = [record | {"serial": record["serial"] + 2 * step} for record in toy.records(2)]
        state, weights, metrics = loop.run_step(system, config, state, weights, records, reward)
        history.append(metrics)
    return state, weights, history


@pytest.fixture(scope="module")
def two_steps(alone):
    return run(alone, 2)


def test_placement_and_fragments_do_not_change_the_result(alone, apart, two_steps):
    """KL on, so that the start is still read after it has been updated away from."""
    expected, _, history = two_steps
    state, _, other_history = run(apart, 2)
    start = jax.device_get(alone[1].start)
    for tree, other in ((state.tuned, expected.tuned), (state.ema, expected.ema)):
        change, expected_change = (
            jax.tree.map(np.subtract, jax.device_get(end), start) for end in (tree, other)
        )
        assert toy.difference(change, expected_change) < 1e-4
        assert 0.01 < toy.difference(jax.tree.map(np.add, start, change), start) < 1
    for metrics, others in zip(history, other_history, strict=True):
        assert metrics.keys() == others.keys()
        for name, value in metrics.items():
            if not name.startswith(("seconds/", "images_per_second", "ratio_deviation")):
                np.testing.assert_allclose(others[name], value, rtol=1e-4, atol=1e-6)


def test_the_new_weights_are_published(two_steps):
    state, weights, _ = two_steps
    jax.tree.map(np.testing.assert_array_equal, weights.tuned, state.tuned)


def test_a_steps_metrics(alone):
    scores = np.array([0.25, 0.5, 0.75, 1.0, 2.0, 2.0, 2.0, 2.0])
    given = iter([scores[:4], scores[4:]])
    _, _, (metrics,) = run(alone, 1, lambda *_: next(given))
    assert metrics["reward"] == pytest.approx(scores.mean())
    assert metrics["reward_std"] == pytest.approx(scores.std())
    assert metrics["reward/one"] == pytest.approx(0.625)
    assert metrics["reward_std/one"] == pytest.approx(scores[:4].std())
    assert (metrics["reward/two"], metrics["reward_std/two"]) == (2.0, 0.0)
    assert metrics["zero_std_groups"] == 0.5
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["gradient_norm"] > 0 and metrics["update_norm"] > 0
    assert metrics["images_per_second"] > 0
    assert {f"seconds/{phase}" for phase in ("rollout", "reward", "train", "publish")} <= set(
        metrics
    )
    assert all(type(value) is float for value in metrics.values())


def test_the_reward_sees_each_image_with_its_own_prompt(alone):
    config, system = alone
    calls = []

    def reward(images, prompts, metadata):
        calls.append((images, prompts, metadata))
        return np.zeros(len(images))

    run(alone, 1, reward)
    weights, records = system.publish(system.start), toy.records(2)
    prompts = system.sampler.encode(weights, [record["prompt"] for record in records])
    for group, (images, texts, metadata) in enumerate(calls):
        assert texts == [records[group]["prompt"]] * 4
        assert metadata == [records[group]] * 4
        keys = image_keys(jax.random.key(config.seed), np.full(4, 10 + group), np.arange(4))
        rows = np.full(4, group, np.int32)
        expected, _ = system.sampler.generate(weights, prompts, rows, keys)
        np.testing.assert_array_equal(images, expected)


def test_a_prompt_that_comes_again_gives_other_images(alone):
    config, system = alone
    first, second = toy.records(2)
    again = [first, {**first, "serial": second["serial"]}]
    weights = system.publish(system.start)
    prompts = system.sampler.encode(weights, [record["prompt"] for record in again])
    args = (system, config, weights, prompts, again, toy.brightness, loop.Stopwatch())
    one, other = (fragment.trajectory.latents for fragment in loop.rollout(*args))
    assert np.abs(one - other).max((1, 2, 3)).min() > 0.1


# ------------------------------------------------------------------------------ several updates


def test_two_updates_train_one_half_of_the_groups_each(alone):
    """The second one starts where the first one ended, and its ratios are to the rollout's policy."""
    config, system = alone
    config = config.copy_and_resolve_references()
    config.trainer.updates = 2
    prompts, fragments = toy.rollout(system, config, system.start)
    state, metrics = loop.learn(system, config, fresh(system), prompts, fragments, 2)

    t = config.trainer
    optimizer = optax.chain(
        optax.clip_by_global_norm(t.clip_norm),
        optax.adamw(t.learning_rate, eps=t.eps, weight_decay=0),
    )
    tuned = system.start
    moments, deviations = optimizer.init(tuned), []
    for fragment in fragments:
        scores = np.float64(fragment.scores)
        advantages = np.float32((scores - scores.mean()) / (scores.std() + 1e-4))
        experience = loop.receive(system, prompts, fragment, advantages)
        held = fresh(system)._replace(tuned=tuned)
        totals = system.trainer.accumulate(held, system.base, experience, None)
        assert float(totals.sums["weight"]) == 8
        gradient = jax.tree.map(lambda g: g / 8, totals.gradient)
        updates, moments = optimizer.update(gradient, moments, tuned)
        tuned = optax.apply_updates(tuned, updates)
        deviations.append(float(totals.sums["ratio_deviation"]) / 8)
    assert deviations[0] < 1e-5 < 1e-3 < deviations[1]
    assert float(metrics["ratio_deviation"]) == pytest.approx(np.mean(deviations), rel=1e-3)
    change, expected = (
        jax.tree.map(np.subtract, jax.device_get(end), jax.device_get(system.start))
        for end in (state.tuned, tuned)
    )
    assert toy.difference(change, expected) < 1e-5


# ------------------------------------------------------------------------------ what can go wrong


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ([1.0, 2.0, np.nan, 0.0], r"'shapes_geneval' returned nan for image 2 \('red'\)"),
        ([1.0, 2.0], r"'shapes_geneval' returned shape \(2,\) for 4 images"),
        ([[1.0], [2.0, 3.0]], "'shapes_geneval' returned what is no array"),
    ],
)
def test_a_wrong_reward_stops_the_step_and_leaves_its_state_whole(alone, scores, sentence):
    config, system = alone
    state = fresh(system)
    args = (system, config, state, system.publish(state.tuned), toy.records(2))
    with pytest.raises(ConfigError, match=sentence):
        loop.run_step(*args, lambda *_: scores)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_exception_inside_the_reward_is_the_users_own(alone):
    def reward(images, prompts, metadata):
        raise ValueError("a bug of the user's")

    with pytest.raises(ValueError, match="a bug of the user's") as caught:
        run(alone, 1, reward)
    assert not isinstance(caught.value, ConfigError)


def test_the_first_interrupt_is_noted_and_the_second_ends():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with loop.Interrupt() as interrupt:
        assert not interrupt.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.asked == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_stopwatch_adds_up_a_phases_times(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(times))
    watch = loop.Stopwatch()
    for name in ("train", "reward", "train"):
        with watch.phase(name):
            pass
    assert watch.seconds == {"train": 6.0, "reward": 0.5}
