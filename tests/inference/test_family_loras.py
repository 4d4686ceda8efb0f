"""LoRAs of each family: saved by PEFT and diffusers, sampled in diffusers' own pipeline and here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import jax
import numpy as np
import peft
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from safetensors.numpy import load_file

from digen_jax.checkpoints.lora import adapted_layers
from digen_jax.checkpoints.lora_files import FILE, read_lora, write_lora
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.inference.model import SamplingOptions, open_model
from digen_jax.models.qwen_image.family import NULL
from tests.cases import said
from tests.models.flux import folders as flux
from tests.models.flux2 import folders as klein
from tests.models.qwen_image import folders as qwen_image

STEPS, TOKENS, SIDE = 3, 512, 16
PROMPTS = ["a photo of a red circle", "two green squares left of it"]


class Case(NamedTuple):
    pipeline: type
    folder: Callable
    without_lora: Callable
    guidance: float | None  # of our sampler
    options: dict[str, Any]  # of diffusers
    latents: Callable
    targets: list[str]  # those of published scripts and adapters


CASES = {
    "flux": Case(
        diffusers.FluxPipeline,
        lambda base: flux.flux_folder(base, "dev"),
        flux.flux_pipeline,
        None,
        {"guidance_scale": 3.5},
        flux.packed,
        ["attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj", "ff_context.net.2"],
    ),
    "klein": Case(
        diffusers.Flux2KleinPipeline,
        klein.klein_folder,
        klein.klein_pipeline,
        None,
        {"guidance_scale": 4.0},
        lambda noise: torch.tensor(noise.transpose(0, 3, 1, 2)),
        [
            *("attn.to_q", "attn.add_k_proj", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
            *("ff.linear_in", "ff_context.linear_out"),
        ],
    ),
    # The layers of verl-project/verl-omni's run_qwen_image_ocr_lora.sh, which are the family's own.
    "qwen_image": Case(
        diffusers.QwenImagePipeline,
        qwen_image.qwen_image_folder,
        qwen_image.qwen_image_pipeline,
        3.0,
        {"true_cfg_scale": 3.0, "negative_prompt": [NULL] * len(PROMPTS)},
        qwen_image.packed,
        [
            *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
            *("to_add_out", "img_mlp.net.0.proj", "img_mlp.net.2"),
            *("txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ],
    ),
}


def by_ours(folder, lora, guidance):
    """Images of PROMPTS and their start noise."""
    model = open_model(str(folder), jax.devices()[:1], str(lora))
    sampler = model.sampler(SamplingOptions(guidance, STEPS, SIDE, SIDE))
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    with jax.default_matmul_precision("highest"):
        prompts = sampler.encode(model.weights, said(*PROMPTS))
        trajectory = sampler.generate(model.weights, prompts, rows, keys)
        images = np.asarray(sampler.decode(model.weights, trajectory))[:, 0]
    return images, np.asarray(start_noise(keys, sampler.shape))


def by_diffusers(pipe, case, noise):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt=PROMPTS,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        max_sequence_length=TOKENS,
        latents=case.latents(noise),
        output_type="np",
        **case.options,
    ).images


@pytest.mark.parametrize(
    "name",
    ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("klein", "qwen_image"))],
)
def test_a_lora_of_peft_gives_the_images_of_diffusers_and_is_written_alike(base, tmp_path, name):
    case = CASES[name]
    folder = case.folder(base)
    pipe = case.pipeline.from_pretrained(folder)
    pipe.transformer.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=case.targets))
    generator = torch.Generator().manual_seed(0)
    for parameter, factor in pipe.transformer.named_parameters():
        if ".lora_" in parameter:
            factor.data = 0.2 * torch.randn(factor.shape, generator=generator)
    case.pipeline.save_lora_weights(
        tmp_path,
        get_peft_model_state_dict(pipe.transformer),
        transformer_lora_adapter_metadata=pipe.transformer.peft_config["default"].to_dict(),
    )
    images, noise = by_ours(folder, tmp_path, case.guidance)
    found = by_diffusers(pipe, case, noise)
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    without = by_diffusers(case.without_lora(folder), case, noise)
    assert (np.abs(found - without).max((1, 2, 3)) > 4 / 255).all()

    family = open_model(str(folder), jax.devices()[:1]).family
    shapes = {"transformer": family.shapes()["transformer"]}
    lora, _, alpha = read_lora(tmp_path, shapes, family.lists)["transformer"]
    write_lora(tmp_path / "again", {"transformer": lora}, alpha, family.lists)
    kept, again = (load_file(one / FILE) for one in (tmp_path, tmp_path / "again"))
    assert kept.keys() == again.keys()
    for tensor, array in kept.items():
        np.testing.assert_array_equal(again[tensor], array, err_msg=tensor)
    if name == "qwen_image":
        modules = pipe.transformer.named_modules()
        layers = {n for n, m in modules if isinstance(m, peft.tuners.lora.LoraLayer)}
        found = adapted_layers(shapes, family.lora_targets, family.lists)
        assert found["transformer"] == layers


@pytest.mark.slow
def test_a_folder_is_sampled_with_the_defaults_of_its_pipeline(base):
    model = open_model(str(klein.klein_folder(base)), jax.devices()[:1])
    assert model.defaults == (1024, 1024, 50, 4.0, 1.0)
    model = open_model(str(qwen_image.qwen_image_folder(base)), jax.devices()[:1])
    assert model.sampler(SamplingOptions(None, STEPS, SIDE, SIDE)).policy.guidance == 4.0
