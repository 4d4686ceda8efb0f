"""Tiny random Z-Image folders, made by diffusers and transformers."""

import functools
import pathlib

import torch
import transformers
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

from tests.models.parity import randomise
from tests.models.text import tiny_tokenizer
from tests.tiny_runs import once

CHANNELS, WIDTH = 4, 20
TRANSFORMER = dict(
    in_channels=CHANNELS,
    dim=32,
    n_layers=2,
    n_refiner_layers=1,
    n_heads=4,
    n_kv_heads=4,
    cap_feat_dim=WIDTH,
    axes_dims=[2, 4, 2],
    axes_lens=[546, 16, 16],
)
ENCODER = dict(
    hidden_size=WIDTH,
    intermediate_size=28,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    bos_token_id=None,
    eos_token_id=None,
)


def zimage_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder, which test processes share."""
    return once(base / "tiny-zimage", _write)


@functools.cache
def zimage_pipeline(folder: pathlib.Path) -> ZImagePipeline:
    """diffusers' pipeline of a folder."""
    pipe = ZImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _write(folder: pathlib.Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tiny_tokenizer.save(folder / "tokenizer")
    )
    encoder = transformers.Qwen3Config(vocab_size=len(tokenizer) + 5, **ENCODER)
    transformer = randomise(ZImageTransformer2DModel(**TRANSFORMER), seed=3)
    with torch.no_grad():  # tokens like any other
        for seed, filler in enumerate((transformer.x_pad_token, transformer.cap_pad_token)):
            filler.normal_(generator=torch.Generator().manual_seed(seed))
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=randomise(_vae(), seed=1),
        text_encoder=randomise(transformers.Qwen3ForCausalLM(encoder), seed=2),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        scaling_factor=0.7,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
