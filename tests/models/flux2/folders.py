"""Tiny random FLUX.2 klein folders, made by diffusers and transformers."""

import functools
import json
import pathlib
import shutil

import torch
import transformers
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)

from tests.models.parity import randomise
from tests.models.text import tiny_tokenizer
from tests.tiny_runs import once

CHANNELS, WIDTH = 3, 8
TRANSFORMER = dict(
    in_channels=4 * CHANNELS,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=3 * WIDTH,
    mlp_ratio=1.5,
    axes_dims_rope=(2, 2, 2, 2),
    guidance_embeds=False,
)
# The pipeline reads the states of layers 9, 18 and 27; the last layer is not read.
ENCODER = dict(
    hidden_size=WIDTH,
    intermediate_size=12,
    num_hidden_layers=28,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    bos_token_id=None,
    eos_token_id=None,
)


def klein_folder(base: pathlib.Path, kind: str = "base") -> pathlib.Path:
    """The folder of "base" or "distilled", which test processes share."""
    folder = once(base / "tiny-klein-base", _write)
    if kind == "base":
        return folder
    return once(base / "tiny-klein-distilled", functools.partial(_distilled, folder))


@functools.cache
def klein_pipeline(folder: pathlib.Path) -> Flux2KleinPipeline:
    """diffusers' pipeline of a folder."""
    pipe = Flux2KleinPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _write(folder: pathlib.Path) -> None:
    """Weights are in several files, as those of the published transformers and text encoders."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tiny_tokenizer.save(folder / "tokenizer")
    )
    encoder = transformers.Qwen3Config(vocab_size=len(tokenizer) + 5, **ENCODER)
    Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(),
        text_encoder=randomise(transformers.Qwen3ForCausalLM(encoder), seed=2),
        tokenizer=tokenizer,
        transformer=randomise(Flux2Transformer2DModel(**TRANSFORMER), seed=3),
    ).save_pretrained(folder, max_shard_size="40KB")


def _distilled(source: pathlib.Path, folder: pathlib.Path) -> None:
    shutil.copytree(source, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))


def _vae() -> AutoencoderKLFlux2:
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        decoder_block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        batch_norm_eps=0.01,
    )
    generator = torch.Generator().manual_seed(1)
    vae.bn.running_mean.normal_(generator=generator)
    vae.bn.running_var.uniform_(0.1, 2, generator=generator)
    return randomise(vae, seed=1)
