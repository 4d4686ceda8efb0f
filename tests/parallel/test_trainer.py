"""Accumulated gradients and updates against plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from digen_jax.parallel.sharding import Layout
from digen_jax.parallel.system import SampledImages
from digen_jax.parallel.trainer import Totals, Trainer, TrainerSettings
from tests.parallel import toy
from tests.parallel.toy import receive

pytestmark = pytest.mark.usefixtures("exact_and_split")

# ------------------------------------------------------------------------------ gradients

CLIP, ADV_CLIP, KL, GUIDANCE, NOISE = 0.005, 1.0, 0.3, 3.0, 0.7
LORA = dict(lora__rank=2, lora__alpha=6.0, lora__targets="inside|outside")
# Of 8 images in 2 groups and 2 steps: rollout worker, trainer mesh, devices, chunk, micro-batch.
CUTS = {
    "4 + 2x2": ((4, 1), (2, 2), 8, 8, 8),
    "2x2 + 1x4": ((2, 2), (1, 4), 8, 4, 4),
}


def gradient_config(tuning, rollout=(4, 1), trainer=(4, 1), chunk=8, micro=8, **fields):
    lora = LORA if tuning == "lora" else {}
    return toy.config(
        **toy.meshes(rollout, trainer),
        **lora,
        **fields,
        sampler__chunk=chunk,
        sampler__guidance=GUIDANCE,
        sampler__noise_level=NOISE,
        trainer__micro_batch=micro,
        algorithm__clip_range=CLIP,
        algorithm__adv_clip=ADV_CLIP,
        algorithm__kl_coefficient=KL,
    )


@functools.cache
def sampled():
    """(prompts, the trajectory of 8 images) on the host: the same for every trainer."""
    config = gradient_config("full")
    system = toy.system(config, devices=1)
    prompts, (images,) = toy.rollout(system, config, system.start)
    return jax.device_get((prompts, images))


ROWS = np.repeat(np.arange(2, dtype=np.int32), 4)
ADVANTAGES = np.array([1.5, -0.4, -0.9, 0.2, -1.7, 0.3, 0.8, 0.6], np.float32)


def experiences(system, chunk):
    """The same trajectories in the trainer's form, divided into chunks."""
    prompts, images = sampled()
    for start in range(0, 8, chunk):
        cut = slice(start, start + chunk)
        t = images.samples
        part = t._replace(**{name: getattr(t, name)[:, cut] for name in t._fields[:3]})
        part = SampledImages(0, ROWS[cut], part, images.sigmas)
        yield receive(system, prompts, part, ADVANTAGES[cut])


def plain_loss(network, tuned, start, scale, sample, prompt, null):
    """Flow-GRPO's loss of one transition, from its paper and public code (arXiv 2505.05470)."""
    x, x_next, old_log_prob, sigma, sigma_next, sigma_max, advantage = sample

    def mean(params):
        def v(context, pooled):
            return network.apply({"params": params}, x[None], sigma[None], context, pooled)[0]

        guided = v(*null) + GUIDANCE * (v(*prompt) - v(*null))
        along_v = guided * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        return x * (1 + std**2 / (2 * sigma) * dt) + along_v

    dt = sigma_next - sigma
    std = jnp.sqrt(sigma / (1 - jnp.where(sigma == 1, sigma_max, sigma))) * NOISE
    new, noise = mean(adapted(start, tuned, scale)), std * jnp.sqrt(-dt)
    log_prob = -((x_next - new) ** 2) / (2 * noise**2) - jnp.log(noise)
    log_prob = jnp.mean(log_prob - jnp.log(jnp.sqrt(2 * jnp.pi)))
    ratio = jnp.exp(log_prob - old_log_prob)
    advantage = jnp.clip(advantage, -ADV_CLIP, ADV_CLIP)
    unclipped = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    kl = jnp.mean((new - mean(start)) ** 2) / (2 * std**2)
    return jnp.maximum(unclipped, clipped) + KL * kl, ratio


def adapted(start, tuned, scale):
    """The whole network: `tuned` over the start, or its LoRA factors multiplied into the kernels."""
    params, flat = flatten_dict(start), flatten_dict(tuned["transformer"])
    for path, leaf in flat.items():
        if path[-1] == "a":
            kernel = (*path[:-1], "kernel")
            params[kernel] += scale * leaf @ flat[*path[:-1], "b"]
        elif path[-1] != "b":
            params[path] = leaf
    return unflatten_dict(params)


@functools.cache
def plain(tuning):
    """(gradient, ratios [s b]) by a loop over single transitions on one device."""
    family, scale = toy.ToyFamily(), LORA["lora__alpha"] / LORA["lora__rank"]
    loss = functools.partial(plain_loss, family.network)
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    tuned, start = jax.device_get(start_of(tuning)), family.params()["transformer"]
    prompts, (_, _, t, sigmas) = sampled()
    total, ratios = [], []
    for step, sigma, sigma_next in zip(range(2), t.sigma, t.sigma_next, strict=True):
        for image in range(8):
            each = [array[step, image] for array in t[:3]]
            sample = (*each, sigma, sigma_next, sigmas[1], ADVANTAGES[image])
            prompt = [part[ROWS[image]][None] for part in prompts.conditioning]
            found, ratio = gradient(tuned, start, scale, sample, prompt, tuple(prompts.null))
            total.append(found)
            ratios.append(float(ratio))
    mean = jax.tree.map(lambda *leaves: sum(np.float64(leaf) for leaf in leaves) / 16, *total)
    return mean, np.array(ratios)


@functools.cache
def start_of(tuning):
    """Tuned parameters at some distance from those that sampled the images."""
    system = toy.system(gradient_config(tuning), devices=1)
    return jax.device_get(toy.moved(system.start, 0.05))


def accumulated(tuning, cut):
    rollout, trainer, devices, chunk, micro = CUTS[cut]
    config = gradient_config(tuning, rollout, trainer, chunk, micro)
    system = toy.system(config, devices)
    state = system.trainer.init(start_of(tuning))
    totals = None
    for train_batch in experiences(system, chunk):
        totals = system.trainer.accumulate(state, system.base, train_batch, totals)
    assert system.trainer._accumulate._cache_size() == 1  # the layout of the totals is stable
    return totals


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_plain_loop_clips_some_ratios_and_not_others(tuning):
    _, ratios = plain(tuning)
    clipped = np.abs(ratios - 1) > CLIP
    assert 2 < clipped.sum() < 14
    assert (ratios < 1 - CLIP).any() and (ratios > 1 + CLIP).any()


@pytest.mark.parametrize(
    ("tuning", "cut"),
    [("full", "4 + 2x2"), ("lora", "2x2 + 1x4")],
)
def test_the_accumulated_gradient_is_the_plain_loops(tuning, cut):
    totals = accumulated(tuning, cut)
    expected, ratios = plain(tuning)
    assert float(totals.sums["weight"]) == 16
    gradient = jax.tree.map(lambda g: g / 16, totals.gradient)
    error = toy.difference(gradient, expected)
    assert error < 1e-5
    assert toy.difference(jax.tree.map(lambda g: 1.01 * g, gradient), expected) > 5e-3
    np.testing.assert_allclose(totals.sums["ratio"], ratios.sum(), rtol=1e-5)
    assert int(totals.sums["clip_fraction"]) == (np.abs(ratios - 1) > CLIP).sum()


def test_devices_that_share_their_images_are_counted_once():
    """Where all parameters are whole the sum is over the devices with other samples, not over the axis tensor."""
    config = gradient_config("lora", (1, 1), (1, 2, 1, 2), 8, 8)
    config.placement.rules = (("text_encoder/", "mlp", "tensor"), (".*", "replicate"))
    system = toy.system(config, 8)
    assert system.placement.trainer.is_replicated((system.start, system.base))
    state = system.trainer.init(start_of("lora"))
    (train_batch,) = experiences(system, 8)
    totals = system.trainer.accumulate(state, system.base, train_batch, None)
    assert float(totals.sums["weight"]) == 16
    gradient = jax.tree.map(lambda g: g / 16, totals.gradient)
    assert toy.difference(gradient, plain("lora")[0]) < 1e-5


# ------------------------------------------------------------------------------ updates

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
    group = dataclasses.replace(system.placement.trainer, layout=Layout(rules))
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


def test_without_an_average_there_is_none():
    state = make_trainer(ema=0.0).init({"kernel": np.ones((2, 2), np.float32)})
    assert state.ema is None


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_what_the_family_never_trains_is_in_no_tree_of_the_state(tuning):
    system = toy.system(gradient_config(tuning, trainer__ema=0.9), devices=1)
    state = system.trainer.init(system.start)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert len(paths) > 10 and not any("places" in path for path in paths)
    places = toy.ToyFamily().params()["transformer"]["places"]
    whole = system.policy.merged(toy.moved(state.tuned), system.base)
    np.testing.assert_array_equal(whole["transformer"]["places"], places)
