"""The two experts of Wan 2.2 beside diffusers' pipeline and Wan 2.1, beyond what `test_families.py` compares."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from peft.utils import get_peft_model_state_dict
from safetensors.numpy import load_file

from digen_jax.checkpoints.lora import LoraConfig, adapted_layers, lora_init
from digen_jax.checkpoints.lora_files import FILE, read_lora, write_lora
from digen_jax.config.load import load_config
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.schedule import UniPcConfig
from digen_jax.diffusion.steps import make_step
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import SamplingOptions, all_devices, open_model
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
from tests.models.test_families import close
from tests.models.wan.folders import SCHEDULER, wan_folder
from tests.models.wan.spec import PIPELINE, PIPELINE_EXPERTS
from tests.tiny_runs import tiny_config

PARTS = "transformer", "transformer_2"
LORA = LoraConfig(rank=2, alpha=6, targets=r"blocks\.\d+\.attn1\.to_[qv]")


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


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


# ------------------------------------------------------------------------------ LoRA


def by_diffusers(pipe, x):
    return PIPELINE.call(pipe, PROMPTS, x, guidance_scale=1.0)[0][-1]


def by_ours(ours, lora, scale, x):
    """Latents after all steps, with the LoRA of some or all experts."""
    family, params, encode = ours
    policy = Policy(
        family.scheduled(STEPS, PIPELINE.size), 1.0, dataclasses.replace(LORA, alpha=2 * scale)
    )
    sigmas = jnp.asarray(policy.family.sigmas(STEPS, PIPELINE.size))
    counts = steps_of_experts(policy.family, np.asarray(sigmas))
    prompts, base = encode(params, family.tokenize(said(*PROMPTS))), trained_of(family, params)
    x, i = jnp.asarray(x), 0
    last = policy.family.solver.init_last(x)
    for expert, count in zip(policy.experts, counts, strict=True):
        velocity = jax.jit(
            lambda x, sigma, one=expert: one.velocity(lora, base, prompts, None)(x, sigma)
        )
        for _ in range(count):
            v = velocity(x, jnp.full(3, sigmas[i]))
            x, last = policy.family.solver.advance(x, v, sigmas, i, last)
            i += 1
    return np.moveaxis(np.asarray(x), -1, 1)


def test_loras_of_experts_are_files_that_diffusers_loads_by_a_call_each(ours, folder, tmp_path):
    """Ours in diffusers, and diffusers' in ours; one of the second expert alone has its file alone."""
    family, params, _ = ours
    trained, rng = trained_of(family, params), np.random.default_rng(0)
    start = lora_init(jax.random.key(0), trained, LORA, family.lists)
    lora = jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype("f4"), start)
    for name, parts in (("second", PARTS[1:]), ("ours", PARTS)):
        write_lora(tmp_path / name, {p: lora[p] for p in parts}, LORA.alpha, family.lists)
        places = dict(zip(PARTS, (tmp_path / name, tmp_path / name / PARTS[1]), strict=True))
        assert {p for p in PARTS if (places[p] / FILE).exists()} == {*parts}
        read = read_lora(tmp_path / name, trained, family.lists)
        assert {p: settings for p, (_, *settings) in read.items()} == {p: [2, 6] for p in parts}
        for part in parts:
            jax.tree.map(np.testing.assert_array_equal, read[part][0], lora[part])

    x = rng.normal(size=(3, *family.latent_shape(PIPELINE.size))).astype(np.float32)
    pipe, other = WanPipeline.from_pretrained(folder), WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    other.set_progress_bar_config(disable=True)
    for part in PARTS:
        second = {"load_into_transformer_2": True} if part == "transformer_2" else {}
        pipe.load_lora_weights(places[part], **second)
    plain, expected = by_diffusers(diffusers_pipeline(folder), x), by_diffusers(pipe, x)
    close(by_ours(ours, lora, LORA.scale, x), expected, 1e-4)
    assert np.abs(expected - plain).max() > 0.01 * np.abs(plain).max()

    names = adapted_layers(trained, LORA.targets, family.lists)["transformer"]
    for part in PARTS:
        given = dict(r=2, lora_alpha=6, init_lora_weights=False, target_modules=sorted(names))
        network = getattr(other, part)
        network.add_adapter(peft.LoraConfig(**given))
        WanPipeline.save_lora_weights(
            tmp_path / "theirs" / ("" if part == "transformer" else part),
            transformer_lora_layers=get_peft_model_state_dict(network),
            transformer_lora_adapter_metadata=network.peft_config["default"].to_dict(),
        )
    found = read_lora(tmp_path / "theirs", trained, family.lists)
    read = {part: factors for part, (factors, *_) in found.items()}
    assert found.keys() == {*PARTS}
    close(by_ours(ours, read, 3.0, x), by_diffusers(other, x), 1e-4)
    write_lora(tmp_path / "again", read, 6, family.lists)
    for part in PARTS:
        place = "" if part == "transformer" else part
        kept, again = (load_file(tmp_path / one / place / FILE) for one in ("theirs", "again"))
        assert kept.keys() == again.keys()
        for name, array in kept.items():
            np.testing.assert_array_equal(again[name], array, err_msg=name)


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
    sampler = model.sampler(SamplingOptions())
    found = sample_clips(sampler, model.weights, said(*PROMPTS), 0, 3)
    keys = image_keys(jax.random.key(SEED), np.arange(3), np.zeros(3, int))
    noise = np.asarray(start_noise(keys, sampler.shape))
    call = dict(guidance_scale=3.0, guidance_scale_2=2.0)
    expected = PIPELINE.call(pipe, PROMPTS, noise, **call)[1]
    assert np.abs(found / 255 - expected).max() < 2 / 255
    before = PIPELINE.call(diffusers_pipeline(folder), PROMPTS, noise, **call)[1]
    assert np.abs(expected - before).max() > 5 / 255
