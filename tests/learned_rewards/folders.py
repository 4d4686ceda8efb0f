"""Tiny published files: a CLIPModel's folder, open_clip's tensors and an aesthetic head, with their torch modules."""

import itertools
import pathlib
import shutil
from typing import NamedTuple

import numpy as np
import torch
import transformers

from tests.models import parity
from tests.pipelines import ROOT

TOKENIZER = ROOT / "assets" / "shapes-sd3" / "tokenizer"
TOKENS = 12  # its model_max_length
SIZE = 24
WIDTH = 12  # of the embeddings
PROMPTS = [
    "a photo of a red circle",
    "two blue stars",
    "a photo of a green ring above a cross " * 4,
]


class Files(NamedTuple):
    """The files and what torch makes of them."""

    clip: pathlib.Path
    clip_module: transformers.CLIPModel
    hps: pathlib.Path
    hps_module: torch.nn.Module
    head: pathlib.Path
    head_module: torch.nn.Module


class Block(torch.nn.Module):
    """open_clip's ResidualAttentionBlock."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(width)
        self.attn = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Module()
        self.mlp.c_fc = torch.nn.Linear(width, 4 * width)
        self.mlp.c_proj = torch.nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        y = torch.nn.functional.gelu(self.mlp.c_fc(self.ln_2(x)))
        return x + self.mlp.c_proj(y)


class Transformer(torch.nn.Module):
    """open_clip's Transformer."""

    def __init__(self, width: int, layers: int, heads: int):
        super().__init__()
        self.resblocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(torch.nn.Module):
    """open_clip's VisionTransformer."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int, out: int):
        super().__init__()
        self.class_embedding = torch.nn.Parameter(torch.zeros(width))
        self.positional_embedding = torch.nn.Parameter(torch.zeros((size // patch) ** 2 + 1, width))
        self.proj = torch.nn.Parameter(torch.zeros(width, out))
        self.conv1 = torch.nn.Conv2d(3, width, patch, patch, bias=False)
        self.ln_pre = torch.nn.LayerNorm(width)
        self.transformer = Transformer(width, layers, heads)
        self.ln_post = torch.nn.LayerNorm(width)

    def forward(self, pixels):
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x), 1, -1)
        x = torch.cat([first, x], dim=1) + self.positional_embedding
        x = self.transformer(self.ln_pre(x))
        return self.ln_post(x[:, 0]) @ self.proj


class OpenCLIP(torch.nn.Module):
    """open_clip's CLIP, with its names: an oracle of the layout."""

    def __init__(self, vocabulary: int, tokens: int, width: int, visual: Visual, out: int):
        super().__init__()
        self.visual = visual
        self.transformer = Transformer(width, 2, 16)
        self.token_embedding = torch.nn.Embedding(vocabulary, width)
        self.positional_embedding = torch.nn.Parameter(torch.zeros(tokens, width))
        self.ln_final = torch.nn.LayerNorm(width)
        self.text_projection = torch.nn.Parameter(torch.zeros(width, out))
        self.logit_scale = torch.nn.Parameter(torch.zeros(()))

    def encode_text(self, ids):
        length = ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.token_embedding(ids) + self.positional_embedding
        x = self.ln_final(self.transformer(x, mask))
        return x[torch.arange(len(x)), ids.argmax(dim=-1)] @ self.text_projection

    def forward(self, pixels, ids):
        unit = torch.nn.functional.normalize
        return (unit(self.visual(pixels)) * unit(self.encode_text(ids))).sum(-1)


def write(place: pathlib.Path) -> Files:
    """All files."""
    folder = place / "clip"
    shutil.copytree(TOKENIZER, folder)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    clip = parity.randomise(_clip(len(tokenizer), tokenizer.eos_token_id))
    torch.nn.init.constant_(clip.logit_scale, 4.6)  # near log(100), the published
    clip.save_pretrained(folder)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    ).save_pretrained(folder)

    visual = Visual(SIZE, 8, 48, 3, 16, WIDTH)
    hps = parity.randomise(OpenCLIP(len(tokenizer), TOKENS, 32, visual, WIDTH), seed=1)
    torch.save({"epoch": 1, "state_dict": hps.state_dict()}, place / "HPS_v2.1_compressed.pt")

    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(HEAD)]
    for index in (1, 3, 5):
        layers.insert(index, torch.nn.Dropout(0.2))
    head = torch.nn.Module()
    head.layers = torch.nn.Sequential(*layers)
    parity.randomise(head, seed=2)
    torch.save(head.state_dict(), place / "head.pth")
    names = ("HPS_v2.1_compressed.pt", "head.pth")
    return Files(folder, clip, place / names[0], hps, place / names[1], head.layers)


HEAD = (WIDTH, 1024, 128, 64, 16, 1)


def _clip(vocabulary: int, end: int) -> transformers.CLIPModel:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": TOKENS,
        "eos_token_id": end,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": 8,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    return transformers.CLIPModel(config)


def pictures(height: int = 40, width: int = 56, count: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth pictures of bytes, as a generator's are."""
    rng = np.random.default_rng(seed)
    coarse = torch.tensor(rng.random((count, 3, 6, 6), np.float32))
    fine = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return np.uint8(fine.numpy().transpose(0, 2, 3, 1) * 255)
