"""FLUX.1, and FLUX.1 Kontext, in the tests that all families share."""

import numpy as np
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from digen_jax.models.family import Size
from digen_jax.models.flux import network as flux
from tests.models.families import Pipeline, Variant, packed, shifted, square
from tests.models.folders import flux_folder
from tests.models.networks import Case, Flops, Network

DEV = dict(patch_size=1, in_channels=16, out_channels=None, num_layers=2, num_single_layers=3)
DEV |= dict(attention_head_dim=12, num_attention_heads=3, axes_dims_rope=(2, 4, 6))
DEV |= dict(joint_attention_dim=10, pooled_projection_dim=7, guidance_embeds=True)
SCHNELL = DEV | dict(in_channels=8, num_layers=1, num_single_layers=2, guidance_embeds=False)
SCHNELL |= dict(attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 8, 4))
SHAPES = {"latents": (2, 6, 10, 4), "context": (2, 5, 10), "pooled": (2, 7)}
NUMBERS = {"sigma": np.float32([0.3, 0.977]), "guidance": np.float32([3.5, 1.25])}
WIDE = dict(num_layers=1, num_single_layers=1, num_attention_heads=4, joint_attention_dim=256)


def call(model, latents, sigma, context, pooled, guidance=None, source=None):
    """Packed latents, positions of tokens, time from 0 to 1; the tokens of a picture to edit behind the image's."""
    dtype, tokens, ids = model.dtype, [], []
    for index, given in enumerate([latents] if source is None else [latents, source]):
        batch, height, width, channels = given.shape
        raw = given.permute(0, 3, 1, 2).contiguous()
        tokens.append(FluxPipeline._pack_latents(raw, batch, channels, height, width).to(dtype))
        sides = height // 2, width // 2
        ids.append(FluxPipeline._prepare_latent_image_ids(batch, *sides, "cpu", dtype))
        ids[-1][..., 0] = index
    v = model(
        hidden_states=torch.cat(tokens, dim=1),
        encoder_hidden_states=context.to(dtype),
        pooled_projections=pooled.to(dtype),
        timestep=sigma.to(dtype),
        guidance=guidance,
        img_ids=torch.cat(ids),
        txt_ids=torch.zeros(context.shape[1], 3).to(dtype),
    ).sample[:, : tokens[0].shape[1]]
    _, height, width, _ = latents.shape
    v = FluxPipeline._unpack_latents(v, height, width, vae_scale_factor=1)
    return v.permute(0, 2, 3, 1).float()


def by_hand(d: int = 36, block: int = 12 * 36 * 36) -> dict[str, float]:
    """Width 36, blocks 2 + 3 of q k v out and a feed-forward to 4 d and back: 6 tokens of image, 3 of text."""
    return {
        "image": 2 * 6 * (2 * 16 * d + 5 * block),
        "text": 2 * 3 * (10 * d + 5 * block),
        "attention": 2 * 5 * 2 * 9 * 9 * d,
        # 6 vectors for each stream, 3 for a single block, 2 for the end; time, guidance and text, two layers each
        "modulation": 2 * ((2 * 12 + 3 * 3 + 2) * d * d + 2 * (256 + d) * d + (7 + d) * d),
    }


NETWORK = Network(
    component=flux.TRANSFORMER,
    config=flux.FluxConfig,
    torch_class=FluxTransformer2DModel,
    call=call,
    time="time_text_embed.time_proj",
    cases={
        "dev": Case(DEV, SHAPES, NUMBERS, "none", "0to2 0to1"),
        "schnell": Case(
            SCHNELL,
            {"latents": (2, 10, 4, 2), "context": (2, 4, 10), "pooled": (2, 7)},
            {"sigma": NUMBERS["sigma"]},
            "blocks",
            "0to1 0",
            slow=True,
        ),
        "kontext": Case(DEV, SHAPES | {"source": (2, 8, 4, 4)}, NUMBERS, "none", "0to2 0to1"),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        # Of blocks, of embedders, and of a single block's projection of heads and hidden layer.
        "mlp": {4 * c.dim, c.dim, 5 * c.dim},
        "modulation": {6 * c.dim, 3 * c.dim, 2 * c.dim},
        "text": {c.joint_attention_dim, c.pooled_projection_dim},
        "channels": {c.in_channels},
        "layers": {2, 3},
    },
    minimal={"num_layers": 1, "num_single_layers": 1},
    refused=[
        *(dict(patch_size=2), dict(in_channels=6), dict(out_channels=6), dict(num_layers=0)),
        *(dict(num_single_layers=0), dict(guidance_embeds=1), dict(qk_norm="rms_norm")),
        *({"axes_dims_rope": each} for each in ((2, 4, 4), (1, 5, 6), (0, 6, 6), (6, 6), None)),
    ],
    lora_targets=flux.LORA_TARGETS,
    # yifan123/flow_grpo, scripts/train_flux.py.
    targets=(
        [f"attn.{n}" for n in ("to_k", "to_q", "to_v", "to_out.0", "to_add_out")]
        + [f"attn.add_{n}_proj" for n in "kqv"]
        + [f"{net}.net.{layer}" for net in ("ff", "ff_context") for layer in ("0.proj", "2")],
        2 * 12 + 3 * 3,
    ),
    flops=[
        *(
            Flops(
                (flux.FluxConfig(**WIDE, guidance_embeds=True), latent, 77),
                {"context": (1, 77, 256), "pooled": (1, 768), "guidance": (1,)},
            )
            for latent in ((16, 24, 16), (32, 20, 16))
        ),
        Flops(  # with 9 x 5 tokens of a picture
            (flux.FluxConfig(**WIDE), (8, 12, 16), 40, 45),
            {"context": (1, 40, 256), "pooled": (1, 768), "source": (1, 18, 10, 16)},
        ),
        Flops((flux.FluxConfig.from_config(DEV), (4, 6, 4), 3), by_hand=by_hand()),
    ],
)


def encoded(pipe, prompts, tokens):
    """The T5's states, and the state of CLIP's end token."""
    found = pipe.encode_prompt([*prompts], [*prompts], max_sequence_length=tokens)
    return {"context": [*found[0].numpy()], "pooled": [*found[1].numpy()]}


PIPELINE = Pipeline(
    folder=flux_folder,
    kinds=("dev", "schnell"),
    size=Size(20, 12),  # 5 x 3 tokens of the image
    tokens=21,
    encoded=encoded,
    start=packed,
    seen=lambda x: packed(x).numpy(),
    variants={
        "two guidances": Variant(
            "dev", 4.5, 3.0, dict(guidance_scale=4.5, true_cfg_scale=3.0), True
        ),
        "plain": Variant("dev", 4.5, 1.0, dict(guidance_scale=4.5)),
        # A true guidance below 1 is none.
        "schnell": Variant("schnell", 0.0, 0.0, dict(true_cfg_scale=0.0), True),
    },
    schedules=(
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"),
        [(1024, 1024), (512, 512), (720, 1280), (256, 256), (16, 1616)],
        shifted(calculate_shift),
    ),
    defaults={"guidance_scale": lambda f: f.default_guidance, "true_cfg_scale": lambda f: 1},
    default_size=lambda pipe: square(pipe.default_sample_size * pipe.vae_scale_factor),
    unfit=[Size(18, 12)],
    broken=[
        ("text_encoder/config.json", {"hidden_size": 10}),
        ("text_encoder_2/config.json", {"d_model": 7}),
        ("vae/config.json", {"latent_channels": 8}),
        ("transformer/config.json", {"out_channels": 4}),
        ("transformer/config.json", {"axes_dims_rope": [8]}),
        ("transformer/config.json", {"_class_name": "SD3Transformer2DModel"}),
    ],
    most=512,
    needed="text_encoder_2",
)
