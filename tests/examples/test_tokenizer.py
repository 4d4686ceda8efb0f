import functools
import unicodedata

import pytest
from transformers import CLIPTokenizer, CLIPTokenizerFast

from examples.shapes.captions import heldout_records, train_records
from examples.shapes.tokenizer import build_tokenizer

LENGTH = 16


@functools.cache
def tokenizer() -> CLIPTokenizer:
    return build_tokenizer([record["prompt"] for record in train_records()], LENGTH)


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False, truncation=True, max_length=999)["input_ids"]


def test_every_word_of_the_shapes_world_is_one_token():
    words = {word for r in train_records() + heldout_records() for word in r["prompt"].split()}
    assert len(words) > 30
    assert {word: len(ids(word)) for word in words} == dict.fromkeys(words, 1)


def test_every_caption_fits():
    longest = max(len(ids(r["prompt"])) for r in train_records() + heldout_records())
    assert longest <= LENGTH - 2


@pytest.mark.parametrize(
    "text", ["Red circle, left-of a BLUE square!", "Ünïcödé 🙂 xyz", "zebra's\t1a2", "日本 語", ""]
)
def test_any_text_comes_back_from_its_bytes(text):
    """But for case and spaces, which CLIP's tokenizer does not keep."""
    plain = unicodedata.normalize("NFC", text).lower()
    assert tokenizer().decode(ids(text)).replace(" ", "") == "".join(plain.split())


def test_ids_are_framed_padded_and_cut():
    begin, end = tokenizer().bos_token_id, tokenizer().eos_token_id
    assert (begin, end) == (len(tokenizer()) - 2, len(tokenizer()) - 1)
    framed = functools.partial(
        tokenizer(), padding="max_length", truncation=True, max_length=LENGTH
    )
    assert framed("a red circle")["input_ids"] == [begin, *ids("a red circle")] + [end] * 12
    assert framed("red " * 99)["input_ids"] == [begin, *ids("red") * 14, end]
    assert framed("")["input_ids"] == [begin] + [end] * 15


def test_transformers_loads_what_is_saved(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    for loader in (CLIPTokenizer, CLIPTokenizerFast):
        loaded = loader.from_pretrained(tmp_path)
        assert loaded.model_max_length == LENGTH
        assert {"red", "stars", "above"} <= {*loaded.init_kwargs["words"]}
        for text in ("a photo of two Blue stars", "Ünïcödé 🙂"):
            assert loaded(text)["input_ids"] == tokenizer()(text)["input_ids"]
