"""Tiny random Qwen-Image folders, made by diffusers and transformers."""

import functools
import pathlib

import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from digen_jax.models.qwen_image.family import QwenImage
from tests.models.parity import randomise
from tests.models.text import tiny_tokenizer
from tests.tiny_runs import once

CHANNELS, WIDTH = 4, 24
TRANSFORMER = dict(
    in_channels=4 * CHANNELS,
    out_channels=CHANNELS,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=WIDTH,
    axes_dims_rope=(2, 2, 4),
)
ENCODER = dict(
    hidden_size=WIDTH,
    intermediate_size=28,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 1]},
    bos_token_id=None,
    eos_token_id=None,
)
VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=20,
    num_heads=2,
    out_hidden_size=WIDTH,
    patch_size=4,
    fullatt_block_indexes=[0],
)
VAE = dict(
    base_dim=6,
    z_dim=CHANNELS,
    dim_mult=[1, 2],
    num_res_blocks=1,
    temperal_downsample=[True],
    latents_mean=[0.1, -0.2, 0.3, 0.05],
    latents_std=[1.0, 2.0, 0.5, 1.5],
)
# The published scheduler's.
SCHEDULER = dict(
    base_shift=0.5,
    max_shift=0.9,
    base_image_seq_len=256,
    max_image_seq_len=8192,
    shift_terminal=0.02,
    use_dynamic_shifting=True,
)


def qwen_image_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder, which test processes share."""
    return once(base / "tiny-qwen-image", _write)


@functools.cache
def qwen_image_pipeline(folder: pathlib.Path) -> QwenImagePipeline:
    """diffusers' pipeline of a folder."""
    pipe = QwenImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def packed(latents: np.ndarray) -> torch.Tensor:
    """As the pipeline takes latents."""
    batch, height, width, channels = latents.shape
    raw = torch.tensor(np.asarray(latents).transpose(0, 3, 1, 2)).contiguous()
    return QwenImagePipeline._pack_latents(raw, batch, channels, height, width)


def _write(folder: pathlib.Path) -> None:
    """The tokenizer has the template's words, which are 34 tokens before the prompt, as in the published one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tiny_tokenizer.save(
            folder / "tokenizer", template=None, size=400, texts=(QwenImage.template,)
        )
    )
    text = ENCODER | {"vocab_size": len(tokenizer) + 5}
    encoder = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION)
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=randomise(AutoencoderKLQwenImage(**VAE), seed=1),
        text_encoder=randomise(transformers.Qwen2_5_VLForConditionalGeneration(encoder), seed=2),
        tokenizer=tokenizer,
        transformer=randomise(QwenImageTransformer2DModel(**TRANSFORMER), seed=3),
    ).save_pretrained(folder)
