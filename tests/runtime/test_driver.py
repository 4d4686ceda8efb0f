"""A step of a run, from prompts to a new version, and its possible failures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from digen_jax.diffusion.sampling import image_keys
from digen_jax.errors import ConfigError
from digen_jax.images import to_uint8
from digen_jax.logging.timeline import Summary
from digen_jax.planning import hardware
from digen_jax.planning.flops import program_flops
from digen_jax.planning.hardware import Chip
from digen_jax.scheduling.commands import TRAINER, Chunk, Train
from tests.parallel import toy
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split")

# Adam with a large eps: its update is nearly proportional to the gradient, so that rounding stays rounding.
OPTIMIZER = dict(
    trainer__learning_rate=3.0, trainer__eps=1.0, trainer__clip_norm=1e3, trainer__ema=0.5
)
KL = dict(algorithm__kl_coefficient=0.1, algorithm__clip_range=0.2)


def small(**fields):
    return toy.config(**OPTIMIZER, **KL, sampler__chunk=4, trainer__micro_batch=4, **fields)


@pytest.fixture(scope="module")
def alone(exact_and_split):
    """One device; a chunk is one group."""
    config = small()
    return config, toy.system(config, devices=1)


def drive(parts, steps, reward=toy.brightness):
    config, system = parts
    return toy.drive(system, config, steps, reward)


def test_a_steps_metrics(alone):
    scores = np.array([0.25, 0.5, 0.75, 1.0, 2.0, 2.0, 2.0, 2.0])
    given = iter([scores[:4], scores[4:]])
    _, (metrics,), _ = drive(alone, 1, lambda *_: next(given))
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
    assert (metrics["policy_lag"], metrics["assisted"]) == (0, 0)
    assert 0.5 < metrics["utilisation"] <= 1  # one device never waits for another one
    phases = ("rollout", "reward", "train")
    assert {f"seconds/{phase}" for phase in phases} <= set(metrics)
    assert [name for name, value in metrics.items() if type(value) is not float] == []


def test_the_reward_sees_each_image_with_its_own_prompt(alone):
    config, system = alone
    calls = []

    def reward(images, prompts, metadata):
        calls.append((images, prompts, metadata))
        return np.zeros(len(images))

    drive(alone, 1, reward)
    weights, records = system.rollout_weights(system.start), toy.records(2)
    prompts = system.sampler.encode(weights, records)
    assert len(calls) == 2
    for group, (images, texts, metadata) in enumerate(calls):
        assert texts == [records[group]["prompt"]] * 4
        assert metadata == [records[group]] * 4
        keys = image_keys(jax.random.key(config.seed), np.full(4, 10 + group), np.arange(4))
        rows = np.full(4, group, np.int32)
        expected, _ = toy.draw_and_show(system.sampler, weights, prompts, rows, keys)
        np.testing.assert_array_equal(images, to_uint8(np.asarray(expected)))


def test_each_step_samples_from_the_version_before_it(alone):
    config, system = alone
    calls = []

    def reward(images, prompts, metadata):
        calls.append(images)
        return toy.brightness(images, prompts, metadata)

    with toy.driver(system, config, reward) as driver:
        driver.step()
        tuned = jax.tree.map(np.asarray, driver.executor.state.tuned)
        driver.step()
    weights, records = system.rollout_weights(tuned), toy.records(2)
    prompts = system.sampler.encode(weights, records)
    keys = image_keys(jax.random.key(config.seed), np.full(4, 12), np.arange(4))
    expected, _ = toy.draw_and_show(system.sampler, weights, prompts, np.zeros(4, np.int32), keys)
    np.testing.assert_array_equal(calls[2], to_uint8(np.asarray(expected)))
    assert np.abs(calls[2].astype(int) - calls[0]).max() > 2


# ------------------------------------------------------------------------------ several updates


def test_two_updates_train_one_half_of_the_groups_each(alone):
    """The second one starts where the first one ended, and its ratios are to the rollout's policy."""
    config, system = alone
    config = config.copy_and_resolve_references()
    config.trainer.updates = 2
    state, (metrics,), _ = toy.drive(system, config, 1)
    prompts, chunks = toy.rollout(system, config, system.start)

    t = config.trainer
    optimizer = optax.chain(
        optax.clip_by_global_norm(t.clip_norm),
        optax.adamw(t.learning_rate, eps=t.eps, weight_decay=0),
    )
    tuned, weights = system.start, system.rollout_weights(system.start)
    moments, deviations, updated = optimizer.init(tuned), [], jax.jit(optimizer.update)
    records = toy.records(2)
    texts = system.sampler.encode(weights, records)
    for group, chunk in enumerate(chunks):
        keys = image_keys(jax.random.key(config.seed), np.full(4, 10 + group), np.arange(4))
        images, _ = toy.draw_and_show(system.sampler, weights, texts, chunk.rows, keys)
        scores = toy.brightness(to_uint8(np.asarray(images)), None, None)
        advantages = np.float32((scores - scores.mean()) / (scores.std() + 1e-4))
        train_batch = receive(system, prompts, chunk, advantages)
        held = toy.fresh(system)._replace(tuned=tuned)
        totals = system.trainer.accumulate(held, system.base, train_batch, None)
        assert float(totals.sums["weight"]) == 8
        gradient = jax.tree.map(lambda g: g / 8, totals.gradient)
        updates, moments = updated(gradient, moments, tuned)
        tuned = optax.apply_updates(tuned, updates)
        deviations.append(float(totals.sums["ratio_deviation"]) / 8)
    assert deviations[0] < 1e-5 < 1e-3 < deviations[1]
    assert metrics["ratio_deviation"] == pytest.approx(np.mean(deviations), rel=1e-3)
    change, expected = (
        jax.tree.map(np.subtract, jax.device_get(end), jax.device_get(system.start))
        for end in (state.tuned, tuned)
    )
    assert toy.difference(change, expected) < 1e-5


def test_a_decoupled_loss_is_given_the_parameters_at_the_steps_start(monkeypatch):
    config = toy.config(trainer__updates=2, algorithm__importance_cap=2.0, sampler__chunk=4)
    system = toy.system(config, devices=1)
    accumulate, seen = system.trainer.accumulate, []

    def noted(state, base, train_batch, totals, behavior, proximal, piece):
        seen.append((jax.device_get(state.tuned), jax.device_get(proximal), behavior))
        return accumulate(state, base, train_batch, totals, behavior, proximal, piece)

    monkeypatch.setattr(system.trainer, "accumulate", noted)
    toy.drive(system, config, 2)
    starts = [0, 0, 2, 2]  # of the chunks, one an update, two a step
    for (_, proximal, behavior), start in zip(seen, starts, strict=True):
        assert behavior is None
        if proximal is not None:
            jax.tree.map(np.testing.assert_array_equal, proximal, seen[start][0])
    assert [proximal is None for _, proximal, _ in seen] == [True, False, True, False]
    assert toy.difference(seen[3][1], seen[3][0]) > 1e-4


# ------------------------------------------------------------------------------ utilisation

PEAK = 3e9  # of the devices, in bfloat16; that of the tests' exact float32 is a sixteenth
# By worker: number of devices.
COLOCATED = toy.meshes((0, 1), (2, 1)), {"trainer": 2}
DISAGGREGATED = toy.meshes((2, 1), (1, 1)), {"rollout 0": 2, "trainer": 1}


@pytest.mark.parametrize(
    ("layout", "chip"), [(COLOCATED, None), (DISAGGREGATED, Chip("test", PEAK, 1, 1, 1))]
)
def test_utilisation_is_the_needed_flops_over_those_of_the_timelines_seconds(
    monkeypatch, layout, chip
):
    """With guidance, a KL, two updates with a decoupled loss, and an evaluation of other steps and guidance."""
    if chip is not None:
        monkeypatch.setitem(hardware.CHIPS, "cpu", chip)
    ends, end_step = [0.0], Summary.end_step
    monkeypatch.setattr(
        Summary, "end_step", lambda self, now, away: ends.append(now) or end_step(self, now, away)
    )
    meshes, devices = layout
    config = toy.config(
        **meshes,
        sampler__chunk=4,
        trainer__updates=2,
        algorithm=dict(importance_cap=2.0, kl_coefficient=0.1),
        precision__rollout="bfloat16",
        evaluation=dict(every=1, batch=4, steps=3, guidance=1.0),
    )
    system, found = toy.system(config, sum(devices.values())), []
    with toy.driver(system, config, held_out=toy.records(6)) as driver:
        for _ in range(2):
            found.append((driver.step(), driver.intervals))

    def velocity(x, context):
        params = {"transformer": {"params": toy.ToyFamily().params()["transformer"]}}
        return toy.ToyFamily().velocity(params, x, jnp.ones(1), (context, context[:, 0]))

    traced = jax.make_jaxpr(velocity)(jnp.zeros((1, 4, 4, 4)), jnp.zeros((1, 6, 8)))
    forward = program_flops(traced, "cpu").count
    for number, (metrics, intervals) in enumerate(found):
        spent = {"": sum(devices.values()) * (ends[number + 1] - ends[number])}
        for kind in ("generate", "train"):
            spent[f"/{kind}"] = sum(
                one.seconds * devices[one.worker] for one in intervals if one.kind == kind
            )
        evaluated = {one.chunk for one in intervals if one.kind == "evaluate"}
        assert {one.index for one in evaluated} <= {0, 1}
        needed = {
            "/generate": 8 * 4 * 2 * forward,  # images, steps, sequences
            # Two of each image's steps; forward, two products backward, the reference and, after the first update,
            # the policy at the start of the step.
            "/train": 4 * 2 * 2 * (4 + 5) * forward,
        }
        shown = 3 * sum((4, 2)[chunk.index] for chunk in evaluated) * forward
        peaks = {"/generate": PEAK, "/train": PEAK / 16}
        at_peak = {kind: flops / peaks[kind] for kind, flops in needed.items()}
        at_peak[""] = sum(at_peak.values()) + shown / PEAK
        needed[""] = sum(needed.values()) + shown
        for name, seconds in spent.items():
            speed = metrics[f"flops_per_second_per_device{name}"]
            assert speed == pytest.approx(needed[name] / seconds)
            expected = None if chip is None else pytest.approx(at_peak[name] / seconds)
            assert metrics.get(f"mfu{name}") == expected
        each = metrics["images_per_second_per_device"]
        assert each == pytest.approx(metrics["images_per_second"] / sum(devices.values()))
    assert any(one.kind == "evaluate" for _, intervals in found for one in intervals)
    one_of_two = Train(0, TRAINER, Chunk(0, 0), version=0, update=0, first=1, count=1)
    assert driver.executor.flops(one_of_two)[0] == pytest.approx(4 * 2 * 4 * forward)


# ------------------------------------------------------------------------------ what can go wrong


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ([1.0, 2.0, np.nan, 0.0], r"'mine' returned nan for image 2 \('red'\)"),
        ([1.0, 2.0], r"'mine' returned shape \(2,\) for 4 images"),
        ([[1.0], [2.0, 3.0]], "'mine' returned a list"),
    ],
)
def test_a_wrong_reward_stops_the_step_and_leaves_its_state_whole(alone, scores, sentence):
    config, system = alone
    with toy.driver(system, config, lambda *_: scores) as driver:
        with pytest.raises(ConfigError, match=sentence):
            driver.step()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(driver.executor.state))
