"""HunyuanVideo 1.5 in the tests that all families share."""

import diffusers
import numpy as np
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from digen_jax.models.family import Size
from digen_jax.models.hunyuan_video import network15 as hunyuan_video
from tests.models import parity
from tests.models.families import STEPS, Pipeline, Variant, first
from tests.models.hunyuan.folders import hunyuan15_folder
from tests.models.networks import Case, Flops, Network, padded

TINY = dict(in_channels=7, out_channels=3, num_layers=2, num_refiner_layers=2)
TINY |= dict(attention_head_dim=12, num_attention_heads=3, rope_axes_dim=(2, 4, 6))
TINY |= dict(text_embed_dim=10, text_embed_2_dim=7, image_embed_dim=5)


def call(model, latents, sigma, context, mask, glyphs, glyph_mask):
    """Channels first, without an image; time from 0 to 1000."""
    x = latents.permute(0, 4, 1, 2, 3).to(model.dtype)
    empty = x.new_zeros(len(x), x.shape[1] + 1, *x.shape[2:])
    v = model(
        hidden_states=torch.cat([x, empty], dim=1),
        timestep=(sigma * 1000).to(model.dtype),
        encoder_hidden_states=context.to(model.dtype),
        encoder_attention_mask=mask.to(model.dtype),
        encoder_hidden_states_2=glyphs.to(model.dtype),
        encoder_attention_mask_2=glyph_mask.to(model.dtype),
        image_embeds=x.new_zeros(len(x), 4, model.config.image_embed_dim),
    ).sample
    return v.permute(0, 2, 3, 4, 1).float()


def exact_times(module):
    """Of both embeddings."""
    module.time_embed.time_proj.forward = parity.time_features
    module.context_embedder.time_text_embed.time_proj.forward = parity.time_features


def by_hand(d: int = 36, block: int = 12 * 36 * 36) -> dict[str, float]:
    """Width 36; 2 blocks, and 2 of the text, of q k v out and a feed-forward to 4 d and back.

    2 frames of 24 latents, 3 tokens of text, 256 of quoted text.
    """
    return {
        "image": 2 * 48 * ((7 + 3) * d + 2 * block),
        "text": 2
        * (
            (3 + 256) * 2 * block
            + 3 * (10 * d + 2 * block)
            + 256 * (7 * 2048 + 2048 * 2048 + 2048 * d)
        ),
        "attention": 2 * 2 * d * (2 * (48 + 3 + 256) ** 2 + 2 * 3 * 3),
        # 6 vectors for each stream, 2 for a block of the text, 2 for the end; time, and again time and text
        "modulation": 2 * ((2 * 12 + 2 * 2 + 2) * d * d + (2 * (256 + d) + 10 + d) * d),
    }


NETWORK = Network(
    component=hunyuan_video.TRANSFORMER,
    config=hunyuan_video.HunyuanVideo15Config,
    torch_class=HunyuanVideo15Transformer3DModel,
    call=call,
    prepare=exact_times,
    cases={
        # Texts of several lengths beside quoted ones, of which one is none.
        "tiny": Case(
            TINY,
            {"latents": (3, 3, 3, 5, 3), "context": (3, 7, 10), "glyphs": (3, 4, 7)},
            {
                "sigma": np.float32([0.3, 0.977, 0.01]),
                "mask": padded((4, 7, 1)),
                "glyph_mask": padded((4, 0, 2)),
            },
            "blocks",
            "0to1",
        ),
    },
    sizes=lambda c: {
        "embed": {c.dim},
        "heads": {c.dim},
        "mlp": {4 * c.dim, c.dim, hunyuan_video.GLYPH_HIDDEN},
        "modulation": {6 * c.dim, 2 * c.dim},
        "text": {c.text_embed_dim, c.text_embed_2_dim, c.image_embed_dim},
        "channels": {c.in_channels, c.out_channels},
        "head_dim": {c.attention_head_dim},
        "layers": {2},
        None: {1, 3, 256, hunyuan_video.GLYPH_HIDDEN, c.image_embed_dim},
    },
    minimal={"num_layers": 1, "num_refiner_layers": 1},
    refused=[
        *(dict(patch_size=2), dict(patch_size_t=2), dict(mlp_ratio=2.0), dict(num_layers=0)),
        *(dict(num_refiner_layers=0), dict(qk_norm="layer_norm"), dict(use_meanflow=True)),
        *(dict(target_size=480), dict(task_type="v2v")),
        *({"rope_axes_dim": widths} for widths in ((2, 4, 4), (1, 5, 6), (6, 6))),
        dict(pooled_projection_dim=10),
    ],
    lora_targets=hunyuan_video.LORA_TARGETS,
    # Tencent-Hunyuan/UniRL, hunyuan_video15_t2v_dancegrpo_trainside.yaml.
    targets=(
        [f"attn.{n}" for n in ("to_k", "to_q", "to_v", "to_out.0", "to_add_out")]
        + [f"attn.add_{n}_proj" for n in "kqv"]
        + [f"{net}.net.{layer}" for net in ("ff", "ff_context") for layer in ("0.proj", "2")],
        2 * 12 + 2 * 6,
    ),
    exact={"sigma": np.float32([0.25, 0.5, 0.75])},
    # The compiler drops the last block's text, which is most of a network that it counts.
    flops=[
        Flops(
            (hunyuan_video.HunyuanVideo15Config.from_config(TINY), (2, 4, 6, 3), 3),
            by_hand=by_hand(),
        ),
    ],
)


class Pipeline15(Pipeline):
    """Its pipeline takes tokens and guidance from attributes, and calls nothing back."""

    def call(self, pipe, prompts, x, guidance_scale=1.0, **given):
        """Latents after each step, and clips."""
        latents, step = [], pipe.scheduler.step

        def keep(*arguments, **options):
            found = step(*arguments, **options)
            latents.append(found[0].numpy())
            return found

        pipe.scheduler.step = keep
        pipe.guider = diffusers.ClassifierFreeGuidance(guidance_scale=guidance_scale)
        pipe.tokenizer_max_length = self.tokens
        pipe.vae.enable_slicing()  # its attention fails for several clips
        size = dict(height=self.size.height, width=self.size.width, **self.clip(x))
        try:
            found = pipe(
                prompt=[*prompts],
                **{"num_inference_steps": STEPS} | given | size,
                latents=first(np.asarray(x)),
                output_type="np",
            )
        finally:
            del pipe.scheduler.step
        return latents, found.frames


def encoded(pipe, prompts, tokens):
    """The chat's states behind the template's beginning and those of quoted text, without padding."""
    pipe.tokenizer_max_length = tokens
    states = pipe.encode_prompt([*prompts], batch_size=len(prompts))
    named = {"context": states[:2], "glyphs": states[2:]}
    return {
        name: [row[valid].numpy() for row, valid in zip(rows, mask.bool(), strict=True)]
        for name, (rows, mask) in named.items()
    }


def variant(frames: int, guidance: float) -> Variant:
    """Two passes."""
    given = dict(guidance_scale=guidance)
    return Variant("", guidance, call=given, negative=True, frames=frames)


PIPELINE = Pipeline15(
    folder=lambda base, kind: hunyuan15_folder(base),
    kinds=("",),
    size=Size(16, 32, 9),
    tokens=41,
    encoded=encoded,
    start=first,
    seen=lambda x: first(x).numpy(),
    variants={
        "9 frames": variant(9, 3.0),
        "plain": Variant("", 1.0, call=dict(guidance_scale=1.0), frames=5),
    },
    schedules=(
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",),
        [(480, 848)],
        lambda config, steps, size: dict(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1]),
    ),
    defaults={"num_frames": lambda f: f.default_size().frames},
    # Of the published autoencoder.
    default_size=lambda pipe: Size(
        *HunyuanVideo15ImageProcessor(vae_scale_factor=16).calculate_default_height_width(
            *(9, 16, pipe.target_size)
        ),
        121,
    ),
    unfit=[Size(16, 30, 9), Size(16, 32, 7), Size(16, 32, 0), Size(16, 32, -3)],
    broken=[
        ("text_encoder/config.json", {"hidden_size": 28}),
        ("text_encoder/config.json", {"architectures": ["Qwen3Model"]}),
        ("text_encoder_2/config.json", {"d_model": 10}),
        ("transformer/config.json", {"use_meanflow": True}),
        ("transformer/config.json", {"in_channels": 8}),
        ("transformer/config.json", {"in_channels": 17, "out_channels": 8}, "vae/config.json"),
        ("vae/config.json", {"temporal_compression_ratio": 8}),
        ("guider/guider_config.json", {"guidance_rescale": 0.5}),
        ("guider/guider_config.json", {"guidance_scale": 0}),
        ("tokenizer/tokenizer_config.json", {"padding_side": "left"}),
        ("tokenizer_2/tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}),
        ("model_index.json", {"guider": ["diffusers", "AdaptiveProjectedGuidance"]}),
        ("model_index.json", {"scheduler": ["diffusers", "UniPCMultistepScheduler"]}),
    ],
    most=None,
    tokens_by_default=lambda pipe: 1000,  # diffusers' `tokenizer_max_length`
    needed="text_encoder",
    clip=lambda x: {"num_frames": 1 + 4 * (x.shape[1] - 1)},
)
