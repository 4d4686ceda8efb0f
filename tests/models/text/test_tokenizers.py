"""Tokenizers of language models and of T5 against transformers'."""

import dataclasses
import json
import re

import numpy as np
import pytest
import transformers

from digen_jax.models.text import tokenizers
from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.text.language_model import LanguageModelConfig
from digen_jax.models.text.t5 import T5Config
from digen_jax.models.text.tokenizers import longer, padded
from examples.shapes.networks import build_clip_tokenizer
from tests.models.sd3.t5_folders import backend, vocabulary, write_tokenizer
from tests.models.text import tiny_tokenizer
from tests.models.text.test_language_model import QWEN3

CONFIG = {**QWEN3, "vocab_size": 303}
ENCODER = LanguageModelConfig.from_config(CONFIG)
LENGTH = 48
PROMPTS = [
    "",
    "a photo of a red circle",
    "a red circle left of a blue square and " * 5 + "a star",
    "Ein Grün, e\u0301té \u2028 圆形 🟥 {braces} <|im_end|> %s",
    "  two   spaces\n\tand 12345",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizers")
    new = tiny_tokenizer.save(path / "new")
    return {"tokenizer.json": new, "vocab.json": tiny_tokenizer.in_old_files(new, path / "old")}


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json"])
@pytest.mark.parametrize(("thinking", "side"), [(True, "right"), (False, "left")])
def test_tokens_are_those_of_transformers(folders, tmp_path, files, thinking, side):
    """Cut at the side that the tokenizer names."""
    new, old = (
        changed(folders[name], tmp_path / name, "tokenizer_config.json", truncation_side=side)
        for name in ("tokenizer.json", files)
    )
    ours = tokenizers.read_language_model(old, ENCODER, LENGTH, chats=True)
    expected = transformers.AutoTokenizer.from_pretrained(new)
    texts = tokenizers.chat(ours, PROMPTS, thinking)
    thought = "" if thinking else "<think>\n\n</think>\n\n"
    by_hand = [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{thought}"
        for prompt in PROMPTS
    ]
    assert texts == by_hand
    ids, mask = padded(ours, texts, LENGTH)
    options = dict(padding="max_length", truncation=True, max_length=LENGTH)
    theirs = expected(by_hand, **options, return_tensors="np")
    np.testing.assert_array_equal(ids, theirs["input_ids"])
    np.testing.assert_array_equal(mask, theirs["attention_mask"])
    assert len(set(mask.sum(axis=1).tolist())) >= 4 and mask.all(axis=1).any()
    cut = longer([(ours, LENGTH)], texts)
    whole = [len(row) > LENGTH for row in expected(by_hand)["input_ids"]]
    assert cut.tolist() == whole and any(whole) and not all(whole)
    again, _ = padded(ours, texts, LENGTH)
    np.testing.assert_array_equal(again, ids)
    # A prompt without its longer neighbour.
    alone, _ = padded(ours, texts[:1], LENGTH)
    np.testing.assert_array_equal(alone, ids[:1])


def changed(folder, path, name, **fields):
    """A copy of a folder with other fields in a JSON file; None removes one."""
    path.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / name).read_text()) | fields
    config = {field: value for field, value in config.items() if value is not None}
    (path / name).write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer_class": "GemmaTokenizer"}, "tokenizer_class must be one of .*GemmaTokenizer"),
        ({"tokenizer_class": None}, "tokenizer_class must be one of .*None"),
        ({"padding_side": "left"}, "padding_side must be 'right' and is 'left'"),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": None}, "pad_token"),
    ],
    ids=str,
)
def test_a_field_that_does_not_fit_is_named(folders, tmp_path, fields, message):
    folder = changed(folders["tokenizer.json"], tmp_path, "tokenizer_config.json", **fields)
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
        tokenizers.read_language_model(folder, ENCODER, LENGTH)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", None, r"tokenizer_config\.json is missing"),
        ("tokenizer.json", None, r"no vocabulary: tokenizer\.json is missing, and so is vocab"),
        ("tokenizer.json", "{", r"tokenizer\.json is not JSON"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("chat_template.jinja", None, r"no chat template: chat_template\.jinja is missing"),
        ("chat_template.jinja", "{{ messages", "chat template in .* cannot be used"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "chat template in .*"),
    ],
    ids=str,
)
def test_a_missing_or_broken_file_is_named(folders, tmp_path, file, content, message):
    folder = changed(folders["tokenizer.json"], tmp_path, "tokenizer_config.json")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        tokenizers.read_language_model(folder, ENCODER, LENGTH, chats=True)


def test_a_template_is_only_needed_for_chats(folders, tmp_path):
    folder = changed(folders["tokenizer.json"], tmp_path, "tokenizer_config.json")
    (folder / "chat_template.jinja").unlink()
    assert len(tokenizers.read_language_model(folder, ENCODER, LENGTH)) == 303


def test_more_tokens_than_the_encoder_has_are_refused(folders):
    encoder = LanguageModelConfig.from_config({**CONFIG, "vocab_size": 302})
    with pytest.raises(ValueError, match="vocab_size of its text encoder is 302"):
        tokenizers.read_language_model(folders["tokenizer.json"], encoder, LENGTH)


def test_another_models_tokenizer_is_refused(folders, tmp_path):
    """One without a mark of the template, and one that divides a template into other tokens."""
    folder = changed(folders["tokenizer.json"], tmp_path, "tokenizer_config.json")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<start_of_turn>"))
    sentence = f"the tokenizer in {folder} has no token <|im_start|>, which the template of prompts"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tokenizers.read_language_model(folder, ENCODER, LENGTH, chats=True)
    head = "<|im_start|>user\n"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tokenizers.read_language_model(folder, ENCODER, LENGTH, head=(head, 3))
    whole = folders["tokenizer.json"]
    assert len(tokenizers.read_language_model(whole, ENCODER, LENGTH, head=(head, 3))) == 303
    with pytest.raises(ValueError, match="returns 3 tokens for the start of the model's template"):
        tokenizers.read_language_model(whole, ENCODER, LENGTH, head=(head, 4))
    large = dataclasses.replace(ENCODER, vocab_size=607)
    with pytest.raises(ValueError, match=r"has 303 tokens, but vocab_size .* is 607: they do not"):
        tokenizers.read_language_model(whole, large, LENGTH)


# ------------------------------------------------------------------------------------------------ T5


TEXTS = ["a photo of two blue squares", "schräg größer ☃", "a green star"]
T5_PROMPTS = [
    "a photo of two blue squares",
    "",
    "  ",
    "a  green\tstar\n",
    "Schräg ☃☃ unknown 日本",
    "a photo of two blue squares and a green star above a photo of two squares",
]
PIECES = vocabulary(TEXTS)
T5_LENGTH = 17


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, PIECES)
    return path


def t5_encoder(vocab_size: int = 60) -> T5Config:
    return T5Config(vocab_size=vocab_size)


def test_ids_are_those_of_the_vocabulary_cut_and_padded(t5_folder):
    tokenizer = tokenizers.read_t5(t5_folder, t5_encoder())
    ids, mask = padded(tokenizer, T5_PROMPTS, T5_LENGTH)
    assert (ids.shape, ids.dtype, mask.dtype) == ((len(T5_PROMPTS), T5_LENGTH), np.int32, bool)
    lengths = []
    for row, attended, prompt in zip(ids, mask, T5_PROMPTS, strict=True):
        words = backend(PIECES).encode(prompt).ids
        expected = [
            *words[: T5_LENGTH - 1],
            1,
        ]  # cut after the words, not after the token that ends them
        lengths.append(len(words) + 1)
        assert row.tolist() == expected + [0] * (T5_LENGTH - len(expected))
        assert attended.tolist() == [place < len(expected) for place in range(T5_LENGTH)]
    assert max(lengths) > T5_LENGTH and min(lengths) == 1 and len(set(lengths)) > 3
    assert 2 in ids[4]
    again, _ = padded(tokenizer, T5_PROMPTS[:1], 40)
    np.testing.assert_array_equal(again[0, :T5_LENGTH], ids[0])


def test_tokens_that_a_text_names_are_transformers(t5_folder):
    tokenizer = tokenizers.read_t5(t5_folder, t5_encoder())
    ids = padded(tokenizer, ["a <extra_id_0> star </s> a"], 8)[0][0].tolist()
    a, star = ([piece for piece, _ in PIECES].index(piece) for piece in ("▁a", "▁star"))
    extra = ids[1]
    assert ids == [a, extra, star, 1, a, 1, 0, 0]
    assert extra >= len(PIECES)  # the extra tokens are behind the vocabulary


@pytest.mark.parametrize("size", [9, 100])
def test_a_tokenizer_that_does_not_fit_is_named(t5_folder, size):
    with pytest.raises(ValueError, match=f"vocab_size of its text encoder is {size}"):
        tokenizers.read_t5(t5_folder, t5_encoder(size))


def test_another_models_tokenizer_is_no_t5(t5_folder, tmp_path):
    """A CLIP's: under its own name, and under that of a T5."""
    build_clip_tokenizer(TEXTS, 12).save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(ValueError, match=r"tokenizer_class must be one of T5Tokenizer, .*'CLIPTok"):
        tokenizers.read_t5(tmp_path, t5_encoder(900))
    config.write_text(config.read_text().replace("CLIPTokenizer", "T5Tokenizer"))
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        tokenizers.read_t5(tmp_path, t5_encoder(900))
    config.write_text(config.read_text().replace("T5Tokenizer", "GemmaTokenizer"))
    clip = CLIPTextConfig(vocab_size=900)
    with pytest.raises(ValueError, match=r"tokenizer_class must be one of CLIPTokenizer, .*'Gemma"):
        tokenizers.read_clip(tmp_path, clip)
