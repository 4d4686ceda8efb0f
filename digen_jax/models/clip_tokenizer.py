"""CLIP's tokenizer, read from a pipeline's folder and checked against the text encoder that gets its ids."""

import pathlib
from typing import Any

from digen_jax.models.clip_text import CLIPTextConfig
from digen_jax.weights.folder import read_json

# Either holds the vocabulary.
FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def read(folder: pathlib.Path, encoder: CLIPTextConfig) -> Any:
    """The `CLIPTokenizer` in a folder.

    Args:
      folder: with tokenizer_config.json, and tokenizer.json or vocab.json and merges.txt.
      encoder: its ids must be among this encoder's tokens, its length within the encoder's positions.

    Raises:
      ValueError: names the file that is missing or broken, or the number that does not fit.
    """
    # Here, as it takes a second, which a mistake in a command should not have to wait for.
    from transformers import CLIPTokenizer

    _check_files(folder)
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder)
    # The library raises whatever its parsers meet, down to bare Exception.
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
