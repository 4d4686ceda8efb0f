"""Updates: optimizer, averages and the layout of the state, against AdamW by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from digen_jax.parallel.accumulate import Totals
from digen_jax.parallel.mesh import ShardingRules
from digen_jax.parallel.trainer import Trainer, TrainerSettings
from tests.parallel import toy

pytestmark = pytest.mark.usefixtures("exact_and_split")

SETTINGS = dict(
    micro_batch=1,
    learning_rate=0.1,
    warmup=3,
    b1=0.9,
    b2=0.99,
    eps=1e-3,
    weight_decay=0.2,
    clip_norm=2.0,
    ema=0.7,
)


def make_trainer(rules=((".*", "fsdp"),), **changes):
    """Shardings on a mesh of 2 x 2."""
    config = toy.config(**toy.meshes((4, 1), (2, 2)))
    system = toy.system(config)
    group = dataclasses.replace(system.placement.trainer, layout=ShardingRules(rules))
    settings = TrainerSettings(**SETTINGS | changes)
    step, algorithm = system.sampler.settings.step, toy.opened(config).algorithm
    return Trainer(system.policy, group, step, algorithm, settings)


def gradients(count):
    """Of 8 samples together; some are larger than the norm they are clipped to, some smaller, one is of no sample."""
    rng = np.random.default_rng(3)
    return [8 * scale * toy.draw(rng, (8, 6)) for scale in (3.0, 0.1, 0.0, 30.0, 0.5)[:count]]


def by_hand(tuned, grads, decay=0):
    """AdamW (arXiv 1711.05101) after clipping by the norm, in float64; and the average of weights."""
    s, w = SETTINGS, tuned.astype(np.float64)
    m, v, ema = np.zeros_like(w), np.zeros_like(w), w
    for k, gradient in enumerate(grads):
        g = gradient.astype(np.float64) / 8
        g *= min(1, s["clip_norm"] / max(np.linalg.norm(g), 1e-30))
        m = s["b1"] * m + (1 - s["b1"]) * g
        v = s["b2"] * v + (1 - s["b2"]) * g**2
        m_hat, v_hat = m / (1 - s["b1"] ** (k + 1)), v / (1 - s["b2"] ** (k + 1))
        rate = s["learning_rate"] * min(1, (k + 1) / (s["warmup"] + 1))
        if decay:
            rate *= 1 - max(0, k - s["warmup"]) / decay
        w = w - rate * (m_hat / (np.sqrt(v_hat) + s["eps"]) + s["weight_decay"] * w)
        ema = s["ema"] * ema + (1 - s["ema"]) * w
    return w, ema


@pytest.mark.parametrize("decay", [0, 4])
def test_updates_clip_warm_up_decay_and_average(decay):
    trainer, start = make_trainer(decay=decay), toy.draw(np.random.default_rng(2), (8, 6))
    state, before = trainer.init({"kernel": start}), start
    for count, gradient in enumerate(gradients(5), start=1):
        samples = 8 if gradient.any() else 0
        sums = {"weight": jnp.float32(samples), "loss": jnp.float32(samples / 2)}
        state, metrics = trainer.update(state, Totals({"kernel": gradient}, sums))
        expected, average = by_hand(start, gradients(count), decay)
        assert toy.difference(state.tuned, {"kernel": expected}) < 1e-6
        assert toy.difference(state.ema, {"kernel": average}) < 1e-6
        assert float(metrics["loss"]) == (0.5 if samples else 0)
        norm = np.linalg.norm(gradient) / 8
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
        change = np.linalg.norm(np.asarray(state.tuned["kernel"]) - before)
        np.testing.assert_allclose(metrics["update_norm"], change, rtol=1e-4)
        before = np.asarray(state.tuned["kernel"])
    assert trainer._update._cache_size() == 1  # the layout of the state is stable


@pytest.mark.parametrize(
    ("counted", "mixed"),
    [
        (dict(ema_every=2), {1: 2 / 11, 3: 4 / 13, 5: 6 / 15}),
        (dict(ema_unit="step", updates=2), {2: 1 / 10, 4: 2 / 11}),
    ],
)
def test_an_average_is_warmed_up_and_mixed_after_some_updates(counted, mixed):
    """By the number of updates, which is part of a restored state."""
    trainer = make_trainer(ema=0.9, ema_warm_up=True, ema_repeats=3, **counted)
    start = toy.draw(np.random.default_rng(2), (8, 6))
    state, average = trainer.init({"kernel": start}), start.astype(np.float64)
    for count, gradient in enumerate(gradients(5), start=1):
        sums = {"weight": jnp.float32(8)}
        state, _ = trainer.update(jax.tree.map(jnp.copy, state), Totals({"kernel": gradient}, sums))
        if count in mixed:
            decay = mixed[count] ** 3
            average = decay * average + (1 - decay) * np.asarray(state.tuned["kernel"])
        assert toy.difference(state.ema, {"kernel": average}) < 1e-6
    assert toy.difference(state.ema, {"kernel": start}) > 0.01


def test_the_state_lies_as_the_rules_say_before_and_after_an_update():
    """Rules anchored at the parameter's own path also hold for its moments and average."""
    trainer = make_trainer(rules=(("^split/kernel$", "fsdp"), ("^whole/kernel$", "replicate")))
    start = {name: {"kernel": np.ones((8, 6), np.float32)} for name in ("split", "whole")}
    state = trainer.init(start)
    for _ in range(2):
        adam = optax.tree.get(state.optimizer, "mu"), optax.tree.get(state.optimizer, "nu")
        for tree in (state.tuned, state.ema, *adam):
            assert local_shapes(tree["split"]["kernel"]) == {(4, 6)}
            assert local_shapes(tree["whole"]["kernel"]) == {(8, 6)}
        totals = Totals(jax.tree.map(np.ones_like, start), {"weight": jnp.float32(1)})
        state, _ = trainer.update(state, totals)


def local_shapes(array):
    return {shard.data.shape for shard in array.addressable_shards}
