"""The two experts of Wan 2.2 beside diffusers' pipeline and Wan 2.1, beyond what `test_families.py` compares."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from diffusers import UniPCMultistepScheduler

from digen_jax.checkpoints.lora import LoraConfig
from digen_jax.config.load import load_config
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.schedule import UniPcConfig
from digen_jax.diffusion.steps import make_step
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import all_devices, open_model
from digen_jax.inference.sampling import sample_clips
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import (
    SEED,
    Sampler,
    SamplerSettings,
    Weights,
    steps_of_experts,
)
from digen_jax.policies import trained_of
from digen_jax.train import train
from tests.cases import quick, said
from tests.models.families import PROMPTS, STEPS, diffusers_pipeline
from tests.models.wan.folders import SCHEDULER, wan_folder
from tests.models.wan.spec import PIPELINE, PIPELINE_EXPERTS
from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures("exact")
PARTS = "transformer", "transformer_2"
LORA = LoraConfig(rank=2, alpha=6, targets=r"blocks\.\d+\.attn1\.to_[qv]")


@pytest.fixture(scope="module")
def folder(base):
    return wan_folder(base, "experts")


@pytest.fixture(scope="module")
def ours(folder):
    return PIPELINE_EXPERTS.ours(folder)


# ------------------------------------------------------------------------------ the boundary


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
def test_experts_change_at_diffusers_step(ours, shift):
    """At times without their fraction: where a boundary lies between a time and its fraction, it matters."""
    family = dataclasses.replace(ours[0], scheduler=UniPcConfig(shift))
    scheduler, fractions = UniPCMultistepScheduler(**SCHEDULER | dict(flow_shift=shift)), 0
    for steps in (*range(1, 21), 30, 40, 50, 100):
        scheduler.set_timesteps(steps)
        scheduled = family.scheduled(steps, PIPELINE.size)
        sigmas = scheduled.sigmas(steps, PIPELINE.size)
        for ratio in (0.875, 0.9, 0.9001, 0.417, 0.999):  # Wan 2.2's, and others
            high = int((scheduler.timesteps >= ratio * 1000).sum())
            one = dataclasses.replace(scheduled, boundary_ratio=ratio)
            assert steps_of_experts(one, sigmas) == (high, steps - high)
            if ratio == 0.9001:
                fractions += int((1000 * sigmas[:-1] >= ratio * 1000).sum()) != high
    assert fractions


# ------------------------------------------------------------------------------ Wan 2.1


@pytest.mark.parametrize(("kind", "lora"), quick([("solver", None), ("flow", LORA)], 1))
def test_equal_experts_give_the_results_of_wan_2_1_bit_for_bit(ours, kind, lora):
    """Latents, and in a window across the boundary transitions with their log-probabilities."""
    family, params, _ = ours
    single = dataclasses.replace(family, transformer_2=None, boundary_ratio=0.0)
    params = dict(params) | {"transformer_2": params["transformer"]}
    noisy = make_step("flow", 0.7), 3
    step, length = noisy if kind == "flow" else (family.solver, 0)
    prompts, keys = (
        said(*PROMPTS[:2]),
        image_keys(jax.random.key(3), np.arange(2), np.zeros(2, int)),
    )
    found = []
    for one in (family, single):
        policy = Policy(one, 4.0, lora)
        settings = SamplerSettings(PIPELINE.size, STEPS, step, length)
        sampler = Sampler(policy, all_devices(jax.devices()[:1]), settings)
        parts = policy.split(jax.random.key(0), trained_of(one, params), reference=False)
        if lora:
            moved = jax.tree.map(lambda leaf: leaf + 0.1, parts[0]["transformer"])
            parts = dict.fromkeys(one.trained, moved), parts[1]
        weights = Weights(*parts, params)
        rows = np.arange(2, dtype=np.int32)
        found.append(sampler.generate(weights, sampler.encode(weights, prompts), rows, keys))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert np.isfinite(found[0].latents).all()


# ------------------------------------------------------------------------------ runs


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_export_of_a_run_samples_in_diffusers_as_here(base, folder, tmp_path, lora):
    """A window across the boundary moves both experts; the exported pipeline or LoRA has their weights."""
    c = tiny_config(base, "lora" if lora else "full")
    c.model = dict(folder=str(folder), height=16, width=32, frames=5, max_sequence_length=21)
    c.sampler.guidance, c.sampler.guidance_2, c.sampler.kind = 3.0, 2.0, "flow"
    c.sampler.window = dict(first=0, length=2)
    c.evaluation.guidance, c.evaluation.guidance_2, c.evaluation.steps = 3.0, 2.0, STEPS
    c.rewards, c.trainer.ema = ("tests.tiny_runs:redness",), 0.0
    if lora:
        c.lora = dict(rank=4, alpha=8.0)
    train(load_config(c), tmp_path / "run")
    run = export(tmp_path / "run", tmp_path / "out")
    assert {*run.tuned} == {*PARTS}
    if not lora:
        saved = json.loads((tmp_path / "out" / "sampling.json").read_text())
        assert saved == {"steps": STEPS, "guidance": 3.0, "guidance_2": 2.0}
    scope: dict = {}
    exec(how_to_load(run, tmp_path / "out"), scope)
    pipe = scope["pipe"]
    pipe.set_progress_bar_config(disable=True)
    model = open_model(str(tmp_path / "run"), jax.devices()[:1])
    sampler = model.sampler()
    found = sample_clips(sampler, model.weights, said(*PROMPTS), 0, 3)
    keys = image_keys(jax.random.key(SEED), np.arange(3), np.zeros(3, int))
    noise = np.asarray(start_noise(keys, sampler.shape))
    call = dict(guidance_scale=3.0, guidance_scale_2=2.0)
    expected = PIPELINE.call(pipe, PROMPTS, noise, **call)[1]
    assert np.abs(found / 255 - expected).max() < 2 / 255
    before = PIPELINE.call(diffusers_pipeline(folder), PROMPTS, noise, **call)[1]
    assert np.abs(expected - before).max() > 5 / 255
