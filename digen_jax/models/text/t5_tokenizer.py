"""The tokenizer of T5 and UMT5, read from a pipeline folder and checked against its text encoder."""

import pathlib
from typing import Any

from digen_jax.models.text.t5 import T5Config
from digen_jax.models.text.tokenizer_files import GENERAL, class_name, open_tokenizer

# Next to it is the same vocabulary as spiece.model, to read which transformers needs the package sentencepiece.
FILES = (("tokenizer.json",),)


def read(folder: pathlib.Path, encoder: T5Config) -> Any:
    """The `T5Tokenizer` in a folder, which pipelines of Wan use as well.

    Args:
      folder: with tokenizer_config.json and tokenizer.json.
      encoder: the tokenizer's ids must be among its tokens.

    Raises:
      ValueError: names the missing or broken file, or the number that does not fit.
    """
    class_name(folder, ("T5Tokenizer", *GENERAL), named=False)
    return open_tokenizer(folder, "T5Tokenizer", FILES, encoder.vocab_size)
