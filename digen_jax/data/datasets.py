"""Datasets as prompt files: `hf:` names a dataset on the Hugging Face Hub, `tfds:` a TensorFlow Datasets folder.

    hf:OWNER/NAME[/SUBSET][:SPLIT[:COLUMN]]
    tfds:FOLDER[:SPLIT[:COLUMN]]

Each row of the split is read like a line of a .jsonl file. COLUMN holds the prompts; other columns are metadata.

The Hub converts every public dataset to Parquet files on a branch of its repository: SUBSET/SPLIT/NUMBER.parquet on
refs/convert/parquet. They are downloaded into the `huggingface_hub` cache and read with pyarrow, which
tensorflow-datasets also requires. Without a network, the cache is used.

A TFDS folder, such as ~/tensorflow_datasets/NAME/1.0.0, must contain array_record files (`download_and_prepare(
file_format="array_record")`), which are read without TensorFlow.
"""

import functools
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from digen_jax.data.prompt_files import HUB, TFDS, first_numbers
from digen_jax.files import in_home

BRANCH = "refs/convert/parquet"
FORM = re.compile(
    r"(?:hf:(?P<repository>[\w-][\w.-]*/[\w.-]+)(?:/(?P<subset>[\w.-]+))?|tfds:(?P<folder>[^:]+))"
    r"(?::(?P<split>[\w.-]+)(?::(?P<column>.+))?)?"
)
DEFAULTS = {"subset": "default", "split": "train", "column": "prompt"}


@functools.cache  # a run reads its prompt files several times
def read_rows(name: str) -> bytes:
    """Reads the rows of a dataset as JSON lines with the field "prompt"; line n is row n, starting at 1.

    Rows without a prompt become blank lines and are reported. Columns with bytes, such as images, are dropped.

    Raises:
      ValueError: The name is invalid, or the dataset or its columns cannot be read.
    """
    found = FORM.fullmatch(name)
    if not found:
        raise ValueError(
            f"{name} is not a data set of the Hub: write hf:owner/name, hf:owner/name/subset, or one of these "
            "with :split or :split:column behind it; tfds:folder is one of TensorFlow Datasets"
        )
    place = DEFAULTS | {field: text for field, text in found.groupdict().items() if text}
    read = _read_tfds if "folder" in place else _read_hub
    rows = [_to_record(row, place["column"]) for row in read(name, place)]
    if without := [number for number, row in enumerate(rows, start=1) if row is None]:
        print(
            f"{name}: {len(without):,} of {len(rows):,} rows hold no text in the column {place['column']!r} and are "
            f"left out: {first_numbers(without)}",
            file=sys.stderr,
            flush=True,
        )
    return b"\n".join(b"" if row is None else json.dumps(row, default=str).encode() for row in rows)


def _to_record(row: dict[str, Any], column: str) -> dict[str, Any] | None:
    prompt = row.pop(column, None)
    if not isinstance(prompt, str) or not prompt.strip():
        return None
    # Missing values are null or NaN (NaN != NaN) in a table.
    given = {name: value for name, value in row.items() if value is not None and value == value}
    return given | {"prompt": prompt}


def _read_hub(name: str, place: dict[str, str]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as parquet  # slow import that few runs need

    repository, subset, split = (place[field] for field in ("repository", "subset", "split"))
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            repo_type="dataset",
            revision=BRANCH,
            allow_patterns=[f"{subset}/{split}/*.parquet"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, ConnectionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot be downloaded (check the name, the network, and whether the data set's page on the hub "
            f"shows its rows), or write its prompts to a .jsonl file: {reason}"
        ) from error
    files = sorted(pathlib.Path(folder, subset, split).glob("*.parquet"))
    if not files:
        raise ValueError(
            f"{name} has no rows in the subset {subset!r} and the split {split!r}: write "
            f"{HUB}{repository}/SUBSET:SPLIT with the names on the data set's page on the hub"
        )
    for file in files:
        schema = parquet.read_schema(file)
        _check_column(name, place["column"], schema.names, f"{HUB}{repository}/{subset}:{split}")
        columns = [field.name for field in schema if not _has_bytes(field.type)]
        for batch in parquet.ParquetFile(file).iter_batches(columns=columns):
            yield from batch.to_pylist()


def _check_column(name: str, column: str, columns: Sequence[str], start: str) -> None:
    if column not in columns:
        raise ValueError(
            f"{name} has no column {column!r}, but {', '.join(map(repr, columns))}: write {start}:COLUMN"
        )


def _has_bytes(kind: Any) -> bool:
    """Returns whether a pyarrow type is or contains bytes, such as an encoded image."""
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))


def _read_tfds(name: str, place: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the text and numeric fields of each record."""
    import tensorflow_datasets as tfds  # slow import that few runs need

    folder, split, column = (place[field] for field in ("folder", "split", "column"))
    # TFDS, array_record and protobuf each define their own exception types.
    try:
        builder = tfds.builder_from_directory(in_home(folder))
        features = builder.info.features
        columns = [key for key, one in features.items() if one.shape == ()]
        skipped = {key: tfds.decode.SkipDecoding() for key in features if key not in columns}
        source = builder.as_data_source(split=split, decoders=skipped)
        rows = [{key: _plain(row[key]) for key in columns} for row in source]
    except Exception as error:
        reason = str(error).partition("\n")[0][:100]
        raise ValueError(
            f"{name} cannot be read ({reason}): give the folder of a version, such as "
            f"{TFDS}~/tensorflow_datasets/NAME/1.0.0:SPLIT, with array_record files"
        ) from error
    _check_column(name, column, columns, f"{TFDS}{folder}:{split}")
    yield from rows


def _plain(value: Any) -> str | float | int | bool:
    if value is None:  # array_record returns None for truncated files
        raise ValueError("a record is empty")
    return value.decode() if isinstance(value, bytes) else np.asarray(value).item()
