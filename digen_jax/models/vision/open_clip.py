"""Conversion of open_clip's tensors of a CLIP with two transformers to transformers' CLIPModel.

The source names are those of open_clip's `CLIP` (src/open_clip/model.py and transformer.py, 89fb801) and its copies in
other repositories: queries, keys and values are one matrix, and projections are not transposed.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from digen_jax.models.text.clip_text import LEGACY_EOS, CLIPTextConfig
from digen_jax.models.vision.clip import CLIPConfig, CLIPVisionConfig

# Buffer in old files: the mask of causal attention.
IGNORED = ("attn_mask",)

NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
}
PROJECTIONS = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}
NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
IN_PROJECTION = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")
PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the same tensors in transformers' layout, as views; unknown names are unchanged."""
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        module, _, leaf = name.rpartition(".")
        if name in NAMES:
            found[NAMES[name]] = array
        elif name in PROJECTIONS:
            found[PROJECTIONS[name]] = array.T
        elif module in NORMS:
            found[f"{NORMS[module]}.{leaf}"] = array
        elif match := IN_PROJECTION.fullmatch(name):
            tower, layer, leaf = match.groups()
            thirds = np.array_split(array, 3)
            for part, third in zip("qkv", thirds, strict=True):
                found[f"{_layer(tower, layer)}.self_attn.{part}_proj.{leaf}"] = third
        elif (match := LAYER.fullmatch(name)) and match[3] in PARTS:
            tower, layer, part, leaf = match.groups()
            found[f"{_layer(tower, layer)}.{PARTS[part]}.{leaf}"] = array
        else:
            found[name] = array
    return found


def _layer(tower: str | None, number: str) -> str:
    return f"{'vision' if tower else 'text'}_model.encoder.layers.{number}"


def config_of(arrays: Mapping[str, np.ndarray], heads: int) -> CLIPConfig:
    """Infers the configuration from the shapes of open_clip's tensors; activations are exact GELUs.

    Args:
      arrays: Tensors by open_clip's names.
      heads: Attention heads of both towers, which shapes do not determine.

    Raises:
      ValueError: a tensor is missing, or its shape fits no CLIP.
    """

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in arrays or arrays[name].ndim != dimensions:
            found = arrays[name].shape if name in arrays else "missing"
            raise ValueError(f"tensor {name} must have {dimensions} dimensions, and is {found}")
        return arrays[name].shape

    def tower(prefix: str) -> dict[str, Any]:
        layers = {m[2] for m in map(LAYER.fullmatch, arrays) if m and (m[1] or "") == prefix}
        if not layers:
            raise ValueError(f"there are no tensors {prefix}transformer.resblocks")
        hidden, width = shape(f"{prefix}transformer.resblocks.0.mlp.c_fc.weight", 2)
        return {
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_hidden_layers": len(layers),
            "num_attention_heads": heads,
            "hidden_act": "gelu",
            "projection_dim": shape("text_projection", 2)[1],
        }

    patch = shape("visual.conv1.weight", 4)[2]
    side = round((shape("visual.positional_embedding", 2)[0] - 1) ** 0.5)
    vision = {"patch_size": patch, "image_size": patch * side}
    text = {
        "vocab_size": shape("token_embedding.weight", 2)[0],
        "max_position_embeddings": shape("positional_embedding", 2)[0],
        "eos_token_id": LEGACY_EOS,  # open_clip pools at the largest id, too
    }
    return CLIPConfig(
        text=CLIPTextConfig.from_config(tower("") | text),
        vision=CLIPVisionConfig.from_config(tower("visual.") | vision),
    )
