"""Wan 2.1 and 2.2 in the tests that all families share."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

from digen_jax.models.family import Size
from digen_jax.models.wan import network as wan
from tests.models.families import Pipeline, Variant, first
from tests.models.networks import Case, Flops, Network
from tests.models.wan.folders import redraw_tables, wan_folder

TINY = dict(in_channels=3, out_channels=3, num_layers=3, text_dim=10, freq_dim=256, ffn_dim=40)
TINY |= dict(attention_head_dim=16, num_attention_heads=2, eps=0.01, rope_max_seq_len=20)
# Rows and columns have 4 of 14 channels of a head each, frames have 6.
SINGLE = TINY | dict(num_layers=1, out_channels=5, attention_head_dim=14, num_attention_heads=3)
SINGLE |= dict(patch_size=[1, 1, 1], rope_max_seq_len=10, image_dim=11, added_kv_proj_dim=42)
WIDE = dict(num_layers=1, num_attention_heads=4, text_dim=256, ffn_dim=1024)
BY_HAND = TINY | dict(in_channels=4)


def call(model, latents, time, context, image=None):
    """Channels first, and a time for each token if that of the first frame differs."""
    if time.ndim == 2:
        _, frames, *sides, _ = latents.shape
        tokens = sides[0] * sides[1] // model.config.patch_size[1] ** 2
        time = time.repeat_interleave(torch.tensor([tokens, tokens * (frames - 1)]), dim=1)
    v = model(
        hidden_states=latents.permute(0, 4, 1, 2, 3).to(model.dtype),
        timestep=time.long(),
        encoder_hidden_states=context.to(model.dtype),
        encoder_hidden_states_image=None if image is None else image.to(model.dtype),
    ).sample
    return v.permute(0, 2, 3, 4, 1).float()


NETWORK = Network(
    component=wan.TRANSFORMER,
    config=wan.WanConfig,
    torch_class=WanTransformer3DModel,
    call=call,
    prepare=redraw_tables,
    exact={"time": np.float32([999, 312])},  # embedded in float32
    cases={
        "tiny": Case(
            TINY,
            {"latents": (2, 3, 6, 10, 3), "context": (2, 7, 10)},
            {"time": np.float32([999, 312])},
            "blocks",
            "0to2",
        ),
        "single": Case(
            SINGLE,
            # diffusers takes the last 512 tokens for the text.
            {"latents": (3, 2, 5, 4, 3), "context": (3, 512, 10), "image": (3, 5, 11)},
            {"time": np.float32([[0, 857], [0, 500], [0, 3]])},
            "none",
            "0",
            slow=True,
        ),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        "mlp": {c.ffn_dim, c.dim},  # of blocks, of the embeddings of time and text
        "modulation": {6 * c.dim},
        "text": {c.text_dim},
        "channels": {c.in_channels, 4 * c.out_channels},
        "layers": {3},
        None: {1, 2, 6, c.freq_dim},
    },
    minimal={"num_layers": 1},
    refused=[
        *(dict(qk_norm="rms_norm"), dict(cross_attn_norm=False), dict(num_layers=0)),
        *(dict(image_dim=1280), dict(added_kv_proj_dim=32), dict(pos_embed_seq_len=514)),
        *({"patch_size": size} for size in ([2, 2, 2], [1, 2, 1], [1, 2], [1, 0, 0])),
        *(dict(attention_head_dim=4), dict(attention_head_dim=7), dict(freq_dim=255)),
        dict(guidance_embeds=True),
    ],
    lora_targets=wan.LORA_TARGETS,
    # ModelTC/GenRL, config/longcat.yaml.
    targets=(["to_k", "to_out.0", "to_q", "to_v", "net.0.proj", "net.2"], 3 * 10),
    flops=[
        Flops((wan.WanConfig(**WIDE), (3, 16, 24, 16), 77), {"context": (1, 77, 256)}),
        Flops(
            (wan.WanConfig(**WIDE, image_dim=320, added_kv_proj_dim=512), (3, 16, 24, 16), 77, 50),
            {"context": (1, 77, 256), "image": (1, 50, 320)},
        ),
        # 2 frames of 6 tokens, 5 of text, width 32.
        Flops(
            (wan.WanConfig.from_config(BY_HAND), (2, 4, 6, 4), 5),
            by_hand={
                # patches in and out; q k v out, q out; feed-forward to 40 and back
                "image": 2 * 12 * (16 * 32 + 32 * 12 + 3 * (6 * 32 * 32 + 2 * 32 * 40)),
                "text": 2 * 5 * (10 * 32 + 32 * 32 + 3 * 2 * 32 * 32),
                "attention": 2 * 3 * 2 * 32 * 12 * (12 + 5),
                "modulation": 2 * ((256 + 32) * 32 + 6 * 32 * 32),
            },
        ),
    ],
)


def encoded(pipe, prompts, tokens):
    """The states of each prompt's tokens, without the zeros after them."""
    states = pipe._get_t5_prompt_embeds([*prompts], max_sequence_length=tokens).numpy()
    return {"context": [row[row.any(axis=1)] for row in states]}


def times(family, sigmas):
    """Of up to 100 noise levels, by one program."""
    padded = np.pad(sigmas, (0, 100 - len(sigmas)))
    return np.asarray(family.network_time(jnp.asarray(padded)))[: len(sigmas)]


def variant(frames: int, guidance: float, second: float = 0.0) -> Variant:
    """Two passes of these guidances."""
    call = dict(guidance_scale=guidance) | (dict(guidance_scale_2=second) if second else {})
    return Variant("", guidance, call=call, negative=True, frames=frames, second=second)


PIPELINE = Pipeline(
    folder=lambda base, kind: wan_folder(base),
    kinds=("",),
    size=Size(16, 32, 9),
    tokens=21,
    encoded=encoded,
    start=first,
    seen=lambda x: first(x).numpy(),
    variants={
        "9 frames": variant(9, 5.0),
        "1 frame": variant(1, 2.5),
        "plain": Variant("", 1.0, call=dict(guidance_scale=1.0), frames=5),
    },
    schedules=(
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",),  # those of 14B and A14B are equal
        [(480, 832)],
        lambda config, steps, size: dict(num_inference_steps=steps),
    ),
    defaults={
        "guidance_scale": lambda f: f.default_guidance,
        "height": lambda f: f.default_size().height,
        "width": lambda f: f.default_size().width,
        "num_frames": lambda f: f.default_size().frames,
    },
    default_size=lambda pipe: Size(480, 832, 81),
    unfit=[
        *(Size(16, 28, 9), Size(16, 32, 7), Size(16, 32, 0), Size(16, 32, -3)),
        *(Size(72, 16, 1), Size(16, 16, 33)),
    ],
    broken=[
        ("text_encoder/config.json", {"d_model": 7}),
        ("text_encoder/config.json", {"architectures": ["T5EncoderModel"]}),
        ("transformer/config.json", {"out_channels": 5}),
        ("transformer/config.json", {"in_channels": 8, "out_channels": 8}, "vae/config.json"),
        ("vae/config.json", {"temperal_downsample": [True, False], "scale_factor_temporal": 2}),
        ("model_index.json", {"boundary_ratio": 0.875}),
        ("scheduler/scheduler_config.json", {"solver_order": 3}),
        ("scheduler/scheduler_config.json", {"prediction_type": "epsilon"}),
        ("model_index.json", {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}),
    ],
    most=None,
    needed="text_encoder",
    scheduler=UniPCMultistepScheduler,
    times=times,
    clip=lambda x: {"num_frames": 1 + 4 * (x.shape[1] - 1)},
)

PIPELINE_5B = dataclasses.replace(
    PIPELINE,
    folder=lambda base, kind: wan_folder(base, "5B"),
    variants={name: PIPELINE.variants[name] for name in ("9 frames", "plain")},
    size=Size(32, 64, 9),
    schedules=(("Wan-AI/Wan2.2-TI2V-5B-Diffusers",), *PIPELINE.schedules[1:]),
    # diffusers makes 16 of 48 without an error.
    unfit=[Size(48, 64, 9), Size(32, 80, 9), Size(32, 64, 8), Size(288, 32, 1)],
    broken=[
        ("transformer/config.json", {"in_channels": 4, "out_channels": 4}, "vae/config.json"),
        ("vae/config.json", {"patch_size": 1}),
        ("vae/config.json", {"scale_factor_spatial": 8}),
    ],
)


PIPELINE_EXPERTS = dataclasses.replace(
    PIPELINE,
    folder=lambda base, kind: wan_folder(base, "experts"),
    variants={"9 frames": variant(9, 4.0, 3.0), "plain": PIPELINE.variants["plain"]},
    schedules=((), *PIPELINE.schedules[1:]),  # those of Wan 2.1
    broken=[
        ("model_index.json", {"boundary_ratio": None}),
        ("model_index.json", {"boundary_ratio": 1.5}),
        ("model_index.json", {"boundary_ratio": True}),
        ("model_index.json", {"transformer_2": [None, None]}),
        ("model_index.json", {"transformer_2": ["diffusers", "SD3Transformer2DModel"]}),
        ("transformer_2/config.json", {"ffn_dim": 48}),
        ("transformer_2/config.json", {"in_channels": 8, "out_channels": 8}),
    ],
)
