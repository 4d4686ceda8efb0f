"""A language model's tokenizer, read from a pipeline folder and checked against its text encoder."""

import pathlib
from collections.abc import Sequence
from typing import Any

from digen_jax.models.text.language_model_config import LanguageModelConfig
from digen_jax.models.text.tokenizer_files import open_tokenizer
from digen_jax.weights.folder import read_json

# transformers' classes. Its AutoTokenizer, which would choose among them, imports torch.
CLASSES = ("Qwen2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
# Either set of files contains the vocabulary; only the first class knows the rules that belong to the second.
FILES = ("tokenizer.json",)
OTHER_FILES = ("vocab.json", "merges.txt")


def read(folder: pathlib.Path, encoder: LanguageModelConfig, chats: bool = False) -> Any:
    """The tokenizer in a folder, of one of `CLASSES`.

    Args:
      folder: with tokenizer_config.json, and tokenizer.json or vocab.json and merges.txt.
      encoder: the tokenizer's ids must be among its tokens.
      chats: whether `chat` will be called, for which there must be a chat template.

    Raises:
      ValueError: names the missing or broken file, or what does not fit.
    """
    name = _class_name(folder)
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
    return tokenizer


def _class_name(folder: pathlib.Path) -> str:
    """The class that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    said = read_json(path).get("tokenizer_class")
    name = str(said).removesuffix("Fast")
    if name not in CLASSES:
        raise ValueError(
            f"{path}: tokenizer_class must be one of {', '.join(CLASSES)} and is {said!r}"
        )
    return name


def _check_template(folder: pathlib.Path, tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder} holds no chat template: chat_template.jinja is missing, and so is chat_template in "
            "tokenizer_config.json"
        )
    try:
        chat(tokenizer, [""], thinking=True)
    # Templates raise jinja2's errors and their own.
    except Exception as error:
        raise ValueError(f"the chat template in {folder} cannot be used: {error}") from error


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
