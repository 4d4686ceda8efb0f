"""LoRAs of Qwen-Image in diffusers' own pipeline and here."""

import jax
import numpy as np
import peft
import pytest
import torch
from diffusers import QwenImagePipeline
from peft.utils import get_peft_model_state_dict

from digen_jax.checkpoints.lora import adapted_layers
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.inference.model import open_model
from digen_jax.models.qwen_image.family import NULL
from tests.cases import said
from tests.inference.test_export_klein import assert_written_alike
from tests.models.qwen_image.folders import packed, qwen_image_folder, qwen_image_pipeline

pytestmark = pytest.mark.slow

STEPS, TOKENS, SIDE, GUIDANCE = 3, 21, 16, 3.0
SAID = ["a photo of a red circle", "two green squares left of it"]
# What verl-project/verl-omni's run_qwen_image_ocr_lora.sh gives to PEFT.
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
TARGETS += ["to_add_out", "img_mlp.net.0.proj", "img_mlp.net.2"]
TARGETS += ["txt_mlp.net.0.proj", "txt_mlp.net.2"]


def by_ours(name, lora=None):
    """Images of SAID by a run's newest weights, or a folder's, and their start noise."""
    model = open_model(str(name), jax.devices()[:1], lora)
    sampler = model.sampler(GUIDANCE, STEPS, SIDE, SIDE)
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
        negative_prompt=[NULL] * len(SAID),
        true_cfg_scale=GUIDANCE,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        max_sequence_length=tokens,
        latents=packed(noise),
        output_type="np",
    ).images


def test_a_lora_that_peft_made_gives_its_images_here(base, tmp_path):
    """On the layers of the published script, read from diffusers' file and merged; prompts have their 512 tokens."""
    folder = qwen_image_folder(base)
    pipe = QwenImagePipeline.from_pretrained(folder)
    pipe.transformer.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    factors = {n: p for n, p in pipe.transformer.named_parameters() if ".lora_" in n}
    generator = torch.Generator().manual_seed(0)
    for factor in factors.values():
        factor.data = 0.2 * torch.randn(factor.shape, generator=generator)
    QwenImagePipeline.save_lora_weights(
        tmp_path,
        get_peft_model_state_dict(pipe.transformer),
        transformer_lora_adapter_metadata=pipe.transformer.peft_config["default"].to_dict(),
    )
    images, noise = by_ours(folder, str(tmp_path))
    found = by_diffusers(pipe, noise, 512)
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    without = by_diffusers(qwen_image_pipeline(folder), noise, 512)
    assert (np.abs(found - without).max((1, 2, 3)) > 4 / 255).all()
    family = open_model(str(folder), jax.devices()[:1]).family
    layers = {
        name
        for name, module in pipe.transformer.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert_written_alike(family, tmp_path)
    trained = {"transformer": family.shapes()["transformer"]}
    assert adapted_layers(trained, family.lora_targets, family.lists)["transformer"] == layers


def test_a_folder_is_sampled_by_its_familys_guidance(base):
    model = open_model(str(qwen_image_folder(base)), jax.devices()[:1])
    assert model.sampler(None, STEPS, SIDE, SIDE).policy.guidance == 4.0
