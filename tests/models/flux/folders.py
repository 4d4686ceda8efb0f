"""Tiny random FLUX.1 folders, made by diffusers and transformers."""

import functools
import pathlib
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

from examples.shapes.tokenizer import build_tokenizer
from tests.models.parity import randomise
from tests.models.sd3.t5_folders import tiny_t5, vocabulary, write_tokenizer
from tests.tiny_runs import once

WORDS = [
    "a photo of a red circle",
    "two blue squares and schräge ☃",
    "a green star above a yellow triangle",
    "four shapes",
    "a blue star two green squares",
]
CHANNELS = 4
CONTEXT, POOLED = 16, 12
TRANSFORMER = dict(
    in_channels=4 * CHANNELS,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=CONTEXT,
    pooled_projection_dim=POOLED,
    axes_dims_rope=(2, 2, 4),
)
SCHEDULERS = {
    "dev": dict(shift=3.0, use_dynamic_shifting=True),
    "schnell": dict(shift=1.0, use_dynamic_shifting=False),
}


def flux_folder(base: pathlib.Path, kind: str) -> pathlib.Path:
    """The folder of "dev" or "schnell", which test processes share."""
    return once(base / f"tiny-flux-{kind}", functools.partial(_write, kind))


@functools.cache
def flux_pipeline(folder: pathlib.Path) -> FluxPipeline:
    """diffusers' pipeline of a folder."""
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def packed(latents: np.ndarray) -> torch.Tensor:
    """As the pipeline takes latents."""
    batch, height, width, channels = latents.shape
    raw = torch.tensor(np.asarray(latents).transpose(0, 3, 1, 2)).contiguous()
    return FluxPipeline._pack_latents(raw, batch, channels, height, width)


def _write(kind: str, folder: pathlib.Path) -> None:
    tokenizer = build_tokenizer(WORDS, 20)
    tokens = write_tokenizer(folder / "tokenizer_2", vocabulary(WORDS))
    components: dict[str, Any] = dict(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULERS[kind]),
        vae=randomise(_vae(), seed=1),
        text_encoder=randomise(_clip(tokenizer), seed=2),
        tokenizer=tokenizer,
        text_encoder_2=tiny_t5(tokens, CONTEXT),
        tokenizer_2=transformers.T5Tokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer=randomise(
            FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=kind == "dev"), seed=3
        ),
    )
    FluxPipeline(**components).save_pretrained(folder)


def _clip(tokenizer: transformers.CLIPTokenizer) -> transformers.CLIPTextModel:
    config = transformers.CLIPTextConfig(
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
    return transformers.CLIPTextModel(config)


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        scaling_factor=1.3,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
