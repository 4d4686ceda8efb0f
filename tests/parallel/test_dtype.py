"""A bfloat16 sampler with a float32 trainer: the weights that are sent, and the ratios."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.parallel.policy import jit_as_written
from digen_jax.scheduling.commands import TRAINER
from tests.parallel import toy

LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")


def config(dtype="bfloat16", **fields):
    layout = toy.meshes((2, 1), (1, 2), samples=True)
    return toy.config(precision__rollout=dtype, **layout, **fields)


def kinds(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("lora", [{}, LORA])
@pytest.mark.parametrize("weights", ["in place", "resharded"])
def test_parameters_are_rounded_for_every_sampler_and_for_nobody_else(lora, weights):
    c = config(runtime__tag_weights=weights, **lora)
    system = toy.system(c)
    state = toy.fresh(system)
    executors = toy.executors(system, c, state, toy.batches(2))
    for worker in ("rollout 0", TRAINER):
        sent = executors.sampling(worker).rollout.weights(state.tuned)
        assert kinds(sent.tuned) == {jnp.dtype("bfloat16")} and kinds(sent.base) <= kinds(
            sent.tuned
        )
        assert kinds(sent.frozen) == {jnp.dtype("float32")}
        expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), state.tuned)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(sent.tuned), expected)
    assert kinds((state, system.base)) <= {jnp.dtype("float32"), jnp.dtype("int32")}


def test_it_samples_by_the_rounded_network():
    """Its latents are those of the plain network, given rounded parameters and activations."""
    c = config(sampler__window=dict(first=0, length=4))
    system = toy.system(c)
    prompts, (chunk,) = toy.rollout(system, c, system.start)
    t = jax.tree.map(jnp.asarray, jax.device_get(chunk.samples))
    step, sigmas = system.sampler.settings.step, chunk.sigmas
    rounded = system.rollout_weights(system.start)
    conditioning = jax.tree.map(lambda leaf: leaf[chunk.rows], prompts.conditioning)
    family = toy.ToyFamily(toy.Network(dtype=jnp.bfloat16))
    means = []
    for parameters, network in ((rounded.tuned, family), (system.start, toy.ToyFamily())):
        policy = system.policy.__class__(network, c.sampler.guidance)
        given = jax.device_get((parameters, rounded.base, conditioning, prompts.null))
        velocity = jit_as_written(policy.velocity(*jax.tree.map(jnp.asarray, given)))
        v = velocity(t.x[1], jnp.full(len(t.x[1]), t.sigma[1]))
        mean, std = step.mean_std(t.x[1], v, t.sigma[1], t.sigma_next[1], sigmas[1])
        means.append((step.log_prob(t.x_next[1], mean, std), mean))
    (found, of_rounded), (_, exact) = means
    np.testing.assert_allclose(found, t.log_prob[1], atol=2e-3)
    assert 1e-3 < np.abs(of_rounded - exact).max() < 0.1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "current"),
        (dict(trainer__updates=2, sampler__chunk=4), "recomputed"),
        (dict(runtime__max_policy_lag=1, sampler__chunk=4), "recomputed"),
        (dict(algorithm__old_log_probs="rollout"), "rollout"),
    ],
)
def test_old_log_probs_are_the_trainers_own_unless_asked_for_otherwise(fields, expected):
    assert toy.opened(config(**fields)).algorithm.old_log_probs == expected
    if "algorithm__old_log_probs" not in fields:
        assert toy.opened(config("", **fields)).algorithm.old_log_probs == "rollout"


def test_rounding_is_seen_in_the_ratios_and_clips_nothing():
    c = config(algorithm__clip_range=1e-3, algorithm__adv_clip=5.0)
    _, (found,), _ = toy.drive(toy.system(c), c, 1)
    # Without rounding the deviation of a first update is below 1e-5: see runtime/test_driver.py.
    assert found["ratio_deviation"] > 3e-4 and found["clip_fraction"] == 0
