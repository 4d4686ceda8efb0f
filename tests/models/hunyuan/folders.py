"""Tiny random folders of HunyuanVideo and 1.5, made by diffusers and transformers."""

import pathlib

import diffusers
import transformers
from tokenizers import Tokenizer, processors

from digen_jax.models.hunyuan_video.family import HunyuanVideo
from digen_jax.models.hunyuan_video.family15 import HunyuanVideo15
from examples.shapes.networks import build_clip_tokenizer
from tests.models.folders import WORDS, qwen_tokenizer
from tests.models.parity import randomise
from tests.models.text import tiny_tokenizer
from tests.tiny_runs import once

CHANNELS, CONTEXT, POOLED = 4, 24, 12
TRANSFORMER = dict(in_channels=CHANNELS, out_channels=CHANNELS, num_layers=2, num_single_layers=2)
TRANSFORMER |= dict(num_refiner_layers=2, num_attention_heads=4, attention_head_dim=8)
TRANSFORMER |= dict(text_embed_dim=CONTEXT, pooled_projection_dim=POOLED, rope_axes_dim=(2, 2, 4))
VAE = dict(block_out_channels=(4, 6, 6), layers_per_block=1, latent_channels=CHANNELS)
VAE |= dict(norm_num_groups=2, scaling_factor=0.7, spatial_compression_ratio=4)
VAE |= {f"{way.lower()}_block_types": (f"HunyuanVideo{way}Block3D",) * 3 for way in ("Down", "Up")}
ENCODER = dict(hidden_size=CONTEXT, intermediate_size=28, num_hidden_layers=4, head_dim=6)
ENCODER |= dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
ENCODER |= dict(rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
CLIP = dict(hidden_size=POOLED, intermediate_size=20, projection_dim=8, num_hidden_layers=2)
CLIP |= dict(num_attention_heads=2, max_position_embeddings=77)
SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<pad>"]


def llama3_backend() -> Tokenizer:
    """Of Llama 3: a start token, and the words of the template, which are 95 tokens before the prompt."""
    found = tiny_tokenizer.backend(500, (HunyuanVideo.template,), SPECIAL)
    start = SPECIAL[0]
    found.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, found.token_to_id(start))]
    )
    return found


def hunyuan_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder, which test processes share."""
    return once(base / "tiny-hunyuan-video", _write)


def _write(folder: pathlib.Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=llama3_backend(), bos_token=SPECIAL[0], pad_token=SPECIAL[-1]
    )
    llama = transformers.LlamaConfig(vocab_size=len(tokenizer) + 5, **ENCODER)
    of_clip = build_clip_tokenizer(WORDS, 77)
    ids = {
        f"{name}_token_id": getattr(of_clip, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    clip = transformers.CLIPTextConfig(vocab_size=len(of_clip), **CLIP, **ids)
    diffusers.HunyuanVideoPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=randomise(diffusers.AutoencoderKLHunyuanVideo(**VAE), seed=1),
        text_encoder=randomise(transformers.LlamaModel(llama), seed=2),
        tokenizer=tokenizer,
        text_encoder_2=randomise(transformers.CLIPTextModel(clip), seed=4),
        tokenizer_2=of_clip,
        transformer=randomise(diffusers.HunyuanVideoTransformer3DModel(**TRANSFORMER), seed=3),
    ).save_pretrained(folder)


# ------------------------------------------------------------------------------ HunyuanVideo 1.5

TRANSFORMER_15 = dict(in_channels=2 * CHANNELS + 1, out_channels=CHANNELS, num_layers=2)
TRANSFORMER_15 |= dict(num_refiner_layers=2, num_attention_heads=4, attention_head_dim=8)
TRANSFORMER_15 |= dict(text_embed_dim=CONTEXT, text_embed_2_dim=POOLED, image_embed_dim=6)
TRANSFORMER_15 |= dict(rope_axes_dim=(2, 2, 4), task_type="t2v")
VAE_15 = dict(block_out_channels=(4, 8, 8), layers_per_block=1, latent_channels=CHANNELS)
VAE_15 |= dict(spatial_compression_ratio=4, scaling_factor=0.7)
QWEN = dict(hidden_size=CONTEXT, intermediate_size=28, num_hidden_layers=4, pad_token_id=None)
QWEN |= dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
QWEN |= dict(
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 1]}
)
BYT5 = dict(vocab_size=384, d_model=POOLED, d_kv=4, d_ff=20, num_layers=2, num_heads=3)
BYT5 |= dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def hunyuan15_folder(base: pathlib.Path) -> pathlib.Path:
    """The folder of 1.5, which test processes share."""
    return once(base / "tiny-hunyuan-video-15", _write_15)


def _write_15(folder: pathlib.Path) -> None:
    """The tokenizer has the template's words, which are 108 tokens before the prompt, as in the published one."""
    tokenizer = qwen_tokenizer(folder, size=600, texts=(HunyuanVideo15.template,))
    qwen = transformers.Qwen2_5_VLTextConfig(vocab_size=len(tokenizer) + 5, **QWEN)
    diffusers.HunyuanVideo15Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=randomise(diffusers.AutoencoderKLHunyuanVideo15(**VAE_15), seed=1),
        text_encoder=randomise(transformers.Qwen2_5_VLTextModel(qwen), seed=2),
        tokenizer=tokenizer,
        text_encoder_2=randomise(
            transformers.T5EncoderModel(transformers.T5Config(**BYT5)), seed=4
        ),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=randomise(diffusers.HunyuanVideo15Transformer3DModel(**TRANSFORMER_15), seed=3),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    ).save_pretrained(folder)
