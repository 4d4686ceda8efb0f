"""Stable Diffusion 3 in the tests that all families share."""

import numpy as np
import torch
from diffusers import SD3Transformer2DModel

from digen_jax.models.family import Size
from digen_jax.models.sd3 import network as sd3
from tests.models.families import NEGATIVES, PROMPTS, Pipeline, Variant, first, square
from tests.models.networks import Case, Flops, Network
from tests.models.sd3.t5_folders import add_t5
from tests.tiny_runs import once, pipeline

SD3 = dict(sample_size=16, patch_size=2, in_channels=4, out_channels=4, pos_embed_max_size=12)
SD3 |= dict(num_layers=3, attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32)
SD3 |= dict(joint_attention_dim=12, pooled_projection_dim=10)
SD35 = SD3 | dict(num_layers=4, dual_attention_layers=(0, 1), qk_norm="rms_norm")
SHAPES = {"latents": (2, 8, 12, 4), "context": (2, 5, 12), "pooled": (2, 10)}
SIGMA = np.float32([0.3, 0.977])
# Wide enough that elementwise operations hardly count; no two blocks in a row are of one kind.
WIDE = dict(num_layers=3, num_attention_heads=8, caption_projection_dim=512, qk_norm="rms_norm")
WIDE |= dict(joint_attention_dim=256, pooled_projection_dim=128, dual_attention_layers=(0,))
# One block, which is the last, of width 8.
ONE = dict(in_channels=1, out_channels=1, num_layers=1, attention_head_dim=4, num_attention_heads=2)
ONE |= dict(joint_attention_dim=5, caption_projection_dim=8, pooled_projection_dim=7)


def call(model, latents, sigma, context, pooled, null_tokens):
    """With the null tokens written out."""
    zeros = context.new_zeros(len(context), null_tokens, context.shape[-1])
    v = model(
        hidden_states=latents.permute(0, 3, 1, 2).to(model.dtype),
        encoder_hidden_states=torch.cat([context, zeros], dim=1).to(model.dtype),
        pooled_projections=pooled.to(model.dtype),
        timestep=sigma * 1000,
    ).sample
    return v.permute(0, 2, 3, 1).float()


NETWORK = Network(
    component=sd3.TRANSFORMER,
    config=sd3.SD3Config,
    torch_class=SD3Transformer2DModel,
    call=call,
    prepare=lambda m: m.pos_embed.pos_embed.normal_(generator=torch.Generator().manual_seed(1)),
    cases={
        "sd35": Case(SD35, SHAPES, {"sigma": SIGMA, "null_tokens": 7}, "keep_products", "0to1 2 3"),
        "sd3": Case(SD3, SHAPES, {"sigma": SIGMA, "null_tokens": 0}, "keep_attention", "0to1 2"),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        "mlp": {4 * c.dim, c.dim},
        "modulation": {9 * c.dim, 6 * c.dim, 2 * c.dim},
        "text": {c.joint_attention_dim, c.pooled_projection_dim},
        "positions": {c.pos_embed_max_size**2},
        "layers": {2},
    },
    minimal={"num_layers": 1},
    refused=[
        *(dict(qk_norm="layer_norm"), dict(pos_embed_max_size=None), dict(num_layers=0)),
        *(dict(patch_size=2.0), dict(caption_projection_dim=31), dict(guidance_embeds=True)),
        *(dict(dual_attention_layers=[4]), dict(dual_attention_layers=None)),
        dict(num_attention_heads=2, attention_head_dim=3, caption_projection_dim=6),
    ],
    lora_targets=sd3.LORA_TARGETS,
    # yifan123/flow_grpo, scripts/train_sd3.py. The last block has no to_add_out.
    targets=(
        [f"attn.{n}" for n in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")]
        + [f"attn.add_{n}_proj" for n in "qkv"],
        4 * 8 - 1,
    ),
    flops=[
        Flops(
            (sd3.SD3Config(**WIDE), (16, 24, 16), 78),
            {"context": (1, 77, 256), "pooled": (1, 128), "null_tokens": 256},
        ),
        # 6 tokens of image, 3 of text.
        Flops(
            (sd3.SD3Config(**ONE), (4, 6, 1), 3),
            by_hand={
                # patches of 4 numbers in and out, q k v out, feed-forward to 32 and back
                "image": 2 * 6 * (4 * 8 + 8 * 4 + 4 * 8 * 8 + 2 * 8 * 32),
                "text": 2 * 3 * (5 * 8 + 2 * 8 * 8),  # k and v
                "attention": 2 * 2 * 6 * (6 + 3) * 8,  # queries of the image alone
                # the block's 6 vectors for the image, 2 for the text, 2 for the end; time and text, two layers each
                "modulation": 2 * ((6 + 2 + 2) * 8 * 8 + (256 + 8) * 8 + (7 + 8) * 8),
            },
        ),
    ],
)


def folder(base, kind):
    """The folder with a T5, or the one of the tests of runs, without."""
    if kind != "t5":
        return pipeline(base)
    texts = [*PROMPTS, *NEGATIVES]
    return once(base / "tiny-sd3-t5", lambda target: add_t5(pipeline(base), target, texts))


def encoded(pipe, prompts, tokens):
    """The context of both CLIPs and the T5, and the pooled texts."""
    context, _, pooled, _ = pipe.encode_prompt(*[[*prompts]] * 3, max_sequence_length=tokens)
    return {"context": [*context.numpy()], "pooled": [*pooled.numpy()]}


PIPELINE = Pipeline(
    folder=folder,
    kinds=("t5", "plain"),
    size=Size(32, 48),
    tokens=21,
    encoded=encoded,
    start=first,
    seen=lambda x: first(x).numpy(),
    variants={
        "with a T5": Variant("t5", 3.5, call=dict(guidance_scale=3.5), negative=True),
        "without a T5": Variant("plain", 3.5, call=dict(guidance_scale=3.5), negative=True),
        "plain": Variant("t5", 1.0, call=dict(guidance_scale=1.0)),
    },
    schedules=(
        ("stabilityai/stable-diffusion-3.5-medium",),
        [(1024, 1024)],
        lambda config, steps, size: dict(num_inference_steps=steps),
    ),
    defaults={"guidance_scale": lambda f: f.default_guidance},
    default_size=lambda pipe: square(pipe.default_sample_size * pipe.vae_scale_factor),
    unfit=[Size(30, 48), Size(32, 136)],
    broken=[
        ("text_encoder_3/config.json", {"d_model": 7}),
        ("text_encoder_3/config.json", {"architectures": ["UMT5EncoderModel"]}),
        ("model_index.json", {"tokenizer_3": [None, None]}),
        ("vae/config.json", {"_class_name": "AutoencoderKLFlux2"}),
    ],
    most=512,
    needed="text_encoder_2",
)
