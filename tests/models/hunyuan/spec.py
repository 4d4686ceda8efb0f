"""HunyuanVideo in the tests that all families share."""

import numpy as np
from diffusers import HunyuanVideoTransformer3DModel

from digen_jax.models.family import Size
from digen_jax.models.hunyuan_video import network as hunyuan_video
from tests.models import parity
from tests.models.families import Pipeline, Variant, first
from tests.models.hunyuan.folders import hunyuan_folder
from tests.models.networks import Case, Flops, Network, padded

TINY = dict(in_channels=3, out_channels=3, num_layers=2, num_single_layers=3, num_refiner_layers=2)
TINY |= dict(attention_head_dim=12, num_attention_heads=3, rope_axes_dim=(2, 4, 6))
TINY |= dict(text_embed_dim=10, pooled_projection_dim=7)
SINGLE = TINY | dict(num_layers=1, num_single_layers=1, num_refiner_layers=1, out_channels=5)
SINGLE |= dict(attention_head_dim=16, num_attention_heads=2, rope_axes_dim=(4, 8, 4))
NUMBERS = {"sigma": np.float32([0.3, 0.977]), "guidance": np.float32([6.0, 1.25])}
WIDE = dict(num_layers=1, num_single_layers=1, num_refiner_layers=1, num_attention_heads=4)
WIDE |= dict(text_embed_dim=256)


def call(model, latents, sigma, context, pooled, mask, guidance):
    """Channels first; time and guidance from 0 to 1000."""
    v = model(
        hidden_states=latents.permute(0, 4, 1, 2, 3).to(model.dtype),
        timestep=sigma * 1000,
        encoder_hidden_states=context.to(model.dtype),
        encoder_attention_mask=mask.to(model.dtype),
        pooled_projections=pooled.to(model.dtype),
        guidance=guidance * 1000,
    ).sample
    return v.permute(0, 2, 3, 4, 1).float()


def exact_times(module):
    """Of both embeddings; a guidance of 6000 multiplies the error of a float32 exp."""
    for embed in (module.time_text_embed, module.context_embedder.time_text_embed):
        embed.time_proj.forward = parity.time_features


def by_hand(d: int = 36, block: int = 12 * 36 * 36) -> dict[str, float]:
    """Width 36; blocks 2 + 3, and 2 of the text, of q k v out and a feed-forward to 4 d and back.

    2 frames of 6 tokens, 3 of text.
    """
    return {
        "image": 2 * 12 * (2 * 4 * 3 * d + 5 * block),
        "text": 2 * 3 * (10 * d + 7 * block),
        "attention": 2 * 2 * d * (5 * 15 * 15 + 2 * 3 * 3),
        # 6 vectors for each stream, 3 for a single block, 2 for a block of the text, 2 for the end; time, guidance and
        # text, and again time and text, two layers each
        "modulation": 2
        * (
            (2 * 12 + 3 * 3 + 2 * 2 + 2) * d * d
            + (2 * (256 + d) + 7 + d) * d
            + ((256 + d) + 10 + d) * d
        ),
    }


NETWORK = Network(
    component=hunyuan_video.TRANSFORMER,
    config=hunyuan_video.HunyuanVideoConfig,
    torch_class=HunyuanVideoTransformer3DModel,
    call=call,
    prepare=exact_times,
    cases={
        "tiny": Case(
            TINY,
            {"latents": (2, 3, 6, 10, 3), "context": (2, 7, 10), "pooled": (2, 7)},
            NUMBERS | {"mask": padded((4, 7))},
            "none",
            "0to2 0to1",
        ),
        "single": Case(
            SINGLE,
            {"latents": (3, 2, 10, 4, 3), "context": (3, 6, 10), "pooled": (3, 7)},
            {
                "sigma": np.float32([0.3, 0.977, 0.01]),
                "guidance": np.float32([6.0, 1.25, 1.0]),
                "mask": padded((6, 1, 5)),
            },
            "blocks",
            "0 0",
            slow=True,
        ),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        # Of blocks, of embedders, and of a single block's projection of heads and hidden layer.
        "mlp": {4 * c.dim, c.dim, 5 * c.dim},
        "modulation": {6 * c.dim, 3 * c.dim, 2 * c.dim},
        "text": {c.text_embed_dim, c.pooled_projection_dim},
        "channels": {c.in_channels, 4 * c.out_channels},
        "head_dim": {c.attention_head_dim},
        "layers": {2, 3},
        None: {1, 2, 256},
    },
    minimal={"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    refused=[
        *(dict(patch_size=1), dict(patch_size_t=2), dict(mlp_ratio=2.0), dict(num_layers=0)),
        *(dict(num_single_layers=0), dict(num_refiner_layers=0), dict(qk_norm="layer_norm")),
        *(dict(guidance_embeds=False), dict(image_condition_type="token_replace")),
        *({"rope_axes_dim": widths} for widths in ((2, 4, 4), (1, 5, 6), (6, 6))),
        dict(joint_attention_dim=10),
    ],
    lora_targets=hunyuan_video.LORA_TARGETS,
    # Tencent-Hunyuan/UniRL, hunyuan_video10_t2v_trainside.yaml.
    targets=(
        [f"attn.{n}" for n in ("to_k", "to_q", "to_v", "to_out.0", "to_add_out")]
        + [f"attn.add_{n}_proj" for n in "kqv"]
        + [f"{net}.net.{layer}" for net in ("ff", "ff_context") for layer in ("0.proj", "2")],
        2 * 12 + 3 * 3 + 2 * 6,
    ),
    flops=[
        Flops(
            (hunyuan_video.HunyuanVideoConfig(**WIDE), (3, 16, 24, 16), 77),
            {
                "context": (1, 77, 256),
                "mask": np.ones((1, 77), bool),
                "pooled": (1, 768),
                "guidance": (1,),
            },
        ),
        Flops(
            (hunyuan_video.HunyuanVideoConfig.from_config(TINY), (2, 4, 6, 3), 3),
            by_hand=by_hand(),
        ),
    ],
)


def encoded(pipe, prompts, tokens):
    """Llama's states behind the template's beginning, without padding, and the state of CLIP's end token."""
    states, pooled, mask = pipe.encode_prompt([*prompts], max_sequence_length=tokens)
    rows = [row[valid].numpy() for row, valid in zip(states, mask.bool(), strict=True)]
    return {"context": rows, "pooled": [*pooled.numpy()]}


def variant(frames: int, guidance: float, true: float) -> Variant:
    """An embedded guidance and two passes."""
    given = dict(guidance_scale=guidance, true_cfg_scale=true)
    return Variant("", guidance, true, given, negative=True, frames=frames)


PIPELINE = Pipeline(
    folder=lambda base, kind: hunyuan_folder(base),
    kinds=("",),
    size=Size(16, 32, 9),
    tokens=41,
    encoded=encoded,
    start=first,
    seen=lambda x: first(x).numpy(),
    variants={
        "9 frames": variant(9, 6.0, 3.0),
        "1 frame": variant(1, 1.0, 4.5),
        "plain": Variant("", 6.0, call=dict(guidance_scale=6.0), frames=5),
    },
    schedules=(
        ("hunyuanvideo-community/HunyuanVideo",),
        [(720, 1280)],
        lambda config, steps, size: dict(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1]),
    ),
    defaults={
        "guidance_scale": lambda f: f.default_guidance,
        "true_cfg_scale": lambda f: 1,
        "height": lambda f: f.default_size().height,
        "width": lambda f: f.default_size().width,
        "num_frames": lambda f: f.default_size().frames,
    },
    default_size=lambda pipe: Size(720, 1280, 129),
    unfit=[Size(16, 28, 9), Size(16, 32, 7), Size(16, 32, 0), Size(16, 32, -3)],
    broken=[
        ("text_encoder/config.json", {"hidden_size": 28}),
        ("text_encoder/config.json", {"architectures": ["LlamaForCausalLM"]}),
        ("text_encoder_2/config.json", {"hidden_size": 10}),
        ("text_encoder_2/config.json", {"max_position_embeddings": 76}),
        ("transformer/config.json", {"out_channels": 5}),
        ("transformer/config.json", {"in_channels": 8, "out_channels": 8}, "vae/config.json"),
        ("vae/config.json", {"temporal_compression_ratio": 8}),
        ("tokenizer/tokenizer_config.json", {"padding_side": "left"}),
        ("model_index.json", {"tokenizer": ["transformers", "CLIPTokenizer"]}),
        ("model_index.json", {"scheduler": ["diffusers", "UniPCMultistepScheduler"]}),
    ],
    most=None,
    needed="text_encoder",
    clip=lambda x: {"num_frames": 1 + 4 * (x.shape[1] - 1)},
)
