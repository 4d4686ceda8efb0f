"""The importance ratios of a first update, and in bfloat16 of a second: the trainer's program against the sampler's."""

import pathlib
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax import assemble
from digen_jax.algorithms.losses import guard_log_ratio
from digen_jax.config.load import fit_config, load_config
from digen_jax.diffusion.sampling import TRANSITION, flatten, image_keys, replay
from digen_jax.models.sd3.network import FROZEN, SD3Config, SD3Transformer
from digen_jax.parallel.system import SampledImages
from tests.cases import said
from tests.parallel import chunks, toy
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split", "optimised")

# A tenth of Flow-GRPO's own clip range, 1e-4. Used as the clip range itself, it makes the trainer's
# clip_fraction the number of ratios that are further than this from 1.
LIMIT = 1e-5
STEPS = 8


def attention_family(layers=1, **options):
    network = SD3Config(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=toy.TEXT,
        caption_projection_dim=32,
        pooled_projection_dim=toy.TEXT,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    network = SD3Transformer(network, **options)
    return toy.ToyFamily(network, (8, 8, 4), {"transformer": FROZEN})


def replaying(system):
    """The program (tuned, base, experience) -> Replay of all its transitions in one batch, as [s b]."""

    @jax.jit
    def program(tuned, base, train_batch):
        steps = len(train_batch.samples.sigma)
        rows = jnp.tile(train_batch.rows, steps)
        prompts, sigma_max, *_ = train_batch.shared
        velocity = system.policy.velocity(tuned, base, *prompts.at(rows))
        step = system.sampler.settings.step
        found = replay(velocity, flatten(train_batch.samples), step, sigma_max)
        return jax.tree.map(lambda a: a.reshape(steps, -1, *a.shape[1:]), found)

    return program


@pytest.fixture(scope="module")
def rolled(exact_and_split, optimised):
    """(system, samples, train batch, replay, state): from a rollout worker of 4 to a trainer of 2 x 2."""
    config = toy.config(
        **toy.meshes((4, 1), (2, 2)),
        sampler__kind="flow",
        sampler__noise_level=0.7,
        sampler__steps=STEPS,
        sampler__window=dict(first=0, length=STEPS),
        algorithm__clip_range=LIMIT,
    )
    system = toy.system(config, family=attention_family())
    prompts, (chunk,) = toy.rollout(system, config, system.start)
    advantages = np.linspace(-1, 1, 8, dtype=np.float32)
    program = replaying(system)
    return (
        system,
        jax.device_get(chunk.samples),
        receive(system, prompts, chunk, advantages),
        lambda train_batch: jax.device_get(program(system.start, system.base, train_batch)),
        toy.fresh(system),
    )


def sampled_means(x_next, std):
    """x_next minus the noise that was added to its mean, drawn again from the images' keys."""
    keys = image_keys(jax.random.key(0), np.repeat([10, 11], 4), np.tile(np.arange(4), 2))
    keys = jax.vmap(lambda key: jax.random.fold_in(key, TRANSITION))(keys)

    def noise(step):
        fold = jax.vmap(lambda key: jax.random.fold_in(key, step))
        return jax.vmap(lambda key: jax.random.normal(key, x_next.shape[2:]))(fold(keys))

    return x_next - std[..., None, None, None] * np.stack([noise(i) for i in range(len(std))])


@pytest.mark.parametrize("step", [None, 0, 3])
def test_the_first_updates_ratios_are_1_and_replayed_means_the_samplers(rolled, step):
    """Unless the sigma of a step is a thousandth off, which the trainer and the replay notice."""
    system, sampled, train_batch, replayed, state = rolled
    if step is not None:
        t = train_batch.samples
        sigma = t.sigma.at[step].add(1e-3 if t.sigma[step] < 1 else -1e-3)
        train_batch = train_batch._replace(samples=t._replace(sigma=sigma))
    wrong = np.arange(STEPS) == step
    totals = system.trainer.accumulate(state, system.base, train_batch, None)
    assert int(totals.sums["clip_fraction"]) == 8 * wrong.sum()
    found = replayed(train_batch)
    ratio = np.exp(found.log_prob - sampled.log_prob)
    assert ratio.size == 8 * STEPS and np.abs(ratio - 1)[~wrong].max() <= LIMIT
    deviation = np.abs(found.mean - sampled_means(sampled.x_next, found.std)).max((1, 2, 3, 4))
    assert deviation[~wrong].max() <= 1e-5 and (deviation[wrong] > 1e-4).all()


@pytest.mark.slow
def test_rounding_is_far_below_grpo_guards_published_range(monkeypatch):
    """Sampled and replayed by the same weights the guard's log-ratio is 0, but for rounding; that range is 2e-6."""
    root = pathlib.Path(__file__).parents[2]
    monkeypatch.chdir(root)
    config = runpy.run_path(str(root / "configs" / "shapes_algorithms.py"))["get_config"](
        "grpo_guard"
    )
    config.sampler.update(steps=10, window=dict(first=0, length=9), chunk=24)
    config.trainer.micro_batch = 24
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    tuned, rows = system.trainer.init(system.start).tuned, np.arange(24, dtype=np.int32) // 12
    weights = system.rollout_weights(tuned)
    prompts = system.sampler.encode(weights, said("a photo of a red star", "two blue rings"))
    keys = image_keys(jax.random.key(0), rows, np.arange(24))
    sampled = system.sampler.generate(weights, prompts, rows, keys)
    chunk = SampledImages(0, rows, sampled.transitions, sampled.sigmas)
    train_batch = receive(system, prompts, chunk, np.ones(24, np.float32))

    found, program = [], replaying(system)
    for i in range(9):  # batches of the sampler's size, as the trainer's
        one = jax.tree.map(lambda a, i=i: a[i : i + 1], train_batch.samples)
        new = program(tuned, system.base, train_batch._replace(samples=one))
        new, one = jax.tree.map(lambda a: a[0], (new, one))
        found += [guard_log_ratio(new.log_prob, one.log_prob, new.mean, one.mean, new.std)]
    found = np.stack(found)
    print(f"guard log-ratio: rms {np.sqrt((found**2).mean()):.1e}, max {np.abs(found).max():.1e}")
    assert np.abs(found).max() < 1e-6


# ------------------------------------------------------------------------------ arithmetic in bfloat16


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
