"""Wan 2.1 in the tests that all families share."""

import numpy as np
import torch
from diffusers import WanTransformer3DModel

from digen_jax.models.wan import network as wan
from tests.models.networks import Case, Flops, Network

TINY = dict(in_channels=3, out_channels=3, num_layers=3, text_dim=10, freq_dim=256, ffn_dim=40)
TINY |= dict(attention_head_dim=16, num_attention_heads=2, eps=0.01, rope_max_seq_len=20)
# Rows and columns have 4 of 14 channels of a head each, frames have 6.
SINGLE = TINY | dict(num_layers=1, out_channels=5, attention_head_dim=14, num_attention_heads=3)
SINGLE |= dict(patch_size=[1, 1, 1], rope_max_seq_len=10)
WIDE = dict(num_layers=1, num_attention_heads=4, text_dim=256, ffn_dim=1024)
BY_HAND = TINY | dict(in_channels=4)
# Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan-AI/Wan2.1-T2V-14B-Diffusers, transformer/config.json.
SMALL = dict(num_attention_heads=12, num_layers=30, ffn_dim=8960)
LARGE = dict(num_attention_heads=40, num_layers=40, ffn_dim=13824)


def call(model, latents, time, context):
    """Channels first."""
    v = model(
        hidden_states=latents.permute(0, 4, 1, 2, 3).to(model.dtype),
        timestep=time.long(),
        encoder_hidden_states=context.to(model.dtype),
    ).sample
    return v.permute(0, 2, 3, 4, 1).float()


def redraw_tables(model):
    """Makes the vectors of the modulation as large as others."""
    generator = torch.Generator().manual_seed(1)
    for module in (model, *model.blocks):
        module.scale_shift_table.normal_(0, 0.3, generator=generator)


NETWORK = Network(
    component=wan.TRANSFORMER,
    config=wan.WanConfig,
    torch_class=WanTransformer3DModel,
    call=call,
    prepare=redraw_tables,
    exact={"time": np.float32([256, 512])},
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
            {"latents": (3, 2, 5, 4, 3), "context": (3, 6, 10)},
            {"time": np.float32([857, 500, 3])},
            "none",
            "0",
        ),
    },
    published={"1.3B": (SMALL, 1_418_996_800), "14B": (LARGE, 14_288_491_584)},
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
