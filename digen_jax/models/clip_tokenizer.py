"""CLIP's tokenizer, read from a pipeline folder and checked against its text encoder."""

import pathlib
from typing import Any

from digen_jax.models.clip_text import CLIPTextConfig
from digen_jax.weights.folder import read_json

# Either set of files contains the vocabulary.
FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def read(folder: pathlib.Path, encoder: CLIPTextConfig) -> Any:
    """The `CLIPTokenizer` in a folder.

    Args:
      folder: with tokenizer_config.json, and tokenizer.json or vocab.json and merges.txt.
      encoder: the tokenizer's ids must be among its tokens, and the length within its positions.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    # Imported here, as it takes a second, which would delay the error for a mistake in a command.
    from transformers import CLIPTokenizer

    _check_files(folder)
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder)
    # The library raises any error of its parsers, even a bare Exception.
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
    length, tokens = tokenizer.model_max_length, len(tokenizer)
    if length > encoder.max_position_embeddings:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be at most "
            f"{encoder.max_position_embeddings}, the positions of its text encoder, and is {length:g}"
        )
    if tokens > encoder.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokens} tokens, but its text encoder {encoder.vocab_size}: "
            "they do not belong together"
        )
    return tokenizer


def _check_files(folder: pathlib.Path) -> None:
    config = read_json(folder / "tokenizer_config.json")
    length = config.get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int) or length < 3:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be the number of tokens that the text "
            f"encoder reads, 3 or more, and is {length}"
        )
    if not any(all((folder / name).is_file() for name in names) for names in FILES):
        raise ValueError(
            f"{folder} holds no vocabulary: tokenizer.json is missing, and so is vocab.json or merges.txt"
        )
    for name in ("tokenizer.json", "vocab.json"):
        if (folder / name).is_file():
            read_json(folder / name)
