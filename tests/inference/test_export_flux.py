"""Runs that tune FLUX.1: their files in diffusers' own pipeline, and what their steps report."""

import functools

import jax
import numpy as np
import peft
import pytest
import torch
from diffusers import FluxPipeline
from ml_collections import ConfigDict

from digen_jax.config.door import open_recipe
from digen_jax.flow.sampling import image_keys, start_noise
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import open_model
from digen_jax.records.metrics import read_metrics
from digen_jax.train import train
from tests.cases import said
from tests.models.flux.folders import flux_folder, flux_pipeline, packed
from tests.tiny_runs import once, tiny_config

STEPS, TOKENS, SIDE = 3, 21, 16
SAID = ["a photo of a red circle", "two green squares"]
TARGETS = ["attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj", "ff_context.net.2"]
GUIDANCE = 3.5


def trained(base):
    """The workdir of two steps with a LoRA on the family's own layers."""
    config = tiny_config(base, "lora")
    config.model.update(
        folder=str(flux_folder(base, "dev")), height=SIDE, width=SIDE, max_sequence_length=TOKENS
    )
    config.evaluation.batch = len(SAID)  # the same program decodes the images of `by_ours`
    config.sampler.guidance = config.evaluation.guidance = GUIDANCE
    config.lora = ConfigDict(dict(rank=4, alpha=8.0))
    config.reward_pool = ConfigDict(dict(processes=0))
    return once(base / "tiny-flux-run", functools.partial(train, open_recipe(config)))


def by_ours(name, lora=None):
    """Images of SAID by a run's newest weights, or a folder's, and their start noise."""
    model = open_model(str(name), jax.devices()[:1], lora)
    sampler = model.sampler(None, STEPS, SIDE, SIDE)
    rows = np.arange(len(SAID), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    with jax.default_matmul_precision("highest"):
        prompts = sampler.encode(model.weights, said(*SAID))
        trajectory = sampler.generate(model.weights, prompts, rows, keys)
        images = np.asarray(sampler.decode(model.weights, trajectory))[:, 0]
    return images, np.asarray(start_noise(keys, sampler.shape))


def by_diffusers(pipe, noise, tokens=TOKENS):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        SAID,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        max_sequence_length=tokens,
        latents=packed(noise),
        output_type="np",
    ).images


@pytest.mark.slow
def test_an_exported_run_gives_its_images_in_diffusers(base, tmp_path):
    folder, workdir = flux_folder(base, "dev"), trained(base)
    images, noise = by_ours(workdir)
    run = export(workdir, tmp_path / "tuned")
    assert "FluxPipeline.from_pretrained" in how_to_load(run, tmp_path / "tuned")
    before = by_diffusers(flux_pipeline(folder), noise)
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.load_lora_weights(tmp_path / "tuned")
    found = by_diffusers(pipe, noise)
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    assert (np.abs(found - before).max((1, 2, 3)) > 4 / 255).all()


def test_a_lora_that_peft_made_gives_its_images_here(base, tmp_path):
    """On the layers of the published scripts, read from diffusers' file and merged; the T5 has its 512 tokens."""
    folder = flux_folder(base, "dev")
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.transformer.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    factors = {n: p for n, p in pipe.transformer.named_parameters() if ".lora_" in n}
    generator = torch.Generator().manual_seed(0)
    for factor in factors.values():
        factor.data = 0.2 * torch.randn(factor.shape, generator=generator)
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    metadata = {"r": 3, "lora_alpha": 6, "target_modules": TARGETS}
    FluxPipeline.save_lora_weights(tmp_path, layers, transformer_lora_adapter_metadata=metadata)
    images, noise = by_ours(folder, str(tmp_path))
    found = by_diffusers(pipe, noise, 512)
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    without = by_diffusers(flux_pipeline(folder), noise, 512)
    assert (np.abs(found - without).max((1, 2, 3)) > 4 / 255).all()


@pytest.mark.slow
def test_ratios_are_one_at_the_weights_that_sampled(base):
    """With dev's guidance, which sampling and training are given."""
    lines = read_metrics(trained(base) / "metrics.jsonl")
    first = next(line for line in lines if "ratio" in line)
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["gradient_norm"] > 0
