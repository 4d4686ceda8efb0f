"""A tiny random T5 with its tokenizer, made by transformers, for a pipeline folder."""

import json
import pathlib
import shutil
from collections.abc import Iterable

import tokenizers
import torch
import transformers

from tests.models.parity import randomise

SPECIAL = ("<pad>", "</s>", "<unk>")


def vocabulary(texts: Iterable[str]) -> list[tuple[str, float]]:
    """Pieces with log-probabilities: each letter and each word of the texts, longer words cheaper than their parts."""
    words = sorted({word for text in texts for word in text.split()})
    letters = sorted({letter for word in words for letter in word})
    pieces = [(token, 0.0) for token in SPECIAL] + [("▁", -3.0)]
    pieces += [(letter, -8.0) for letter in letters if letter != "▁"]
    return pieces + [(f"▁{word}", -6.0 - place / 100) for place, word in enumerate(words)]


def backend(pieces: list[tuple[str, float]]) -> tokenizers.Tokenizer:
    """How T5 cuts text, without the token that ends it."""
    found = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.WhitespaceSplit(),
            tokenizers.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
        ]
    )
    return found


def write_tokenizer(folder: pathlib.Path, pieces: list[tuple[str, float]]) -> int:
    """Writes a T5 tokenizer's folder, and returns how many tokens it knows."""
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=5, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def tiny_t5(tokens: int, width: int, kind: str = "T5") -> transformers.PreTrainedModel:
    """A random encoder, a "T5" or "UMT5", for a tokenizer that knows so many tokens."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tokens + 3,
        d_model=width,
        d_kv=6,
        d_ff=24,
        num_layers=3,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        feed_forward_proj="gated-gelu",
    )
    module = randomise(getattr(transformers, f"{kind}EncoderModel")(config), seed=5)
    with torch.no_grad():
        module.shared.weight.mul_(3)
        for name, weight in module.named_parameters():
            if name.endswith(".q.weight"):  # which scales the scores, as in a trained T5
                weight.mul_(config.d_kv**-0.5)
    return module


def add_t5(source: pathlib.Path, target: pathlib.Path, texts: Iterable[str]) -> pathlib.Path:
    """A copy of a Stable Diffusion 3 folder with a T5 whose vocabulary are the words of some texts."""
    shutil.copytree(source, target)
    width = json.loads((source / "transformer" / "config.json").read_text())["joint_attention_dim"]
    tokens = write_tokenizer(target / "tokenizer_3", vocabulary(texts))
    module = tiny_t5(tokens, width)
    module.save_pretrained(target / "text_encoder_3")
    index = json.loads((target / "model_index.json").read_text())
    index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
    # As published folders have it; transformers 5 saves it without "Fast".
    index["tokenizer_3"] = ["transformers", "T5TokenizerFast"]
    (target / "model_index.json").write_text(json.dumps(index))
    return target
