import contextlib
import dataclasses
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers import Flux2KleinPipeline

from digen_jax.models.text import tokenizers
from digen_jax.models.text.language_model import LISTS, LanguageModel, LanguageModelConfig
from digen_jax.models.text.tokenizers import longer, padded
from tests.models import parity
from tests.models.text import tiny_tokenizer
from tests.models.text.test_language_model import QWEN3, read_by, shapes, torch_module
from tests.pipelines import ROOT

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
@pytest.mark.parametrize("thinking", [True, False])
def test_tokens_are_those_of_transformers(folders, files, thinking):
    ours = tokenizers.read_language_model(folders[files], ENCODER, LENGTH, chats=True)
    expected = transformers.AutoTokenizer.from_pretrained(folders["tokenizer.json"])
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


def test_embeddings_of_prompts_equal_the_pipelines_padding_included(folders, tmp_path):
    """FLUX.2 klein's function, which stacks three states of all tokens; long prompts lose their first tokens."""
    new, old = (
        changed(folder, tmp_path / folder.name, "tokenizer_config.json", truncation_side="left")
        for folder in folders.values()
    )
    module = parity.randomise(torch_module(CONFIG))
    theirs = Flux2KleinPipeline._get_qwen3_prompt_embeds(
        module,
        transformers.AutoTokenizer.from_pretrained(new),
        PROMPTS,
        max_sequence_length=LENGTH,
        hidden_states_layers=(1, 3, 4),
    )
    tokenizer = tokenizers.read_language_model(old, ENCODER, LENGTH, chats=True)
    texts = tokenizers.chat(tokenizer, PROMPTS, thinking=False)
    tokens = padded(tokenizer, texts, LENGTH)
    ids = tokenizer(texts[2])["input_ids"]
    assert len(ids) > LENGTH and tokens[0][2].tolist() == ids[-LENGTH:]
    model = LanguageModel(ENCODER, (1, 3, 4))
    params = parity.to_flax(read_by(module, model), shapes(model), LISTS)
    with jax.default_matmul_precision("highest"):
        states = jax.jit(model.apply)({"params": params}, *tokens)
    actual = jnp.stack(states, axis=2).reshape(len(PROMPTS), LENGTH, -1)
    assert parity.worst([actual], [theirs.detach().numpy()])[0] < 1e-5


def test_no_torch_is_imported(folders):
    code = (
        "import pathlib, sys\n"
        "from digen_jax.models.text import language_model, tokenizers as tokens\n"
        "from digen_jax.models.text.tokenizers import padded\n"
        f"config = language_model.LanguageModelConfig.from_config({CONFIG})\n"
        f"tokenizer = tokens.read_language_model(pathlib.Path({str(folders['tokenizer.json'])!r}), config, 5, True)\n"
        "padded(tokenizer, tokens.chat(tokenizer, ['a'], True), 5)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert torch.__version__  # it is installed, so that it could be imported
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


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
        (
            {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": None},
            "pad_token is missing",
        ),
    ],
    ids=str,
)
def test_a_field_that_does_not_fit_is_named(folders, tmp_path, fields, message):
    folder = changed(folders["tokenizer.json"], tmp_path, "tokenizer_config.json", **fields)
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
        tokenizers.read_language_model(folder, ENCODER, LENGTH)


@pytest.mark.parametrize(("tokens", "fits"), [(8, True), (9, False)])
def test_prompts_must_fit_the_encoders_sliding_window(folders, tokens, fits):
    encoder = dataclasses.replace(ENCODER, sliding_window=8)
    expected = contextlib.nullcontext() if fits else pytest.raises(ValueError)
    with expected as caught:
        tokenizers.read_language_model(folders["tokenizer.json"], encoder, tokens)
    assert fits or "sliding_window" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", None, r"tokenizer_config\.json is missing"),
        ("tokenizer.json", None, r"no vocabulary: tokenizer\.json is missing, and so is vocab"),
        ("tokenizer.json", "{", r"tokenizer\.json is not JSON"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("chat_template.jinja", None, r"no chat template: chat_template\.jinja is missing"),
        ("chat_template.jinja", "{{ messages", "chat template in .* cannot be used"),
        (
            "chat_template.jinja",
            "{{ raise_exception('no') }}",
            "chat template in .* cannot be used",
        ),
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
    with pytest.raises(
        ValueError, match="ids up to 302, but vocab_size of its text encoder is 302"
    ):
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
    with pytest.raises(ValueError, match="makes 3 tokens of the beginning of the model's template"):
        tokenizers.read_language_model(whole, ENCODER, LENGTH, head=(head, 4))
    large = dataclasses.replace(ENCODER, vocab_size=607)
    with pytest.raises(ValueError, match=r"has 303 tokens, but vocab_size .* is 607: they do not"):
        tokenizers.read_language_model(whole, large, LENGTH)
