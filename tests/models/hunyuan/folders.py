"""A tiny random folder of HunyuanVideo, made by diffusers and transformers."""

import pathlib

import diffusers
import transformers
from tokenizers import Tokenizer, processors

from digen_jax.models.hunyuan_video.family import HunyuanVideo
from examples.shapes.networks import build_clip_tokenizer
from tests.models.folders import WORDS
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
