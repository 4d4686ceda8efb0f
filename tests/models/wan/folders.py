"""Tiny random folders of Wan 2.1 and 2.2, made by diffusers and transformers."""

import functools
import pathlib

import torch
import transformers
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
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
# Latents of 5B have three times as many channels as its clips, and a side of 16 pixels.
VAE_5B = VAE | dict(
    z_dim=6,
    decoder_base_dim=8,
    dim_mult=[1, 1, 2, 2],
    temperal_downsample=[False, True, True],
    in_channels=12,
    out_channels=12,
    is_residual=True,
    patch_size=2,
    latents_mean=[0.1, -0.2, 0.3, 0.05, 0.0, -0.1],
    latents_std=[1.0, 2.0, 0.5, 1.5, 0.8, 1.2],
    scale_factor_spatial=16,
)
VISION = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2)
VISION |= dict(image_size=16, patch_size=4, hidden_act="gelu")
# Of 4 steps at shift 3 the second has the time 900, without its fraction .12: it is the second expert's first.
BOUNDARY = 0.9001
SCHEDULER = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def redraw_tables(transformer: WanTransformer3DModel) -> None:
    """Makes the vectors of the modulation as large as others."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in (transformer, *transformer.blocks):
            module.scale_shift_table.normal_(0, 0.3, generator=generator)


def wan_folder(base: pathlib.Path, kind: str = "") -> pathlib.Path:
    """The folder, which test processes share, of Wan 2.1, of Wan 2.2 "5B", or of two "experts".

    With "image" before it, or alone, of a model that reads an image.
    """
    return once(base / f"tiny-wan{kind.replace(' ', '-')}", functools.partial(_write, kind))


def _write(kind: str, folder: pathlib.Path) -> None:
    vae, shift = (VAE_5B, 5.0) if kind == "5B" else (VAE, 3.0)
    channels = dict(in_channels=vae["z_dim"], out_channels=vae["z_dim"])
    if image := kind.startswith("image"):
        channels["in_channels"] = 2 * CHANNELS + 4
    extra = {}
    if kind == "image":
        channels |= dict(image_dim=VISION["hidden_size"], added_kv_proj_dim=32)
        encoder = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
        sides = dict(size={"shortest_edge": 18}, crop_size={"height": 16, "width": 16})
        extra["image_encoder"] = randomise(encoder, seed=5)
        extra["image_processor"] = transformers.CLIPImageProcessor(**sides)
    tokens = write_tokenizer(folder / "tokenizer", vocabulary([*PROMPTS, *NEGATIVES]))

    def transformer(seed: int) -> WanTransformer3DModel:
        module = randomise(WanTransformer3DModel(**TRANSFORMER | channels), seed)
        redraw_tables(module)
        return module

    if kind.endswith("experts"):
        extra |= dict(transformer_2=transformer(4), boundary_ratio=BOUNDARY)
    (WanImageToVideoPipeline if image else WanPipeline)(
        tokenizer=transformers.T5Tokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=tiny_t5(tokens, WIDTH, "UMT5"),
        vae=randomise(AutoencoderKLWan(**vae), seed=1),
        scheduler=UniPCMultistepScheduler(**SCHEDULER | dict(flow_shift=shift)),
        transformer=transformer(3),
        expand_timesteps=kind == "5B",
        **extra,
    ).save_pretrained(folder)
