"""Tokenizers like Qwen's, made offline: byte-level BPE of a few hundred tokens, with a chat template."""

import json
import pathlib

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["a photo of a red circle left of two blue squares", "<think></think> user assistant"]
# What Qwen3's template does for a user's turn; an empty thought if enable_thinking is false.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif -%}{%- endif -%}"
)


def backend(
    size: int = 300, texts: tuple[str, ...] = (), special: list[str] = SPECIAL
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *texts], trainer)
    # Behind the others, as Qwen's.
    tokenizer.add_special_tokens(special)
    return tokenizer


def save(
    folder: pathlib.Path,
    template: str | None = TEMPLATE,
    size: int = 300,
    texts: tuple[str, ...] = (),
    special: tuple[str, ...] = (),
) -> pathlib.Path:
    """A folder with tokenizer.json, as transformers 5 writes it, of `size` tokens, 3 special ones, and `special`.

    The tokens are those that shorten TEXTS and `texts` most.
    """
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=backend(size, texts, [*SPECIAL, *special]),
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def in_old_files(folder: pathlib.Path, old: pathlib.Path) -> pathlib.Path:
    """A folder with the same tokenizer in vocab.json and merges.txt, as versions before wrote it."""
    old.mkdir()
    whole = json.loads((folder / "tokenizer.json").read_text())
    (old / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = "\n".join(map(" ".join, whole["model"]["merges"]))
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    config["added_tokens_decoder"] = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in whole["added_tokens"]
    }
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text()
    (old / "tokenizer_config.json").write_text(json.dumps(config))
    return old
