"""Z-Image in the tests that all families share."""

import numpy as np
import torch
from diffusers import ZImageTransformer2DModel
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas

from digen_jax.models.family import Size
from digen_jax.models.zimage import network as zimage
from tests.models.families import Pipeline, Variant, first, square
from tests.models.folders import zimage_folder
from tests.models.networks import Case, Flops, Network, padded

TINY = dict(in_channels=3, dim=32, n_layers=3, n_refiner_layers=2, n_heads=2, n_kv_heads=2)
TINY |= dict(cap_feat_dim=12, norm_eps=0.05, rope_theta=20.0, t_scale=300.0)
TINY |= dict(axes_dims=[4, 6, 6], axes_lens=[98, 8, 8])
SINGLE = TINY | dict(dim=24, n_layers=1, n_refiner_layers=1, n_heads=3, n_kv_heads=3)
SINGLE |= dict(axes_dims=[2, 4, 2])
WIDE = TINY | dict(dim=512, axes_dims=[64, 96, 96], n_layers=1, n_refiner_layers=1)
WIDE |= dict(cap_feat_dim=256, axes_lens=[98, 16, 16])
# Width 6, one block of each kind.
ONE = dict(dim=6, n_heads=1, n_kv_heads=1, axes_dims=[2, 2, 2], in_channels=1, cap_feat_dim=5)
ONE |= dict(n_layers=1, n_refiner_layers=1)
BLOCK = 4 * 6 * 6 + 3 * 6 * 16
SIGMA = np.float32([0.9, 0.2])


def call(model, latents, sigma, context, mask):
    """A list of images and of captions without padding, time from 1 to 0, and the velocity negated."""
    images = list(latents.permute(0, 3, 1, 2).unsqueeze(2).to(model.dtype))
    rows = [row[valid].to(model.dtype) for row, valid in zip(context, mask, strict=True)]
    out = model(images, 1 - sigma, rows, return_dict=False)[0]
    return -torch.stack(out).squeeze(2).permute(0, 2, 3, 1).float()


def redraw_fillers(model):
    """Makes the tokens that fill up like any other."""
    model.x_pad_token.normal_(generator=torch.Generator().manual_seed(1))
    model.cap_pad_token.normal_(generator=torch.Generator().manual_seed(2))


NETWORK = Network(
    component=zimage.TRANSFORMER,
    config=zimage.ZImageConfig,
    torch_class=ZImageTransformer2DModel,
    call=call,
    prepare=redraw_fillers,
    cases={
        "tiny": Case(
            TINY,
            {"latents": (2, 6, 10, 3), "context": (2, 45, 12)},
            {"sigma": SIGMA, "mask": padded((7, 45))},
            "blocks",
            "0to1 0to2 0to1",
        ),
        "single, no filling": Case(
            SINGLE,
            {"latents": (2, 16, 16, 3), "context": (2, 96, 12)},
            {"sigma": SIGMA, "mask": padded((32, 96))},
            "none",
            "0 0 0",
            slow=True,
        ),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        "mlp": {c.hidden, zimage.TIME_HIDDEN},
        "modulation": {4 * c.dim},
        "text": {c.cap_feat_dim},
        "channels": {c.patch**2 * c.in_channels},
        "head_dim": {c.attention_head_dim},
        "layers": {2, 3},
    },
    minimal={"n_layers": 1},
    refused=[
        *(dict(qk_norm=False), dict(n_layers=0), dict(n_kv_heads=1), dict(siglip_feat_dim=1152)),
        *(dict(all_patch_size=[2, 4]), dict(all_f_patch_size=[2]), dict(guidance_embeds=True)),
        *(dict(axes_dims=[4, 6, 8]), dict(axes_dims=[5, 5, 6]), dict(axes_lens=[98, 8])),
    ],
    lora_targets=zimage.LORA_TARGETS,
    # `default_target_modules` of Flow-Factory's adapter.
    targets=(
        [f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
        + [f"feed_forward.w{number}" for number in (1, 2, 3)],
        7 * 7,
    ),
    flops=[
        Flops(
            (zimage.ZImageConfig.from_config(WIDE), (16, 24, 3), 77),
            {"context": (1, 77, 256), "mask": np.ones((1, 77), bool)},
        ),
        # 6 patches and 26 that fill up, a caption of 32 tokens and one more.
        Flops(
            (zimage.ZImageConfig.from_config(ONE), (4, 6, 1), 33),
            by_hand={
                "image": 2 * (32 * 2 * BLOCK + 6 * 2 * 4 * 6),
                "text": 2 * 64 * (2 * BLOCK + 5 * 6),
                "attention": 2 * 2 * 6 * (32**2 + 64**2 + 96**2),
                "modulation": 2 * ((2 * 4 + 1) * 6 * 6 + 256 * 1024 + 1024 * 6),
            },
        ),
    ],
)


def encoded(pipe, prompts, tokens):
    """The last state but one of each chat, without padding."""
    states, _ = pipe.encode_prompt([*prompts], max_sequence_length=tokens)
    return {"context": [row.numpy() for row in states]}


def variant(scale: float, normalisation: float = 0.0) -> Variant:
    """Of the pipeline's `guidance_scale`, ours is one more."""
    call = dict(guidance_scale=scale, cfg_normalization=normalisation)
    return Variant("", scale + 1, 1.0, call, True, {"cfg_normalization": normalisation})


PIPELINE = Pipeline(
    folder=lambda base, kind: zimage_folder(base),
    kinds=("",),
    size=Size(12, 20),
    tokens=61,  # odd, so that captions are padded to it, and then filled up to 64
    encoded=encoded,
    start=first,
    seen=lambda x: first(x).numpy(),
    variants={
        "two passes": variant(3.5),
        "shorter": variant(2.0, 0.9),
        "plain": Variant("", 1.0, call=dict(guidance_scale=0.0)),
    },
    schedules=(
        ("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo"),  # whose shifts are 6 and 3
        [(1024, 1024), (512, 256)],
        lambda config, steps, size: dict(sigmas=get_default_z_image_sigmas(steps), mu=0.7),
    ),
    defaults={
        "guidance_scale": lambda f: f.default_guidance - 1,
        "cfg_normalization": lambda f: bool(f.cfg_normalization),
        "cfg_truncation": lambda f: 1,
    },
    default_size=lambda pipe: square(1024),
    unfit=[Size(12, 18), Size(68, 4)],
    broken=[
        ("text_encoder/config.json", {"hidden_size": 24}),
        ("vae/config.json", {"latent_channels": 8}),
        ("text_encoder/config.json", {"architectures": ["LlamaForCausalLM"]}),
        ("model_index.json", {"text_encoder": ["transformers", "Qwen2Model"]}),
    ],
    most=544,
    needed="text_encoder",
)
