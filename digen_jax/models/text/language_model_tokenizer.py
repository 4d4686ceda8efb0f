"""A language model's tokenizer, read from a pipeline folder and checked against its text encoder."""

import pathlib
import re
from collections.abc import Sequence
from typing import Any

from digen_jax.models.text.language_model_config import LanguageModelConfig
from digen_jax.models.text.tokenizer_files import GENERAL, class_name, has_words, open_tokenizer

# transformers' classes. Its AutoTokenizer, which would choose among them, imports torch.
CLASSES = ("Qwen2Tokenizer", "LlamaTokenizer", *GENERAL)
# Either set of files contains the vocabulary; only the first class knows the rules that belong to the second.
FILES = ("tokenizer.json",)
OTHER_FILES = ("vocab.json", "merges.txt")


# Marks of a chat's turns, such as <|im_start|>.
MARK = re.compile(r"<\|\w+\|>")


def read(
    folder: pathlib.Path,
    encoder: LanguageModelConfig,
    tokens: int,
    chats: bool = False,
    head: tuple[str, int] | None = None,
) -> Any:
    """The tokenizer in a folder, of one of `CLASSES`.

    Args:
      folder: with tokenizer_config.json, and tokenizer.json or vocab.json and merges.txt.
      encoder: the tokenizer's ids must be among its tokens.
      tokens: tokens of a prompt, including `head` and padding, which must fit the encoder's sliding window.
      chats: whether `chat` will be called, for which there must be a chat template.
      head: the beginning of a template of the caller's own, and its number of tokens. None means no such template.

    Raises:
      ValueError: names the missing or broken file, or what does not fit.
    """
    _check_window(folder.with_name("text_encoder") / "config.json", encoder, tokens, head)
    name = class_name(folder, CLASSES)
    fast = "PreTrainedTokenizerFast" if name == "PreTrainedTokenizer" else name
    files = (FILES, OTHER_FILES) if name == CLASSES[0] else (FILES,)
    tokenizer = open_tokenizer(folder, fast, files, encoder.vocab_size)
    config = folder / "tokenizer_config.json"
    if tokenizer.padding_side != "right":
        raise ValueError(
            f"{config}: padding_side must be 'right' and is {tokenizer.padding_side!r}"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(f"{config}: pad_token is missing; name one of the vocabulary's tokens")
    if chats:
        _check_template(folder, tokenizer)
    if head is not None:
        if tokenizer.truncation_side != "right":
            raise ValueError(
                f"{config}: truncation_side must be 'right', as the states of the template's beginning are dropped, "
                f"and is {tokenizer.truncation_side!r}"
            )
        _check_head(folder, tokenizer, *head)
    return tokenizer


def _check_window(
    path: pathlib.Path, encoder: LanguageModelConfig, tokens: int, head: tuple[str, int] | None
) -> None:
    """Raises ValueError if prompts are longer than the encoder's sliding window; `path` is its config.json."""
    window = encoder.sliding_window
    if window is None or tokens <= window:
        return
    most = window - (head[1] if head else 0)
    fix = (
        f"set config.model.max_sequence_length to {most} or less"
        if most > 0
        else "the beginning of the prompt template alone fills it, so this model cannot be used"
    )
    raise ValueError(
        f"{path}: its layers attend to sliding_window = {window} tokens, and prompts have {tokens}: {fix}"
    )


def _check_head(folder: pathlib.Path, tokenizer: Any, text: str, expected: int) -> None:
    """Refuses a tokenizer by which the states that are dropped would not be those of the template's beginning."""
    _check_marks(folder, tokenizer, text)
    found = len(tokenizer(text)["input_ids"])
    if found != expected and has_words(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} makes {found} tokens of the beginning of the model's template, which must be "
            f"{expected}: it is another model's, so take it from the folder of the text encoder's model"
        )


def _check_marks(folder: pathlib.Path, tokenizer: Any, text: str) -> None:
    """Refuses a tokenizer to which a mark in a chat is ordinary text."""
    for mark in sorted({*MARK.findall(text)}):
        if tokenizer.tokenize(mark) != [mark]:
            raise ValueError(
                f"the tokenizer in {folder} has no token {mark}, which the template of prompts needs: it is another "
                "model's, so take it from the folder of the text encoder's model"
            )


def _check_template(folder: pathlib.Path, tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder} holds no chat template: chat_template.jinja is missing, and so is chat_template in "
            "tokenizer_config.json"
        )
    try:
        (text,) = chat(tokenizer, [""], thinking=True)
    # Templates raise jinja2's errors and their own.
    except Exception as error:
        raise ValueError(f"the chat template in {folder} cannot be used: {error}") from error
    _check_marks(folder, tokenizer, text)


def chat(tokenizer: Any, prompts: Sequence[str], thinking: bool) -> list[str]:
    """Each prompt as a user's turn before the assistant's, by the tokenizer's chat template.

    Args:
      tokenizer: with a chat template.
      prompts: texts.
      thinking: Qwen3's `enable_thinking`; False adds an empty thought to the assistant's turn.
    """
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        for prompt in prompts
    ]
