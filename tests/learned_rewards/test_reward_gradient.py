"""Gradients of rewards through sampling steps and the decoder, against torch's autograd."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from digen_jax import assemble
from digen_jax.config.load import complete, fit_config, load_config
from digen_jax.diffusion.sampling import image_keys
from digen_jax.errors import ConfigError
from digen_jax.parallel.accumulate import trained_part
from digen_jax.parallel.system import SampledImages, make_train_batch
from digen_jax.planning.memory import stored_bytes
from digen_jax.planning.programs import trace_gradient
from digen_jax.train import train
from tests.learned_rewards.test_scores import normalised
from tests.metrics import metrics
from tests.models import parity
from tests.tiny_runs import TARGETS, oracle, pipeline, tiny_config

pytestmark = pytest.mark.usefixtures("exact_and_split")
STEPS, KEPT, KL, WEIGHT = 4, 2, 0.3, 0.25
ROWS = np.array([0, 0, 1, 1], np.int32)
RECORDS = [{"prompt": "a photo of a red circle"}, {"prompt": "a photo of two blue stars"}]


def config(base, files, **fields):
    """Two steps of a gradient through two of four sampling steps, of two rewards."""
    c = tiny_config(base, "full")
    clip = str(files.clip)
    c.rewards = (
        dict(name="pickscore", settings=dict(folder=clip)),
        dict(name="aesthetic", weight=WEIGHT, settings=dict(folder=clip, head=str(files.head))),
    )
    c.algorithm = dict(name="reward_gradient", gradient_steps=KEPT, kl_coefficient=KL)
    c.sampler = dict(steps=STEPS, kind="ode", noise_level=0.0, guidance=1.0, chunk=4)
    c.sampler["window"] = dict(length=0)
    c.trainer = dict(micro_batch=2, learning_rate=1e-3)
    c.evaluation.guidance = 1.0
    for name, value in fields.items():
        section, _, field = name.partition("__")
        if field:
            c[section][field] = value
        else:
            c[section] = value
    return c


def system_of(c, devices: int = 1):
    found = fit_config(load_config(c), devices)
    return found, assemble.build(found, jax.devices()[:devices])


def sampled(system):
    """A chunk of four images of two prompts, and its prompts."""
    sampler, weights = system.sampler, system.rollout_weights(system.start)
    prompts = sampler.encode(weights, RECORDS)
    keys = image_keys(jax.random.key(3), ROWS, np.arange(4) % 2)
    trajectory = sampler.generate(weights, prompts, ROWS, keys)
    return (
        prompts,
        trajectory,
        SampledImages(0, ROWS, trained_part(trajectory, keys), trajectory.sigmas),
    )


def gradient(system, prompts, images, tuned, weight=None):
    """Means of the terms and their gradient."""
    batch = make_train_batch(system, prompts, images, np.zeros(4), weight, RECORDS)
    totals = system.trainer.accumulate(system.trainer.init(tuned), system.base, batch, None)
    count = float(totals.sums["weight"])
    means = {name: float(total) / count for name, total in totals.sums.items()}
    return means, jax.tree.map(lambda g: np.asarray(g) / count, totals.gradient)


# ------------------------------------------------------------------------------------------- torch


def scores_of(files, pixels, prompts):
    """PickScore and a quarter of the aesthetic score of pixels in [0, 1], without rounding."""
    import transformers

    resize = torch.nn.functional.interpolate
    small = resize(pixels, size=24, mode="bicubic", antialias=True, align_corners=False)
    embedding = files.clip_module.get_image_features(normalised(small.clamp(0, 1))).pooler_output
    tokenizer = transformers.CLIPTokenizer.from_pretrained(files.clip)
    ids = tokenizer(prompts, padding="max_length", truncation=True, max_length=12)
    ids = torch.tensor(ids["input_ids"])
    text = files.clip_module.get_text_features(input_ids=ids).pooler_output
    image, text = (x / x.norm(dim=-1, keepdim=True) for x in (embedding, text))
    pick = files.clip_module.logit_scale.exp() * (text * image).sum(-1) / 26
    return pick + WEIGHT * files.head_module(image)[:, 0]


def by_torch(base, files, network, start, sigmas):
    """(mean terms, gradient by tensor) of a network, by diffusers' modules and autograd."""
    pipe, prompts = oracle(pipeline(base)), [RECORDS[row]["prompt"] for row in ROWS]
    context, _, pooled, _ = pipe.encode_prompt(
        prompts, prompts, prompts, do_classifier_free_guidance=False
    )

    def velocity(module, x, sigma):
        return module(x, context, pooled, torch.full((len(x),), 1000.0 * sigma)).sample

    x = torch.tensor(np.asarray(start)).permute(0, 3, 1, 2)
    kl = torch.zeros(len(x))
    for sigma, following in itertools.pairwise(sigmas):
        v = velocity(network, x, sigma)
        with torch.no_grad():
            fixed = velocity(pipe.transformer, x, sigma)
        kl = kl + ((v - fixed) ** 2).mean((1, 2, 3)) / (2 * sigma**2) / (len(sigmas) - 1)
        x = x + (following - sigma) * v
    settings = pipe.vae.config
    raw = x / settings.scaling_factor + settings.shift_factor
    pixels = (pipe.vae.decode(raw).sample / 2 + 0.5).clamp(0, 1)
    reward = scores_of(files, pixels, prompts)
    loss = (KL * kl - reward).mean()
    network.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in network.named_parameters()}
    terms = dict(loss=loss, trained_reward=reward.mean(), kl=kl.mean())
    return {name: value.item() for name, value in terms.items()}, grads


@pytest.fixture(scope="module")
def compared(base, files):
    """Ours and torch's, for parameters that differ from the reference's."""
    found, system = system_of(config(base, files))
    prompts, trajectory, images = sampled(system)
    original = oracle(pipeline(base)).transformer
    network = copy.deepcopy(original)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.01 * parameter.std(unbiased=False) * noise
    lists = system.policy.family.lists["transformer"]
    state = dict(network.named_parameters())  # without the positions, which are never trained
    tuned = {"transformer": parity.to_flax(state, system.start["transformer"], lists)}
    sigmas = [float(sigma) for sigma in trajectory.sigmas[-1 - KEPT :]]

    def torchs(start, sigmas):
        terms, gradients = by_torch(base, files, network, start, sigmas)
        return terms, {"transformer": parity.to_flax(gradients, tuned["transformer"], lists)}

    expected = torchs(trajectory.stored[:, 0], sigmas)
    return found, system, prompts, images, tuned, trajectory, expected, torchs


def test_the_gradient_is_torchs(compared):
    _, system, prompts, images, tuned, _, (terms, expected), _ = compared
    means, found = gradient(system, prompts, images, tuned)
    assert means == pytest.approx(terms | {"weight": 1.0}, rel=1e-4)
    assert terms["kl"] > 1e-4
    error, path = parity.worst(found, expected, whole=True)
    assert error < 1e-3, path


def test_excluded_images_have_no_gradient(compared):
    """Not even if their latents are not finite."""
    _, system, prompts, images, tuned, *_ = compared
    weight = np.array([1, 0, 0, 1], np.float32)
    half, expected = gradient(system, prompts, images, tuned, weight)
    samples = images.samples._replace(x0=images.samples.x0.at[1].set(np.nan))
    again, found = gradient(system, prompts, images._replace(samples=samples), tuned, weight)
    assert half == again and half["loss"] != gradient(system, prompts, images, tuned)[0]["loss"]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_stored_latents_lead_to_the_sampled_images(compared):
    """Two Euler steps further are the trajectory's last latents."""
    _, system, prompts, _, _, trajectory, *_ = compared
    weights, conditioning = system.rollout_weights(system.start), prompts.at(jnp.asarray(ROWS))
    velocity = system.policy.velocity(weights.tuned, weights.base, *conditioning)
    x, sigmas = trajectory.stored[:, 0], trajectory.sigmas[-1 - KEPT :]
    for sigma, following in itertools.pairwise(sigmas):
        x = x + (following - sigma) * velocity(x, jnp.full(4, sigma))
    np.testing.assert_allclose(x, trajectory.latents, atol=1e-4)


@pytest.mark.slow
def test_a_predicted_image_has_torchs_gradient(base, files, compared):
    """ReFL at the last step; the surrogates are compared with the authors' code in tests/algorithms."""
    *_, tuned, _, _, torchs = compared
    algorithm = dict(name="refl", last_steps=1, kl_coefficient=KL)
    _, system = system_of(config(base, files, algorithm=algorithm))
    prompts, trajectory, images = sampled(system)
    assert images.samples.x0.shape[:2] == (4, STEPS + 1)
    np.testing.assert_array_equal(images.samples.x0[:, -1], trajectory.latents)
    sigmas = [float(sigma) for sigma in trajectory.sigmas[-2:]]
    terms, expected = torchs(images.samples.x0[:, -2], sigmas)
    means, found = gradient(system, prompts, images, tuned)
    assert means == pytest.approx(terms | {"weight": 1.0}, rel=1e-4)
    error, path = parity.worst(found, expected, whole=True)
    assert error < 1e-3, path


@pytest.mark.slow
def test_the_gradient_is_that_of_one_device(base, files, compared):
    _, alone, prompts, images, tuned, *_ = compared
    expected_means, expected = gradient(alone, prompts, images, tuned)
    rules = ((".*", "fsdp"),)
    placement = dict(rollout=dict(data=0), trainer=dict(data=2, fsdp=2), rules=rules)
    _, system = system_of(config(base, files, placement=placement, trainer__micro_batch=4), 4)
    split = jax.device_get((prompts, images.samples, images.sigmas))
    moved = images._replace(samples=split[1], sigmas=split[2])
    means, found = gradient(system, split[0], moved, tuned)
    assert means == pytest.approx(expected_means, rel=1e-4)
    assert parity.worst(found, expected, whole=True)[0] < 1e-4


# -------------------------------------------------------------------------------------------- runs


ALGORITHMS = {  # with the number of latents that are stored for an image
    "reward_gradient": (dict(gradient_steps=KEPT), 1),
    "flowbp_bridge": (dict(gradient_steps=3, detach_unconditional=True), STEPS + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_differentiates_the_reward_that_it_reports(base, files, tmp_path, monkeypatch, name):
    """Without rounding to bytes. A planner's program has the shapes of the run's."""
    fields, stored = ALGORITHMS[name]
    # Random weights do not pass them.
    monkeypatch.setattr("digen_jax.runtime.sampling.run_sanity_checks", lambda *_: None)
    algorithm = dict(name=name, kl_coefficient=KL, **fields)
    lora = dict(rank=4, alpha=8.0, targets=TARGETS)
    c = config(base, files, algorithm=algorithm, lora=lora, sampler__guidance=2.0)
    found = fit_config(load_config(c), 1)
    outline = assemble.outline(found, jax.devices()[:1])
    assert trace_gradient(outline, found, 4).out_info.gradient is not None
    latent = outline.policy.family.latent_shape(found.model.size)
    assert stored_bytes(found, latent) == 4 * (stored * np.prod(latent) + 2)
    train(found, tmp_path / "run")
    lines = [line for line in metrics(tmp_path / "run") if "trained_reward" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["trained_reward"] == pytest.approx(line["reward"], abs=0.02)
        assert line["gradient_norm"] > 0
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-9) and lines[1]["kl"] > 0


@pytest.mark.slow
def test_without_files_the_published_reward_is_planned_with(base, files):
    c = config(base, files, rewards=(dict(name="pickscore", settings=dict(folder="o/x")),))
    found = fit_config(load_config(c), 1)
    outline = assemble.outline(found, jax.devices()[:1])
    assert trace_gradient(outline, found, 4).out_info.gradient is not None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(rewards=("jpeg_compressibility",)), "jpeg_compressibility', has no gradient"),
        (dict(sampler__kind="dpm2"), "config.sampler.kind is 'dpm2': set that to 'ode'"),
        (dict(algorithm__gradient_steps=5), "gradient_steps = 5 is more than"),
        (dict(algorithm=dict(name="refl")), "last_steps = 11 is more than"),
        (dict(algorithm=dict(name="flowbp_bridge")), "gradient_steps = 5 is more than"),
        (dict(algorithm=dict(name="leap_align"), sampler__steps=1), "steps is 1: set that to 2"),
        (dict(advantages=dict(drop_zero_std=True)), "drop_zero_std = True selects some"),
        (dict(advantages=dict(best_and_worst=1)), "best_and_worst = 1 selects some"),
        (dict(model__frames=5), "not of clips"),
        (dict(runtime=dict(max_incomplete_groups=1)), "is for losses of policy_gradient"),
    ],
)
def test_invalid_settings_are_named(base, files, fields, words):
    with pytest.raises(ConfigError, match=words):
        load_config(complete(config(base, files, **fields)))
