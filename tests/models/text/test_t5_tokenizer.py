import json

import numpy as np
import pytest

from digen_jax.models.text import tokenizers
from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.text.t5 import T5Config
from digen_jax.models.text.tokenizers import padded
from examples.shapes.tokenizer import build_tokenizer
from tests.models.sd3.t5_folders import backend, vocabulary, write_tokenizer

TEXTS = ["a photo of two blue squares", "schräg größer ☃", "a green star"]
PROMPTS = [
    "a photo of two blue squares",
    "",
    "  ",
    "a  green\tstar\n",
    "Schräg ☃☃ unknown 日本",
    "a photo of two blue squares and a green star above a photo of two squares",
]
PIECES = vocabulary(TEXTS)
LENGTH = 17


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, PIECES)
    return path


def encoder(vocab_size: int = 60) -> T5Config:
    return T5Config(vocab_size=vocab_size)


def test_ids_are_those_of_the_vocabulary_cut_and_padded(folder):
    tokenizer = tokenizers.read_t5(folder, encoder())
    ids, mask = padded(tokenizer, PROMPTS, LENGTH)
    assert (ids.shape, ids.dtype, mask.dtype) == ((len(PROMPTS), LENGTH), np.int32, bool)
    lengths = []
    for row, attended, prompt in zip(ids, mask, PROMPTS, strict=True):
        words = backend(PIECES).encode(prompt).ids
        expected = [
            *words[: LENGTH - 1],
            1,
        ]  # cut after the words, not after the token that ends them
        lengths.append(len(words) + 1)
        assert row.tolist() == expected + [0] * (LENGTH - len(expected))
        assert attended.tolist() == [place < len(expected) for place in range(LENGTH)]
    assert max(lengths) > LENGTH and min(lengths) == 1 and len(set(lengths)) > 3
    assert 2 in ids[4]
    again, _ = padded(tokenizer, PROMPTS[:1], 40)
    np.testing.assert_array_equal(again[0, :LENGTH], ids[0])


def test_tokens_that_a_text_names_are_transformers(folder):
    tokenizer = tokenizers.read_t5(folder, encoder())
    ids = padded(tokenizer, ["a <extra_id_0> star </s> a"], 8)[0][0].tolist()
    a, star = ([piece for piece, _ in PIECES].index(piece) for piece in ("▁a", "▁star"))
    extra = ids[1]
    assert ids == [a, extra, star, 1, a, 1, 0, 0]
    assert extra >= len(PIECES)  # the extra tokens are behind the vocabulary


def test_a_tokenizer_that_does_not_fit_or_is_broken_is_named(folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"has ids up to \d+, but vocab_size of its text encoder is 9: they"
    ):
        tokenizers.read_t5(folder, encoder(9))
    with pytest.raises(
        ValueError, match=r"has \d+ tokens, but vocab_size of its text encoder is 100:"
    ):
        tokenizers.read_t5(folder, encoder(100))
    with pytest.raises(ValueError, match=r"tokenizer_config.json is missing"):
        tokenizers.read_t5(tmp_path, encoder())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no vocabulary: tokenizer.json is missing$"):
        tokenizers.read_t5(tmp_path, encoder())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is not JSON"):
        tokenizers.read_t5(tmp_path, encoder())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(ValueError, match="cannot be read"):
        tokenizers.read_t5(tmp_path, encoder())


def test_another_models_tokenizer_is_refused(folder, tmp_path):
    """A CLIP's: under its own name, and under that of a T5."""
    build_tokenizer(TEXTS, 12).save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(ValueError, match=r"tokenizer_class must be one of T5Tokenizer, .*'CLIPTok"):
        tokenizers.read_t5(tmp_path, encoder(900))
    config.write_text(config.read_text().replace("CLIPTokenizer", "T5Tokenizer"))
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        tokenizers.read_t5(tmp_path, encoder(900))
    config.write_text(config.read_text().replace("T5Tokenizer", "GemmaTokenizer"))
    clip = CLIPTextConfig(vocab_size=900)
    with pytest.raises(ValueError, match=r"tokenizer_class must be one of CLIPTokenizer, .*'Gemma"):
        tokenizers.read_clip(tmp_path, clip)
