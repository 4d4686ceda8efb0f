"""LoRAs of FLUX.2 klein in diffusers' own pipeline and here."""

import jax
import numpy as np
import peft
import pytest
import torch
from diffusers import Flux2KleinPipeline
from safetensors.numpy import load_file

from digen_jax.checkpoints.lora_files import FILE, read_lora, write_lora
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.inference.model import open_model
from tests.cases import said
from tests.models.flux2.folders import klein_folder, klein_pipeline

pytestmark = pytest.mark.slow

STEPS, TOKENS, SIDE = 3, 21, 16
SAID = ["a photo of a red circle", "two blue squares"]
TARGETS = ["attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.linear_in", "ff_context.linear_out"]
TARGETS += ["attn.to_qkv_mlp_proj"]
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


def by_diffusers(pipe, noise, guidance, tokens=TOKENS):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt=SAID,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        max_sequence_length=tokens,
        latents=torch.tensor(noise.transpose(0, 3, 1, 2)),
        output_type="np",
    ).images


def test_a_lora_that_peft_made_gives_its_images_here(base, tmp_path):
    """On layers of the published adapter, read from diffusers' file, written, and merged; prompts have 512 tokens."""
    folder = klein_folder(base)
    pipe = Flux2KleinPipeline.from_pretrained(folder)
    pipe.transformer.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    factors = {n: p for n, p in pipe.transformer.named_parameters() if ".lora_" in n}
    generator = torch.Generator().manual_seed(0)
    for factor in factors.values():
        factor.data = 0.2 * torch.randn(factor.shape, generator=generator)
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    metadata = {"r": 3, "lora_alpha": 6, "target_modules": TARGETS}
    Flux2KleinPipeline.save_lora_weights(
        tmp_path, layers, transformer_lora_adapter_metadata=metadata
    )
    images, noise = by_ours(folder, str(tmp_path))
    found = by_diffusers(pipe, noise, 4.0, 512)
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    without = by_diffusers(klein_pipeline(folder), noise, 4.0, 512)
    assert (np.abs(found - without).max((1, 2, 3)) > 4 / 255).all()
    assert_written_alike(open_model(str(folder), jax.devices()[:1]).family, tmp_path)


def assert_written_alike(family, folder):
    """What is read of a LoRA's file and written again has its names and tensors."""
    shapes = {"transformer": family.shapes()["transformer"]}
    lora, _, alpha = read_lora(folder, shapes, family.lists)["transformer"]
    write_lora(folder / "again", {"transformer": lora}, alpha, family.lists)
    kept, again = (load_file(one / FILE) for one in (folder, folder / "again"))
    assert kept.keys() == again.keys()
    for name, tensor in kept.items():
        np.testing.assert_array_equal(again[name], tensor, err_msg=name)


def test_a_folder_is_sampled_by_its_pipelines_defaults(base):
    model = open_model(str(klein_folder(base)), jax.devices()[:1])
    assert model.defaults == (1024, 1024, 50, 4.0, 1.0)
