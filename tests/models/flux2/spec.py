"""FLUX.2 klein in the tests that all families share."""

import numpy as np
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from digen_jax.models.family import Size
from digen_jax.models.flux2 import network as flux2
from tests.models.families import Pipeline, Variant, first, square
from tests.models.folders import klein_folder
from tests.models.networks import Case, Flops, Network

TINY = dict(in_channels=6, out_channels=None, num_layers=2, num_single_layers=3, mlp_ratio=3.0)
TINY |= dict(attention_head_dim=12, num_attention_heads=3, axes_dims_rope=(2, 4, 4, 2))
TINY |= dict(joint_attention_dim=10, rope_theta=2000, guidance_embeds=False)
NARROW = TINY | dict(in_channels=4, num_layers=1, num_single_layers=1, mlp_ratio=1.5, rope_theta=50)
NARROW |= dict(attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 2, 4, 6))
SHAPES = {"latents": (2, 3, 5, 6), "context": (2, 4, 10)}
SIGMA = {"sigma": np.float32([0.3, 0.977])}
WIDE = dict(num_layers=1, num_single_layers=1, num_attention_heads=4, joint_attention_dim=256)


def call(model, latents, sigma, context, source=None):
    """Packed latents, positions of tokens, time from 0 to 1; the tokens of source images behind the image's."""
    raw = latents.permute(0, 3, 1, 2)
    tokens, ids = Flux2KleinPipeline._pack_latents(raw), Flux2KleinPipeline._prepare_latent_ids(raw)
    own = tokens.shape[1]
    if source is not None:
        images = [one.permute(0, 3, 1, 2) for one in source.unbind(1)]
        tokens = torch.cat([tokens, *map(Flux2KleinPipeline._pack_latents, images)], dim=1)
        others = Flux2KleinPipeline._prepare_image_ids([one[:1] for one in images])
        ids = torch.cat([ids, others.expand(len(ids), -1, -1)], dim=1)
    v = model(
        hidden_states=tokens.to(model.dtype),
        encoder_hidden_states=context.to(model.dtype),
        timestep=sigma.to(model.dtype),
        img_ids=ids,
        txt_ids=Flux2KleinPipeline._prepare_text_ids(context),
    ).sample[:, :own]
    return v.reshape(*latents.shape[:3], -1).float()


def by_hand(d: int = 36, block: int = 4 * 36 * 36 + 3 * 36 * 72) -> dict[str, float]:
    """Width 36, hidden 72, blocks 2 + 3 of q k v out, gate, value and back: 24 tokens of image, 3 of text."""
    return {
        "image": 2 * 24 * (2 * 6 * d + 5 * block),
        "text": 2 * 3 * (10 * d + 5 * block),
        "attention": 2 * 5 * 2 * 27 * 27 * d,
        # Six vectors for each stream, three for single blocks, two for the end; time, two layers.
        "modulation": 2 * ((2 * 6 + 3 + 2) * d * d + (256 + d) * d),
    }


NETWORK = Network(
    component=flux2.TRANSFORMER,
    config=flux2.Flux2Config,
    torch_class=Flux2Transformer2DModel,
    call=call,
    time="time_guidance_embed.time_proj",
    cases={
        "tiny": Case(TINY, SHAPES, SIGMA, "blocks", "0to2 0to1"),
        "edit": Case(TINY, SHAPES | {"source": (2, 2, 4, 3, 6)}, SIGMA, "none", "0to2 0to1"),
        "narrow": Case(
            *(NARROW, {"latents": (2, 5, 1, 4), "context": (2, 6, 10)}, SIGMA, "none", "0 0", True)
        ),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        # Of time, gates and values, hidden layers, and of what a single block reads and writes at once.
        "mlp": {c.dim, 2 * c.hidden, c.hidden, 3 * c.dim + 2 * c.hidden, c.dim + c.hidden},
        "modulation": {6 * c.dim, 3 * c.dim, 2 * c.dim},
        "text": {c.joint_attention_dim},
        "channels": {c.in_channels},
        "head_dim": {c.attention_head_dim},
        "layers": {2, 3},
    },
    minimal={"num_layers": 1, "num_single_layers": 1, "guidance_embeds": False},
    refused=[
        *(dict(patch_size=2), dict(num_layers=0), dict(num_single_layers=0), dict(eps=1e-5)),
        *(dict(guidance_embeds=True), dict(timestep_guidance_channels=128), dict(mlp_ratio=0.02)),
        *({"axes_dims_rope": each} for each in ((2, 4, 6), (2, 4, 4, 4), (1, 5, 4, 2))),
        *(dict(axes_dims_rope=(0, 6, 4, 2)), dict(pooled_projection_dim=768)),
    ],
    lora_targets=flux2.LORA_TARGETS,
    # `default_target_modules` of Flow-Factory's adapter.
    targets=(
        [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")]
        + [f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")]
        + [f"{net}.linear_{end}" for net in ("ff", "ff_context") for end in ("in", "out")],
        2 * 12 + 3,
    ),
    flops=[
        *(
            Flops((flux2.Flux2Config(**WIDE), latent, 77), {"context": (1, 77, 256)})
            for latent in ((8, 12, 128), (16, 10, 128))
        ),
        Flops(  # with two source images
            (flux2.Flux2Config(**WIDE), (8, 12, 128), 40, 2 * 9 * 5),
            {"context": (1, 40, 256), "source": (1, 2, 9, 5, 128)},
        ),
        Flops(
            (flux2.Flux2Config.from_config(TINY | {"mlp_ratio": 2.0}), (4, 6, 6), 3),
            by_hand=by_hand(),
        ),
    ],
)


def encoded(pipe, prompts, tokens):
    """States of three depths, in float64.

    After 27 random layers single padding tokens are so near zero before a norm that float32 moves them by 1e-5 of the
    largest value, torch's, too: more or less on another CPU.
    """
    pipe.text_encoder.double()
    try:
        states, _ = pipe.encode_prompt([*prompts], max_sequence_length=tokens)
    finally:
        pipe.text_encoder.float()
    return {"context": [*states.numpy()]}


def schedule(config, steps, size):
    """The shift depends on the tokens and the steps."""
    tokens = (size.height // 16) * (size.width // 16)
    mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    return dict(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)


PIPELINE = Pipeline(
    folder=klein_folder,
    kinds=("base", "distilled"),
    size=Size(20, 12),  # 5 x 3 tokens of the image
    tokens=61,
    encoded=encoded,
    tolerance=5e-5,
    start=first,
    seen=lambda x: x.reshape(len(x), -1, x.shape[-1]),
    variants={
        "two passes": Variant("base", 3.5, call=dict(guidance_scale=3.5)),
        "plain": Variant("base", 1.0, call=dict(guidance_scale=1.0)),
        # It ignores a guidance.
        "distilled": Variant("distilled", 1.0, call=dict(guidance_scale=7.0)),
    },
    schedules=(
        ("black-forest-labs/FLUX.2-klein-4B",),
        [
            *((1024, 1024), (1088, 1024), (512, 512), (720, 1280), (384, 384), (16, 16)),
            *((2048, 1024), (688, 1600), (2992, 368)),  # the last two of 4300 and 4301 tokens
        ],
        schedule,
    ),
    defaults={
        "guidance_scale": lambda f: f.default_guidance,
        "text_encoder_out_layers": lambda f: f.text_encoder.states,
    },
    default_size=lambda pipe: square(pipe.default_sample_size * 8),  # of the published autoencoder
    unfit=[Size(18, 12)],
    broken=[
        ("text_encoder/config.json", {"hidden_size": 10}),
        ("text_encoder/config.json", {"num_hidden_layers": 26}),
        ("text_encoder/config.json", {"architectures": ["LlamaModel"]}),
        ("vae/config.json", {"latent_channels": 8}),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}),
        ("transformer/config.json", {"out_channels": 4}),
        ("transformer/config.json", {"guidance_embeds": True}),
        ("model_index.json", {"is_distilled": 1}),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}),
    ],
    most=None,
    needed="text_encoder",
)
