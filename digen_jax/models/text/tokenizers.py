"""Reads tokenizers of transformers from a pipeline folder, checks them against text encoders, and applies them."""

import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jaxtyping import Bool, Int

from digen_jax.files import read_json
from digen_jax.models.text.clip_text import LEGACY_EOS, CLIPTextConfig
from digen_jax.models.text.t5 import T5Config

if TYPE_CHECKING:  # only families with a language model import it
    from digen_jax.models.text.language_model import LanguageModelConfig

# Generic classes that any tokenizer may be saved as.
GENERAL = ("PreTrainedTokenizer", "TokenizersBackend")
# transformers' tokenizer classes of language models. AutoTokenizer, which would choose one of them, imports torch.
CLASSES = ("Qwen2Tokenizer", "LlamaTokenizer", *GENERAL)
# Either set of files contains the vocabulary. Next to tokenizer.json a T5 also has it as spiece.model, but transformers
# needs the package sentencepiece to read that. Of the language models' classes only the first has the rules of the
# second set.
ONE_FILE, TWO_FILES = ("tokenizer.json",), ("vocab.json", "merges.txt")
# Markers of chat turns, such as <|im_start|>.
MARK = re.compile(r"<\|\w+\|>")
ANOTHER = "they do not belong together: take both folders from one model"


def open_tokenizer(
    folder: pathlib.Path, kind: str, files: Sequence[tuple[str, ...]], vocab_size: int
) -> Any:
    """Opens the tokenizer in a folder.

    Args:
      folder: Folder with tokenizer_config.json and one of the sets of files.
      kind: transformers class of the tokenizer.
      files: Sets of files that each contain the vocabulary.
      vocab_size: Vocabulary of the text encoder, which must cover all tokens and not be much larger.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    # Imported lazily: the import takes a second, which would delay errors about a command.
    import transformers

    _check_files(folder, files)
    try:
        tokenizer = getattr(transformers, kind).from_pretrained(folder)
    # The library's parsers can raise any error, including a bare Exception.
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
    _check_vocabulary(folder, tokenizer, vocab_size)
    return tokenizer


def class_name(folder: pathlib.Path, classes: Sequence[str], named: bool = True) -> str:
    """Returns the class in tokenizer_config.json, without "Fast".

    Args:
      folder: Folder of the tokenizer.
      classes: Supported classes.
      named: Whether the file must name a class; otherwise the default is the first class.

    Raises:
      ValueError: the class is not supported.
    """
    path = folder / "tokenizer_config.json"
    found = read_json(path).get("tokenizer_class")
    if found is None and not named:
        return classes[0]
    name = str(found).removesuffix("Fast")
    if name not in classes:
        raise ValueError(
            f"{path}: tokenizer_class must be one of {', '.join(classes)} and is {found!r}"
        )
    return name


def has_words(tokenizer: Any) -> bool:
    """Returns whether any non-special token has two letters; tokenizers in `models.published`, and bytes, have none."""
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    words = tokenizer.get_vocab().keys() - special
    return any(sum(map(str.isalpha, word)) > 1 for word in words)


def known_words(family: Any) -> tuple[str, ...]:
    """Returns the words in a model's tokenizer_config.json that the model can read; empty if there is no list.

    Such a model, for example the embedded one, was trained on captions of few words, and spells all others in letters.
    """
    tokenizer = getattr(family, "tokenizer", None)
    return tuple(tokenizer.init_kwargs.get("words", ())) if tokenizer is not None else ()


def _check_vocabulary(folder: pathlib.Path, tokenizer: Any, vocab_size: int) -> None:
    """Checks that the text encoder knows all ids, and that the vocabulary is not too small to belong to it."""
    ids = tokenizer.get_vocab().values()
    last = max(ids)
    if last >= vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has ids up to {last}, but vocab_size of its text encoder is {vocab_size}: "
            f"{ANOTHER}"
        )
    # Published vocabularies fill at least 99%.
    if len(ids) < vocab_size / 2 and has_words(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} has {len(ids)} tokens, but vocab_size of its text encoder is {vocab_size}: "
            f"{ANOTHER}"
        )


def padded(
    tokenizer: Any, prompts: Sequence[str], length: int
) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
    """Returns ids of prompts padded or truncated to `length` tokens, and a mask that is False for padding."""
    found = tokenizer(list(prompts), padding="max_length", truncation=True, max_length=length)
    return np.asarray(found["input_ids"], np.int32), np.asarray(found["attention_mask"], bool)


def longer(lengths: Sequence[tuple[Any, int]], prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
    """Returns which prompts exceed the limit of any (tokenizer, number of tokens) pair."""
    found = [
        [
            len(ids) > limit
            for ids in tokenizer(list(prompts), truncation=True, max_length=limit + 1).input_ids
        ]
        for tokenizer, limit in lengths
    ]
    return np.any(found, axis=0)


def _check_files(folder: pathlib.Path, files: Sequence[tuple[str, ...]]) -> None:
    read_json(folder / "tokenizer_config.json")
    if not any(all((folder / name).is_file() for name in names) for names in files):
        missing = " is missing, and so is ".join(" or ".join(names) for names in files)
        end = " is missing" if len(files) == 1 else ""
        raise ValueError(f"{folder} holds no vocabulary: {missing}{end}")
    for name in {name for names in files for name in names if name.endswith(".json")}:
        if (folder / name).is_file():
            read_json(folder / name)


def read(folder: pathlib.Path, encoder: CLIPTextConfig | T5Config) -> Any:
    """Reads a tokenizer (see `read_clip` and `read_t5`)."""
    return cast(Any, read_clip if isinstance(encoder, CLIPTextConfig) else read_t5)(folder, encoder)


def read_clip(folder: pathlib.Path, encoder: CLIPTextConfig) -> Any:
    """Reads the `CLIPTokenizer` in a folder.

    Args:
      folder: Folder with tokenizer_config.json, and tokenizer.json or vocab.json and merges.txt.
      encoder: Config of the text encoder, whose vocabulary and positions must fit the tokenizer.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    class_name(folder, ("CLIPTokenizer", *GENERAL), named=False)
    _check_clip_length(folder)
    tokenizer = open_tokenizer(folder, "CLIPTokenizer", (ONE_FILE, TWO_FILES), encoder.vocab_size)
    length = tokenizer.model_max_length
    if length > encoder.max_position_embeddings:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be at most "
            f"{encoder.max_position_embeddings}, the positions of its text encoder, and is {length:g}"
        )
    _check_clip_end(folder, tokenizer, encoder)
    return tokenizer


def _check_clip_end(folder: pathlib.Path, tokenizer: Any, encoder: CLIPTextConfig) -> None:
    """Checks that the text encoder pools at the tokenizer's end token."""
    end, configured = tokenizer.eos_token_id, encoder.eos_token_id
    wanted = max(tokenizer.get_vocab().values()) if configured == LEGACY_EOS else configured
    if end != wanted:
        raise ValueError(
            f"the eos_token of the tokenizer in {folder} has the id {end}, but its text encoder looks for {wanted}: "
            f"{ANOTHER}"
        )


def _check_clip_length(folder: pathlib.Path) -> None:
    length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int) or length < 3:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be the number of tokens that the text "
            f"encoder reads, 3 or more, and is {length}"
        )


def read_t5(folder: pathlib.Path, encoder: T5Config) -> Any:
    """Reads the `T5Tokenizer` in a folder, which pipelines of Wan use as well.

    Args:
      folder: Folder with tokenizer_config.json and tokenizer.json.
      encoder: Config of the text encoder, whose vocabulary must cover the tokenizer's ids.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    class_name(folder, ("T5Tokenizer", *GENERAL), named=False)
    return open_tokenizer(folder, "T5Tokenizer", (ONE_FILE,), encoder.vocab_size)


def read_byt5(folder: pathlib.Path, encoder: T5Config) -> Any:
    """Reads the `ByT5Tokenizer` in a folder, whose tokens are bytes and the ones that its files add.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    class_name(folder, ("ByT5Tokenizer",), named=False)
    return open_tokenizer(folder, "ByT5Tokenizer", ((),), encoder.vocab_size)


def read_language_model(
    folder: pathlib.Path,
    encoder: "LanguageModelConfig",
    tokens: int,
    chats: bool = False,
    head: tuple[str, int] | None = None,
) -> Any:
    """Reads the tokenizer in a folder, of one of `CLASSES`.

    Args:
      folder: Folder with tokenizer_config.json, and tokenizer.json or vocab.json and merges.txt.
      encoder: Config of the language model, whose vocabulary must cover the tokenizer's ids.
      tokens: Tokens of a prompt, including `head` and padding, which must fit the encoder's sliding window.
      chats: Whether `chat` will be called, which requires a chat template.
      head: Prefix of the caller's template, and its number of tokens. None means no such template.

    Raises:
      ValueError: names the missing or broken file, or the value that does not fit.
    """
    _check_window(folder.with_name("text_encoder") / "config.json", encoder, tokens, head)
    name = class_name(folder, CLASSES)
    # Llama 3's tokenizer.json is not read by LlamaTokenizer, which has the rules of Llama 2.
    general = name in ("PreTrainedTokenizer", "LlamaTokenizer")
    fast = "PreTrainedTokenizerFast" if general else name
    files = (ONE_FILE, TWO_FILES) if name == CLASSES[0] else (ONE_FILE,)
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
                f"{config}: truncation_side must be 'right', as the states of the template's start are "
                f"dropped, and is {tokenizer.truncation_side!r}"
            )
        _check_head(folder, tokenizer, *head)
    return tokenizer


def _check_window(
    path: pathlib.Path, encoder: "LanguageModelConfig", tokens: int, head: tuple[str, int] | None
) -> None:
    """Raises ValueError if prompts are longer than the encoder's sliding window; `path` is its config.json."""
    window = encoder.sliding_window
    if window is None or tokens <= window:
        return
    most = window - (head[1] if head else 0)
    fix = (
        f"set config.model.max_sequence_length to {most} or less"
        if most > 0
        else "the start of the prompt template alone fills it, so this model cannot be used"
    )
    raise ValueError(
        f"{path}: its layers attend to sliding_window = {window} tokens, and prompts have {tokens}: {fix}"
    )


def _check_head(folder: pathlib.Path, tokenizer: Any, text: str, expected: int) -> None:
    """Checks that the template's prefix has the expected number of tokens, so that exactly its states are dropped."""
    check_marks(folder, tokenizer, text)
    found = len(tokenizer(text)["input_ids"])
    if found != expected and has_words(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} returns {found} tokens for the start of the model's template, which "
            f"must be {expected}: it is another model's, so take it from the folder of the text encoder's "
            "model"
        )


def check_marks(folder: pathlib.Path, tokenizer: Any, text: str) -> None:
    """Checks that each chat marker in `text` is a single token."""
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
    # Templates can raise jinja2's errors and custom ones.
    except Exception as error:
        raise ValueError(f"the chat template in {folder} cannot be used: {error}") from error
    check_marks(folder, tokenizer, text)


def chat(tokenizer: Any, prompts: Sequence[str], thinking: bool) -> list[str]:
    """Formats each prompt as a user turn before the assistant's, with the tokenizer's chat template.

    Args:
      tokenizer: Tokenizer with a chat template.
      prompts: Prompt texts.
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
