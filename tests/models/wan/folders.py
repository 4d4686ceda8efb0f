"""Tiny random Wan 2.1 folders, made by diffusers and transformers."""

import pathlib

import torch
import transformers
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from tests.models.families import NEGATIVES, PROMPTS
from tests.models.parity import randomise
from tests.models.sd3.t5_folders import tiny_t5, vocabulary, write_tokenizer
from tests.tiny_runs import once

CHANNELS, WIDTH = 4, 24
TRANSFORMER = dict(
    in_channels=CHANNELS,
    out_channels=CHANNELS,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    text_dim=WIDTH,
    ffn_dim=40,
    rope_max_seq_len=8,
)
VAE = dict(
    base_dim=6,
    z_dim=CHANNELS,
    dim_mult=[1, 1, 2],
    num_res_blocks=1,
    temperal_downsample=[True, True],
    latents_mean=[0.1, -0.2, 0.3, 0.05],
    latents_std=[1.0, 2.0, 0.5, 1.5],
    scale_factor_spatial=4,
    scale_factor_temporal=4,
)
SCHEDULER = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def redraw_tables(transformer: WanTransformer3DModel) -> None:
    """Makes the vectors of the modulation as large as others."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in (transformer, *transformer.blocks):
            module.scale_shift_table.normal_(0, 0.3, generator=generator)


def wan_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder, which test processes share."""
    return once(base / "tiny-wan", _write)


def _write(folder: pathlib.Path) -> None:
    tokens = write_tokenizer(folder / "tokenizer", vocabulary([*PROMPTS, *NEGATIVES]))
    transformer = randomise(WanTransformer3DModel(**TRANSFORMER), seed=3)
    redraw_tables(transformer)
    WanPipeline(
        tokenizer=transformers.T5Tokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=tiny_t5(tokens, WIDTH, "UMT5"),
        vae=randomise(AutoencoderKLWan(**VAE), seed=1),
        scheduler=UniPCMultistepScheduler(**SCHEDULER),
        transformer=transformer,
    ).save_pretrained(folder)
