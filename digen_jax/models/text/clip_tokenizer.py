"""CLIP's tokenizer, read from a pipeline folder and checked against its text encoder."""

import pathlib
from typing import Any

from digen_jax.models.text.clip_text import CLIPTextConfig
from digen_jax.models.text.tokenizer_files import open_tokenizer
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
    _check_length(folder)
    tokenizer = open_tokenizer(folder, "CLIPTokenizer", FILES, encoder.vocab_size)
    length = tokenizer.model_max_length
    if length > encoder.max_position_embeddings:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be at most "
            f"{encoder.max_position_embeddings}, the positions of its text encoder, and is {length:g}"
        )
    return tokenizer


def _check_length(folder: pathlib.Path) -> None:
    length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int) or length < 3:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be the number of tokens that the text "
            f"encoder reads, 3 or more, and is {length}"
        )
