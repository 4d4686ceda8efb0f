"""LoRAs of FLUX.1 in diffusers' own pipeline and here."""

import jax
import numpy as np
import peft
import torch
from diffusers import FluxPipeline

from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.inference.model import open_model
from tests.cases import said
from tests.inference.test_export_klein import assert_written_alike
from tests.models.flux.folders import flux_folder, flux_pipeline, packed

STEPS, TOKENS, SIDE = 3, 21, 16
SAID = ["a photo of a red circle", "two green squares"]
TARGETS = ["attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj", "ff_context.net.2"]
GUIDANCE = 3.5


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
    assert_written_alike(open_model(str(folder), jax.devices()[:1]).family, tmp_path)
