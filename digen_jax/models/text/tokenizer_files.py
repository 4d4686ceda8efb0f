"""Tokenizers of transformers: read from a pipeline folder, checked against their text encoders, and applied."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from digen_jax.checkpoints.folder import read_json

# Classes that a tokenizer of any kind may be saved as.
GENERAL = ("PreTrainedTokenizer", "TokenizersBackend")
ANOTHER = "they do not belong together: take both folders from one model"


def open_tokenizer(
    folder: pathlib.Path, kind: str, files: Sequence[tuple[str, ...]], vocab_size: int
) -> Any:
    """The tokenizer in a folder.

    Args:
      folder: with tokenizer_config.json and one of the sets of files.
      kind: its class in transformers.
      files: sets of files, each of which contains the vocabulary.
      vocab_size: of the text encoder, which must know all tokens, and not many more.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    # Imported here, as it takes a second, which would delay the error for a mistake in a command.
    import transformers

    _check_files(folder, files)
    try:
        tokenizer = getattr(transformers, kind).from_pretrained(folder)
    # The library raises any error of its parsers, even a bare Exception.
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
    _check_vocabulary(folder, tokenizer, vocab_size)
    return tokenizer


def class_name(folder: pathlib.Path, classes: Sequence[str], named: bool = True) -> str:
    """The class that tokenizer_config.json names, without "Fast".

    Args:
      folder: of the tokenizer.
      classes: those that are supported.
      named: whether it must be named; if not, and it is not, the first of the classes is meant.

    Raises:
      ValueError: it is another one.
    """
    path = folder / "tokenizer_config.json"
    said = read_json(path).get("tokenizer_class")
    if said is None and not named:
        return classes[0]
    name = str(said).removesuffix("Fast")
    if name not in classes:
        raise ValueError(
            f"{path}: tokenizer_class must be one of {', '.join(classes)} and is {said!r}"
        )
    return name


def has_words(tokenizer: Any) -> bool:
    """Whether any token but the special ones has a letter; there is none in `models.published`."""
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return any(map(str.isalpha, "".join(tokenizer.get_vocab().keys() - special)))


def known_words(family: Any) -> tuple[str, ...]:
    """The words that a model can read, of a tokenizer_config.json that lists them; empty for any other model.

    Such a model, as the embedded one, was trained on captions of few words, and spells all others in letters.
    """
    tokenizers = getattr(family, "tokenizers", ())
    return tuple(tokenizers[0].init_kwargs.get("words", ())) if tokenizers else ()


def _check_vocabulary(folder: pathlib.Path, tokenizer: Any, vocab_size: int) -> None:
    """Refuses ids that the text encoder does not know; and few ids, which mean other words to it."""
    ids = tokenizer.get_vocab().values()
    last = max(ids)
    if last >= vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has ids up to {last}, but vocab_size of its text encoder is {vocab_size}: "
            f"{ANOTHER}"
        )
    # Published vocabularies fill 99% and more.
    if len(ids) < vocab_size / 2 and has_words(tokenizer):
        raise ValueError(
            f"the tokenizer in {folder} has {len(ids)} tokens, but vocab_size of its text encoder is {vocab_size}: "
            f"{ANOTHER}"
        )


def padded(
    tokenizer: Any, prompts: Sequence[str], length: int
) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
    """Ids of prompts that are padded or truncated to `length` tokens, and which of them are not padding."""
    found = tokenizer(list(prompts), padding="max_length", truncation=True, max_length=length)
    return np.asarray(found["input_ids"], np.int32), np.asarray(found["attention_mask"], bool)


def longer(lengths: Sequence[tuple[Any, int]], prompts: Sequence[str]) -> Bool[np.ndarray, "b"]:
    """Which prompts have more tokens than fit, for any of several (tokenizer, number of tokens)."""
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
