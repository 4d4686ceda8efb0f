"""bfloat16 arithmetic: how far rounding moves the ratios, before the first update and after one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parallel import chunks, toy
from tests.parallel.test_ratios import attention_family, replaying
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split", "optimised")


def tiny(old_log_probs, **fields):
    """A tiny SD3 transformer in bfloat16 around which a step is sampled: (system, state, experience)."""
    remat = fields.pop("model__remat", "none")
    c = toy.config(
        precision__arithmetic="bfloat16",
        algorithm__old_log_probs=old_log_probs,
        trainer__updates=2,
        trainer__pack=2,
        **dict(sampler__chunk=4, trainer__micro_batch=4, algorithm__clip_range=1e-4) | fields,
        **toy.meshes((0, 1), (1, 1)),
    )
    family = attention_family(dtype=jnp.bfloat16, remat=remat)
    system = toy.system(c, 1, family)
    state = toy.fresh(system)
    prompts, (images, _) = toy.rollout(system, c, state.tuned)
    advantages = np.linspace(-1, 1, 4, dtype=np.float32)
    return system, state, receive(system, prompts, images, advantages)


def spread(totals):
    """(ratio_spread, over_spread_limit) of a gradient."""
    sums = jax.device_get(totals.sums)
    return [float(sums[name] / sums["weight"]) for name in ("ratio_spread", "over_spread_limit")]


class Chain(nn.Module):
    """A velocity from bfloat16 products and sums, of which a compiler may round only the last."""

    @nn.compact
    def __call__(self, x, sigma, context, pooled):
        scale = self.param("scale", nn.initializers.normal(), (x.shape[-1],))
        return chain(x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16)).astype(jnp.float32)


def chain(x, scale):
    small = x * scale
    y = small + x
    return (y * y + small) * y


def test_sampler_and_trainer_round_where_the_model_does():
    c = toy.config(sampler__guidance=1.0, sampler__chunk=4, **toy.meshes((0, 1), (1, 1)))
    system = toy.system(c, 1, toy.ToyFamily(Chain(), frozen={}))
    state = toy.fresh(system)
    prompts, (images, _) = toy.rollout(system, c, state.tuned)
    t, step = jax.device_get(images.samples), system.sampler.settings.step
    # numpy rounds every result.
    half, scale, expected = (
        np.dtype(jnp.bfloat16),
        np.asarray(state.tuned["transformer"]["scale"]),
        [],
    )
    for x, *rest in zip(t.x, t.x_next, t.sigma, t.sigma_next, strict=True):
        found = []
        for v in (chain(x.astype(half), scale.astype(half)), chain(x, scale)):
            x_next, *sigmas = map(jnp.asarray, rest)
            mean, std = step.mean_std(jnp.asarray(x), jnp.float32(v), *sigmas, images.sigmas[1])
            found.append(step.log_prob(x_next, mean, std))
        assert np.abs(found[0] - found[1]).max() > 1e-3
        expected.append(found[0])
    np.testing.assert_allclose(t.log_prob, expected, atol=1e-6)
    given = images._replace(samples=images.samples._replace(log_prob=jnp.stack(expected)))
    train_batch = receive(system, prompts, given, np.ones(4, np.float32))
    mean, over = spread(system.trainer.accumulate(state, system.base, train_batch, None))
    assert mean < 1e-6 and over == 0


@pytest.mark.slow
def test_the_second_updates_gradient_is_that_of_the_network_in_float32_but_for_rounding():
    """By plain differentiation of PPO's clipped ratio in float32 and, for the ratios, float64.

    Before the first update all ratios are 1: with a backward pass and without, with remat, and in smaller batches.
    """
    fields = dict(trainer__micro_batch=2, model__remat="blocks", trainer__learning_rate=1e-3)
    system, state, train_batch = tiny("recomputed", algorithm__clip_range=0.2, **fields)
    start = toy.fresh(system).tuned
    totals = system.trainer.accumulate(state, system.base, train_batch, None, start)
    mean, over = spread(totals)
    assert mean < 2e-6 and over == 0
    state, _ = system.trainer.update(state, totals)
    found = system.trainer.accumulate(state, system.base, train_batch, None, start)
    exact = toy.system(
        toy.config(**toy.meshes((0, 1), (1, 1)), sampler__chunk=4), 1, attention_family()
    )

    program = replaying(exact).__wrapped__  # to be differentiated in one of its own

    def log_probs(tuned):
        return program(tuned, exact.base, train_batch).log_prob

    @jax.jit
    def pulled_back(tuned, weights):
        return jax.vjp(log_probs, tuned)[1](weights)[0]

    new, old = (np.float64(jax.jit(log_probs)(tuned)) for tuned in (state.tuned, start))
    ratio = np.exp(new - old)
    advantages = np.float64(train_batch.advantages)[None] + np.zeros(ratio.shape)
    active = np.where(advantages > 0, ratio < 1.2, ratio > 0.8)
    weights = np.float32(-advantages * ratio * active / ratio.size)
    expected = pulled_back(state.tuned, weights)
    assert np.abs(ratio - 1).max() > 0.01
    assert toy.difference(chunks.mean(found), expected) < 0.05
    got = float(found.sums["ratio_spread"]) / ratio.size
    np.testing.assert_allclose(got, np.abs(ratio - 1).mean(), rtol=0.1)
