"""Tiny pipeline folders of all families with random weights, made by diffusers and transformers.

Test processes share the folders. Each writer builds the pipeline of a family.
"""

import functools
import json
import pathlib
import shutil
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler

from digen_jax.models.qwen_image.edit import QwenImageEdit
from digen_jax.models.qwen_image.family import QwenImage
from examples.shapes.networks import build_clip_tokenizer
from tests.models.parity import randomise
from tests.models.sd3.t5_folders import tiny_t5, vocabulary, write_tokenizer
from tests.models.text import tiny_tokenizer
from tests.tiny_runs import once

CHANNELS = 4  # of the latents


def autoencoder(scaling_factor: float) -> diffusers.AutoencoderKL:
    """A random autoencoder of two resolutions, as FLUX.1 and Z-Image have it."""
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        scaling_factor=scaling_factor,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return randomise(vae, seed=1)


def qwen_tokenizer(folder: pathlib.Path, **options: Any) -> Any:
    """A tokenizer like Qwen's; `options` are those of `tiny_tokenizer.save`."""
    saved = tiny_tokenizer.save(folder / "tokenizer", **options)
    return transformers.AutoTokenizer.from_pretrained(saved)


# ------------------------------------------------------------------------------------------ FLUX.1

WORDS = [
    "a photo of a red circle",
    "two blue squares and schräge ☃",
    "a green star above a yellow triangle",
    "four shapes",
    "a blue star two green squares",
]
CONTEXT, POOLED = 16, 12
FLUX = dict(in_channels=4 * CHANNELS, num_layers=2, num_single_layers=2, attention_head_dim=8)
FLUX |= dict(num_attention_heads=4, joint_attention_dim=CONTEXT, pooled_projection_dim=POOLED)
FLUX |= dict(axes_dims_rope=(2, 2, 4))
FLUX_SHIFTS = {
    "dev": dict(shift=3.0, use_dynamic_shifting=True),
    "schnell": dict(shift=1.0, use_dynamic_shifting=False),
}


def flux_folder(base: pathlib.Path, kind: str) -> pathlib.Path:
    """The folder of "dev" or "schnell"."""
    return once(base / f"tiny-flux-{kind}", functools.partial(_write_flux, kind))


def _write_flux(kind: str, folder: pathlib.Path) -> None:
    tokenizer = build_clip_tokenizer(WORDS, 20)
    tokens = write_tokenizer(folder / "tokenizer_2", vocabulary(WORDS))
    clip = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=POOLED,
        intermediate_size=20,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=20,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformer = diffusers.FluxTransformer2DModel(**FLUX, guidance_embeds=kind == "dev")
    diffusers.FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**FLUX_SHIFTS[kind]),
        vae=autoencoder(1.3),
        text_encoder=randomise(transformers.CLIPTextModel(clip), seed=2),
        tokenizer=tokenizer,
        text_encoder_2=tiny_t5(tokens, CONTEXT),
        tokenizer_2=transformers.T5Tokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer=randomise(transformer, seed=3),
    ).save_pretrained(folder)


# ------------------------------------------------------------------------------------------ FLUX.2

KLEIN = dict(in_channels=12, num_layers=2, num_single_layers=2, attention_head_dim=8)
KLEIN |= dict(num_attention_heads=4, joint_attention_dim=24, mlp_ratio=1.5)
KLEIN |= dict(axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False)
# Of Qwen3: rope, and no tokens that begin or end a text.
QWEN3 = dict(num_attention_heads=4, num_key_value_heads=2)
QWEN3 |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, bos_token_id=None)
QWEN3 |= dict(eos_token_id=None)
# The pipeline reads the states of layers 9, 18 and 27; the last layer is not read.
KLEIN_ENCODER = QWEN3 | dict(hidden_size=8, intermediate_size=12, num_hidden_layers=28, head_dim=4)
KLEIN_VAE = dict(block_out_channels=(8, 8), decoder_block_out_channels=(4, 8))
KLEIN_VAE |= dict(down_block_types=("DownEncoderBlock2D",) * 2)
KLEIN_VAE |= dict(up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=3)
KLEIN_VAE |= dict(norm_num_groups=4, batch_norm_eps=0.01)


def klein_folder(base: pathlib.Path, kind: str = "base") -> pathlib.Path:
    """The folder of "base" or "distilled"."""
    folder = once(base / "tiny-klein-base", _write_klein)
    if kind == "base":
        return folder
    return once(base / "tiny-klein-distilled", functools.partial(_distilled, folder))


def _write_klein(folder: pathlib.Path) -> None:
    """Weights are in several files, as those of the published transformers and text encoders."""
    tokenizer = qwen_tokenizer(folder)
    encoder = transformers.Qwen3Config(vocab_size=len(tokenizer) + 5, **KLEIN_ENCODER)
    vae = diffusers.AutoencoderKLFlux2(**KLEIN_VAE)
    generator = torch.Generator().manual_seed(1)
    vae.bn.running_mean.normal_(generator=generator)
    vae.bn.running_var.uniform_(0.1, 2, generator=generator)
    diffusers.Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=randomise(vae, seed=1),
        text_encoder=randomise(transformers.Qwen3ForCausalLM(encoder), seed=2),
        tokenizer=tokenizer,
        transformer=randomise(diffusers.Flux2Transformer2DModel(**KLEIN), seed=3),
    ).save_pretrained(folder, max_shard_size="40KB")


def _distilled(source: pathlib.Path, folder: pathlib.Path) -> None:
    shutil.copytree(source, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))


# ----------------------------------------------------------------------------------------- Z-Image

Z_IMAGE = dict(in_channels=CHANNELS, dim=32, n_layers=2, n_refiner_layers=1, n_heads=4)
Z_IMAGE |= dict(n_kv_heads=4, cap_feat_dim=20, axes_dims=[2, 4, 2], axes_lens=[546, 16, 16])
Z_IMAGE_ENCODER = QWEN3 | dict(hidden_size=20, intermediate_size=28, num_hidden_layers=3)
Z_IMAGE_ENCODER |= dict(head_dim=6)


def zimage_folder(base: pathlib.Path) -> pathlib.Path:
    """Z-Image's folder."""
    return once(base / "tiny-zimage", _write_zimage)


def _write_zimage(folder: pathlib.Path) -> None:
    tokenizer = qwen_tokenizer(folder)
    encoder = transformers.Qwen3Config(vocab_size=len(tokenizer) + 5, **Z_IMAGE_ENCODER)
    transformer = randomise(diffusers.ZImageTransformer2DModel(**Z_IMAGE), seed=3)
    with torch.no_grad():  # tokens like any other
        for seed, filler in enumerate((transformer.x_pad_token, transformer.cap_pad_token)):
            filler.normal_(generator=torch.Generator().manual_seed(seed))
    diffusers.ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(0.7),
        text_encoder=randomise(transformers.Qwen3ForCausalLM(encoder), seed=2),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)


# -------------------------------------------------------------------------------------- Qwen-Image

QWEN_IMAGE = dict(in_channels=4 * CHANNELS, out_channels=CHANNELS, num_layers=2)
QWEN_IMAGE |= dict(attention_head_dim=8, num_attention_heads=4, joint_attention_dim=24)
QWEN_IMAGE |= dict(axes_dims_rope=(2, 2, 4))
QWEN_IMAGE_ENCODER = dict(hidden_size=24, intermediate_size=28, num_hidden_layers=2)
QWEN_IMAGE_ENCODER |= dict(num_attention_heads=4, num_key_value_heads=2)
QWEN_IMAGE_ENCODER |= dict(
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 1]}
)
QWEN_IMAGE_ENCODER |= dict(bos_token_id=None, eos_token_id=None)
QWEN_IMAGE_VISION = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2)
QWEN_IMAGE_VISION |= dict(out_hidden_size=24, patch_size=4, fullatt_block_indexes=[0])
QWEN_IMAGE_VAE = dict(base_dim=6, z_dim=CHANNELS, dim_mult=[1, 2], num_res_blocks=1)
QWEN_IMAGE_VAE |= dict(temperal_downsample=[True], latents_mean=[0.1, -0.2, 0.3, 0.05])
QWEN_IMAGE_VAE |= dict(latents_std=[1.0, 2.0, 0.5, 1.5])
# The published scheduler's.
QWEN_IMAGE_SCHEDULER = dict(base_shift=0.5, max_shift=0.9, base_image_seq_len=256)
QWEN_IMAGE_SCHEDULER |= dict(max_image_seq_len=8192, shift_terminal=0.02, use_dynamic_shifting=True)


def qwen_image_folder(base: pathlib.Path) -> pathlib.Path:
    """Qwen-Image's folder."""
    return once(base / "tiny-qwen-image", _write_qwen_image)


def _write_qwen_image(folder: pathlib.Path) -> None:
    """The tokenizer has the template's words, which are 34 tokens before the prompt, as in the published one."""
    tokenizer = qwen_tokenizer(folder, template=None, size=400, texts=(QwenImage.template,))
    config = transformers.Qwen2_5_VLConfig(
        text_config=QWEN_IMAGE_ENCODER | {"vocab_size": len(tokenizer) + 5},
        vision_config=QWEN_IMAGE_VISION,
    )
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    diffusers.QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE_SCHEDULER),
        vae=randomise(diffusers.AutoencoderKLQwenImage(**QWEN_IMAGE_VAE), seed=1),
        text_encoder=randomise(encoder, seed=2),
        tokenizer=tokenizer,
        transformer=randomise(diffusers.QwenImageTransformer2DModel(**QWEN_IMAGE), seed=3),
    ).save_pretrained(folder)


# --------------------------------------------------------------------------------- Qwen-Image-Edit

# A block in windows before and behind one over the whole image. Of 4 x 8 tokens two windows of three are smaller.
QWEN_EDIT_VISION = dict(depth=4, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4)
QWEN_EDIT_VISION |= dict(out_hidden_size=24, window_size=24, fullatt_block_indexes=[1])
QWEN_EDIT_PROCESSOR = dict(patch_size=4, merge_size=2, min_pixels=64, max_pixels=2**20)
MARKS = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"


def qwen_edit_folder(base: pathlib.Path, kind: str) -> pathlib.Path:
    """The folder of "2509" or "2511"."""
    make = functools.partial(_write_qwen_edit, kind)
    return once(base / f"tiny-qwen-image-edit-{kind}", make)


def _write_qwen_edit(kind: str, folder: pathlib.Path) -> None:
    """The processor is saved as in the published folders; transformers itself cannot save it without torchvision."""
    tokenizer = qwen_tokenizer(
        folder, template=None, size=500, texts=(QwenImageEdit.template,), special=MARKS
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config=QWEN_IMAGE_ENCODER | {"vocab_size": len(tokenizer) + 5},
        vision_config=QWEN_EDIT_VISION,
        image_token_id=tokenizer.convert_tokens_to_ids(MARKS[2]),
        video_token_id=tokenizer.convert_tokens_to_ids(MARKS[3]),
    )
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    transformer = diffusers.QwenImageTransformer2DModel(**QWEN_IMAGE, zero_cond_t=kind == "2511")
    diffusers.QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE_SCHEDULER),
        vae=randomise(diffusers.AutoencoderKLQwenImage(**QWEN_IMAGE_VAE), seed=1),
        text_encoder=randomise(encoder, seed=2),
        tokenizer=tokenizer,
        processor=None,
        transformer=randomise(transformer, seed=3),
    ).save_pretrained(folder)
    shutil.copytree(folder / "tokenizer", folder / "processor")
    transformers.Qwen2VLImageProcessorPil(**QWEN_EDIT_PROCESSOR).save_pretrained(
        folder / "processor"
    )
    index = folder / "model_index.json"
    changed = json.loads(index.read_text()) | {"processor": ["transformers", "Qwen2VLProcessor"]}
    index.write_text(json.dumps(changed))
