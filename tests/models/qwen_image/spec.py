"""Qwen-Image in the tests that all families share."""

import numpy as np
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from digen_jax.models.family import Size
from digen_jax.models.qwen_image import network as qwen_image
from tests.models.families import Pipeline, Variant, packed, shifted, square
from tests.models.folders import qwen_image_folder
from tests.models.networks import Case, Flops, Network, padded

TINY = dict(in_channels=12, out_channels=3, num_layers=2, joint_attention_dim=10)
TINY |= dict(attention_head_dim=12, num_attention_heads=3, axes_dims_rope=(2, 4, 6))
SINGLE = TINY | dict(in_channels=8, out_channels=5, num_layers=1)
SINGLE |= dict(attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 8, 4))
WIDE = dict(num_attention_heads=4, joint_attention_dim=256)
BY_HAND = TINY | dict(in_channels=16, out_channels=5, num_layers=3)


def call(model, latents, sigma, context, mask, source=None):
    """Packed latents, sizes in tokens, time from 0 to 1; the tokens of source images behind the image's."""
    batch, height, width, channels = latents.shape
    images = [latents] if source is None else [latents, *source.unbind(1)]
    raw = [one.permute(0, 3, 1, 2).contiguous() for one in images]
    shapes = [(batch, channels, *one.shape[2:]) for one in raw]
    tokens = torch.cat(
        list(map(QwenImagePipeline._pack_latents, raw, *zip(*shapes, strict=True))), 1
    )
    v = model(
        hidden_states=tokens.to(model.dtype),
        encoder_hidden_states=context.to(model.dtype),
        encoder_hidden_states_mask=mask,
        timestep=sigma.to(model.dtype),
        img_shapes=[[(1, rows // 2, columns // 2) for *_, rows, columns in shapes]] * batch,
    ).sample[:, : height // 2 * (width // 2)]
    v = QwenImagePipeline._unpack_latents(v, height, width, vae_scale_factor=1)[:, :, 0]
    return v.permute(0, 2, 3, 1).float()


def by_hand(d: int = 36, block: int = 12 * 36 * 36) -> dict[str, float]:
    """Width 36, three blocks of q k v out and a feed-forward to 4 d and back: 6 tokens of image, 3 of text."""
    return {
        "image": 2 * 6 * (16 * d + 20 * d + 3 * block),
        "text": 2 * 3 * (10 * d + 3 * block),
        "attention": 2 * 3 * 2 * 9 * 9 * d,
        # 6 vectors for each stream, 2 for the end; time, two layers
        "modulation": 2 * ((3 * 12 + 2) * d * d + (256 + d) * d),
    }


NETWORK = Network(
    component=qwen_image.TRANSFORMER,
    config=qwen_image.QwenImageConfig,
    torch_class=QwenImageTransformer2DModel,
    call=call,
    cases={
        "tiny": Case(
            TINY,
            {"latents": (2, 6, 10, 3), "context": (2, 7, 10)},
            {"sigma": np.float32([250, 76]) / 256, "mask": padded((4, 7))},
            "none",
            "0to1",
        ),
        "edit": Case(
            TINY | dict(zero_cond_t=True),
            {"latents": (2, 6, 10, 3), "context": (2, 7, 10), "source": (2, 2, 12, 4, 3)},
            {"sigma": np.float32([250, 76]) / 256, "mask": padded((4, 7))},
            "none",
            "0to1",
        ),
        "single": Case(
            SINGLE,
            {"latents": (3, 10, 4, 2), "context": (3, 6, 10)},
            {"sigma": np.float32([250, 163, 76]) / 256, "mask": padded((6, 1, 5))},
            "blocks",
            "0",
            slow=True,
        ),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        "mlp": {4 * c.dim, c.dim},  # of blocks, of the embedding of time
        "modulation": {6 * c.dim, 2 * c.dim},
        "text": {c.joint_attention_dim},
        "channels": {c.in_channels},
        "head_dim": {c.attention_head_dim},
        "layers": {2},
        None: {256},
    },
    minimal={"num_layers": 1, "in_channels": 32},
    refused=[
        *(dict(patch_size=1), dict(in_channels=6), dict(num_layers=0), dict(guidance_embeds=True)),
        *(dict(use_additional_t_cond=True), dict(use_layer3d_rope=True)),
        *({"axes_dims_rope": widths} for widths in ((2, 4, 4), (1, 5, 6), (6, 6))),
        dict(qk_norm="rms_norm"),
    ],
    lora_targets=qwen_image.LORA_TARGETS,
    # verl-project/verl-omni, run_qwen_image_ocr_lora.sh.
    targets=(
        ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
        + [f"{net}.net.{layer}" for net in ("img_mlp", "txt_mlp") for layer in ("0.proj", "2")],
        2 * 12,
    ),
    flops=[
        # Of a block that is not scanned the compiler would leave out the text's end.
        *(
            Flops(
                (qwen_image.QwenImageConfig(num_layers=1, **WIDE), latent, 77),
                {"context": (1, 77, 256), "mask": np.ones((1, 77), bool)},
                compiled=qwen_image.QwenImageConfig(num_layers=2, **WIDE),
            )
            for latent in ((16, 24, 16), (32, 20, 16))
        ),
        Flops(  # with two source images
            (
                *(qwen_image.QwenImageConfig(num_layers=1, zero_cond_t=True, **WIDE),),
                *((16, 24, 16), 77, 2 * 5 * 9),
            ),
            {"context": (1, 77, 256), "mask": np.ones((1, 77), bool), "source": (1, 2, 10, 18, 16)},
            compiled=qwen_image.QwenImageConfig(num_layers=2, zero_cond_t=True, **WIDE),
        ),
        Flops((qwen_image.QwenImageConfig(**BY_HAND), (4, 6, 4), 3), by_hand=by_hand()),
    ],
)


def encoded(pipe, prompts, tokens):
    """States of the chat behind its beginning, without padding."""
    states, mask = pipe.encode_prompt([*prompts], max_sequence_length=tokens)
    masks = [slice(None)] * len(states) if mask is None else mask.bool()
    return {"context": [row[valid].numpy() for row, valid in zip(states, masks, strict=True)]}


def variant(guidance: float) -> Variant:
    """Two passes of this guidance."""
    return Variant("", guidance, call=dict(true_cfg_scale=guidance), negative=True)


PIPELINE = Pipeline(
    folder=lambda base, kind: qwen_image_folder(base),
    kinds=("",),
    size=Size(12, 20),
    tokens=41,
    encoded=encoded,
    start=packed,
    seen=lambda x: packed(x).numpy(),
    variants={
        "guidance": variant(4.0),
        "plain": Variant("", 1.0, call=dict(true_cfg_scale=1.0)),
    },
    schedules=(
        ("Qwen/Qwen-Image",),
        [(1024, 1024), (512, 512), (928, 1664), (256, 256), (16, 1616)],
        shifted(calculate_shift),
    ),
    first_steps=2,
    defaults={"true_cfg_scale": lambda f: f.default_guidance},
    default_size=lambda pipe: square(pipe.default_sample_size * pipe.vae_scale_factor),
    unfit=[Size(12, 18)],
    broken=[
        ("vae/config.json", {"base": 7}),
        ("transformer/config.json", {"use_layer3d_rope": True}),
        ("text_encoder/config.json", {"architectures": ["Qwen2ForCausalLM"]}),
        ("transformer/config.json", {"joint_attention_dim": 7}, "text_encoder/config.json"),
        ("transformer/config.json", {"out_channels": 5}),
        ("transformer/config.json", {"in_channels": 20, "out_channels": 5}, "vae/config.json"),
        ("tokenizer/tokenizer_config.json", {"truncation_side": "left"}),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}),
    ],
    most=1024,
    needed="text_encoder",
)
