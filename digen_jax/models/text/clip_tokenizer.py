"""CLIP's tokenizer, read from a pipeline folder and checked against its text encoder."""

import pathlib
from typing import Any

from digen_jax.checkpoints.folder import read_json
from digen_jax.models.text.clip_text import LEGACY_EOS, CLIPTextConfig
from digen_jax.models.text.tokenizer_files import ANOTHER, GENERAL, class_name, open_tokenizer

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
    class_name(folder, ("CLIPTokenizer", *GENERAL), named=False)
    _check_length(folder)
    tokenizer = open_tokenizer(folder, "CLIPTokenizer", FILES, encoder.vocab_size)
    length = tokenizer.model_max_length
    if length > encoder.max_position_embeddings:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be at most "
            f"{encoder.max_position_embeddings}, the positions of its text encoder, and is {length:g}"
        )
    _check_end(folder, tokenizer, encoder)
    return tokenizer


def _check_end(folder: pathlib.Path, tokenizer: Any, encoder: CLIPTextConfig) -> None:
    """Refuses an end token that the text encoder would not find, at which it reads the summary of a prompt."""
    end, said = tokenizer.eos_token_id, encoder.eos_token_id
    wanted = max(tokenizer.get_vocab().values()) if said == LEGACY_EOS else said
    if end != wanted:
        raise ValueError(
            f"the eos_token of the tokenizer in {folder} has the id {end}, but its text encoder looks for {wanted}: "
            f"{ANOTHER}"
        )


def _check_length(folder: pathlib.Path) -> None:
    length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(length, bool) or not isinstance(length, int) or length < 3:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be the number of tokens that the text "
            f"encoder reads, 3 or more, and is {length}"
        )
