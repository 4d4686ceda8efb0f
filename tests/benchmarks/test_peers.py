"""Our step against the eager loop of torch and diffusers: that both do the same, and only quiet rounds count."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch

from benchmarks.eager import EagerLoop, write_wide
from benchmarks.peers import Ours, PeerComparison, Round, check, coefficients
from benchmarks.processes import Load, Reading, Seconds, load_between
from digen_jax.config.load import load_config
from digen_jax.diffusion.steps import make_step
from digen_jax.errors import ConfigError
from digen_jax.parallel.placement import ONE_DEVICE
from tests.tiny_runs import pipeline, tiny_config


def alone(config):
    """A recipe on one device."""
    config.algorithm.old_log_probs = "rollout"
    return load_config(config).with_meshes(ONE_DEVICE)


def ours_of(config):
    return Ours(alone(config), jax.devices()[:1])


def round_of(ours, other, others=0.0):
    times = {
        "sampling": {"ours": Seconds(ours, ours), "eager": Seconds(other, 3 * other)},
        "training": {"ours": Seconds(2 * ours, ours), "eager": Seconds(3 * other, other)},
    }
    return Round(Load(others, 0.0), times)


def test_only_quiet_rounds_have_a_ratio():
    loud = PeerComparison(1, 0.0, (round_of(1.0, 1.0, 0.5),))
    assert loud.ratio("sampling") is None and loud.ratio("sampling", "cpu") == 3
    loud.describe(), loud.rounds[0].describe()
    rounds = round_of(1.0, 2.0), round_of(1.0, 50.0, 0.5), round_of(1.0, 4.0), round_of(2.0, 6.0)
    some = PeerComparison(1, 0.0, rounds)
    assert some.ratio("sampling") == 3
    assert some.ratio("training") == 4.5
    assert some.ratio("step") == 4
    assert "training      2.00 s   12.00 s   4.50x" in some.describe()
    json.dumps(some.as_json())


@pytest.mark.parametrize("kind", ["cps", "flow", "dance"])
def test_every_kind_of_step_is_a_sum(kind):
    sigmas = np.linspace(1, 0, 6, dtype=np.float32)
    step = make_step(kind, 0.7)
    of_x, of_v, std = coefficients(step, sigmas, slice(1, 4))
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 3, 4)).astype(np.float32)
    for i in range(5):
        mean = of_x[i] * x + of_v[i] * v
        if 1 <= i < 4:
            expected, deviation = step.mean_std(x, v, sigmas[i], sigmas[i + 1], sigmas[1])
        else:
            expected, deviation = x + (sigmas[i + 1] - sigmas[i]) * v, 0
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(std[i], deviation, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_eager_loop_has_the_same_gradient(base):
    config = tiny_config(base, "full")
    config.sampler.update(dict(guidance=2.0, kind="dance"))
    config.trainer.update(dict(micro_batch=4, pack=2, ema=0.0, clip_norm=1e9))
    ours = ours_of(config)
    work = dataclasses.replace(ours.work(), empty=256, threads=1)
    loop = EagerLoop(work)
    assert loop.parameters() == ours.parameters()
    loop.optimizer.step = lambda: None

    ours.sample()
    (images,) = ours.chunks
    kept = [np.asarray(a) for a in (images.samples.x, images.samples.x_next)]
    x, x_next = (torch.from_numpy(np.moveaxis(a, -1, 2).copy()) for a in kept)
    old = np.array(images.samples.log_prob)
    # Only the eager loop leaves out the normaliser.
    old += (np.log(work.std[:2]) + 0.5 * np.log(2 * np.pi))[:, None]
    loop.chunks = [(torch.from_numpy(images.rows).long(), x, x_next, torch.from_numpy(old))]
    loop.train()

    # Ratios are 1 but for rounding, and within the clip range: so this compares the replayed transitions, too.
    gradient = ours.accumulate(images).gradient["transformer"]["proj_out"]["kernel"]
    expected = np.asarray(gradient) / (2 * len(images.rows))
    np.testing.assert_allclose(
        loop.model.proj_out.weight.grad.T, expected, atol=1e-3 * np.abs(expected).max()
    )


@pytest.mark.slow
def test_a_wide_model_is_that_of_diffusers(base, tmp_path):
    write_wide(tmp_path, pipeline(base), 3, heads=4, channels=16)
    config = tiny_config(base, "lora")
    config.model.folder = str(tmp_path)
    ours = ours_of(config)
    assert ours.system.policy.family.transformer.config.dim == 64
    work = dataclasses.replace(ours.work(), threads=1)
    x = np.random.default_rng(0).standard_normal((2, *work.latent), np.float32)
    sigma, rows = np.float32([1, 0.3]), np.int32([0, 1])
    expected = EagerLoop(work).velocity(x, sigma, rows, 256)
    assert np.abs(expected).max() > 0.1
    distance = np.abs(ours.velocity(x, sigma, rows) - expected).max()
    assert distance < 1e-4 * np.abs(expected).max()


def test_what_the_eager_loop_does_not_do_is_refused(base):
    config = tiny_config(base, "full")
    config.algorithm.kl_coefficient = 0.1
    with pytest.raises(ConfigError, match=r"config\.algorithm\.kl_coefficient"):
        check(load_config(config), 1)


def test_only_time_of_other_processes_counts():
    before, after = Reading(10.0, 4.6, 0.4), Reading(15.0, 10.9, 0.9)
    load = load_between(before, after, 5.8, 2)
    assert load.others == pytest.approx((6.3 - 5.8) / 10)
    assert load.stolen == pytest.approx(0.5 / 10) and not load.quiet
    assert load_between(before, after, 9, 2).others == 0
    assert Load(0.02, 0.01).quiet and not Load(0.02, 0.02).quiet
